"""``DFlashSpeculativeDecoder``: text in, the target's own text out, faster.

Knows prompts, stop tokens, stop strings, limits and timing. Must not know how a block is decoded
(``decode.py``) or any architecture (``adapters``).
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal, cast, overload

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import wired_limit
from mlx_lm.sample_utils import make_sampler

from .adapters import TargetAdapter
from .decode import Block, DecodeState, decode, prefill
from .drafters.checkpoint import load_drafter
from .drafters.protocol import Drafter
from .errors import DFlashError, GenerationError
from .target import LoadedTargetModel, load_target
from .text import TextStream
from .verify import Sampler

PAIR = Path(__file__).parent / "pair"
"""The pair that ships with the package: ``PAIR / "target"`` and ``PAIR / "drafter"``."""

Prompt = str | Sequence[int] | mx.array


@dataclass(frozen=True)
class DFlashResponse:
    """One step of a streamed generation; the first carries the token that the prompt's own pass chose.

    Args:
        text: Text that became certain in this step, possibly empty.
        tokens: Tokens committed in this step; a stop token is included, tokens behind it are not.
        accepted: Tokens committed by this step's block, ``len(tokens)``; 0 for the first response,
            which no block made.
        drafted: Tokens that the drafter proposed in this step.
        target_tokens: The target's own choice after the anchor and after each drafted token.
        prompt_tokens: Tokens in the prompt.
        prompt_tps: Prompt tokens per second.
        generation_tokens: Tokens generated so far.
        generation_tps: Generated tokens per second, counted from the end of the prompt, as in mlx-lm.
        peak_memory: Peak memory of the process's MLX arrays in GB.
        finish_reason: ``"stop"``, ``"length"``, or ``None`` before the end.
    """

    text: str
    tokens: list[int]
    accepted: int
    drafted: list[int]
    target_tokens: list[int]
    prompt_tokens: int
    prompt_tps: float
    generation_tokens: int
    generation_tps: float
    peak_memory: float
    finish_reason: str | None = None


class DFlashSpeculativeDecoder:
    """Lossless speculative decoding of one target with one drafter, one sequence at a time.

    Args:
        target_model: A model loaded by mlx-lm, or a :class:`~dflash.target.LoadedTargetModel`.
        draft_model: A :class:`~dflash.drafters.dflash.DFlashDraftModel` or anything that follows
            :class:`~dflash.drafters.protocol.Drafter`.
        tokenizer: The target's tokenizer; ``None`` takes the one of a ``LoadedTargetModel``, and where
            there is none only :meth:`spec_generate` works.
        block_size: Positions per block, the anchor included; at most the drafter's own is used.
        max_seq_length: Longest prompt plus generation in tokens.
        adapter: The target's adapter; found by ``model_type`` when ``None``.

    Raises :class:`~dflash.errors.IncompatibleModelsError` if drafter and target do not fit, or the
    target's caches cannot be rewound exactly.
    """

    def __init__(
        self,
        target_model: nn.Module | LoadedTargetModel,
        draft_model: Drafter,
        tokenizer: Any = None,
        block_size: int = 16,
        max_seq_length: int = 8192,
        adapter: TargetAdapter | None = None,
    ):
        _require_count("block_size", block_size, 1)
        _require_count("max_seq_length", max_seq_length, 1)
        if isinstance(target_model, LoadedTargetModel):
            loaded = LoadedTargetModel(
                target_model.model, tokenizer or target_model.tokenizer, adapter or target_model.adapter
            )
        else:
            loaded = LoadedTargetModel(target_model, tokenizer, adapter)
        draft_model.bind(loaded)
        loaded.make_cache()  # refuses a cache that cannot be rewound, before the first token
        self.loaded_target = loaded
        self.target_model = loaded.model
        self.draft_model = draft_model
        self.tokenizer = loaded.tokenizer
        self.block_size = min(block_size, draft_model.block_size)
        self.max_seq_length = min(max_seq_length, loaded.max_length or max_seq_length)

    @classmethod
    def from_pretrained(
        cls, target: str | Path | None = None, drafter: str | Path | None = None, **options: Any
    ) -> "DFlashSpeculativeDecoder":
        """Load target and drafter from folders or hub names; without arguments, the pair that ships.

        ``options`` go to the constructor. Raises :class:`~dflash.errors.DFlashError` on bad checkpoints.
        """
        if (target is None) != (drafter is None):
            raise DFlashError(
                "A drafter works only with the target that it was trained for: give both, or neither for "
                "the pair that ships with the package."
            )
        return cls(load_target(target or PAIR / "target"), load_drafter(drafter or PAIR / "drafter"), **options)

    @overload
    def generate(self, prompt: Prompt, *, stream: Literal[True], **options: Any) -> Iterator[str]: ...

    @overload
    def generate(
        self,
        prompt: Prompt,
        max_tokens: int = ...,
        temperature: float = ...,
        stop_strings: Sequence[str] | None = ...,
        stream: Literal[False] = ...,
        **options: Any,
    ) -> str: ...

    def generate(
        self,
        prompt: Prompt,
        max_tokens: int = 2048,
        temperature: float = 0.0,
        stop_strings: Sequence[str] | None = None,
        stream: bool = False,
        **options: Any,
    ) -> str | Iterator[str]:
        """The target's answer to ``prompt``; with ``stream=True`` an iterator over pieces of it.

        Takes the options of :meth:`stream_generate` and raises the same errors.
        """
        responses = self.stream_generate(prompt, max_tokens, temperature, stop_strings, **options)
        pieces = (r.text for r in responses if r.text)
        return pieces if stream else "".join(pieces)

    def stream_generate(
        self,
        prompt: Prompt,
        max_tokens: int = 2048,
        temperature: float = 0.0,
        stop_strings: Sequence[str] | None = None,
        *,
        top_p: float = 0.0,
        top_k: int = 0,
        chat: bool = True,
        max_kv_size: int | None = None,
        kv_bits: int | None = None,
        kv_group_size: int = 64,
    ) -> Iterator[DFlashResponse]:
        """Generate step by step: one response for the first token, then one a block.

        Args:
            prompt: A user's message (put into the target's chat template unless ``chat=False``), or
                token ids, taken as they stand.
            max_tokens: Most tokens to generate.
            temperature: 0 for greedy; else the target's own samples are what is emitted.
            stop_strings: The text ends before the first of these; matched across token boundaries.
            top_p: Nucleus sampling, off at 0.
            top_k: Sample among the ``top_k`` most probable tokens, off at 0.
            max_kv_size: Keep at most so many tokens in the target's caches, the first four among them.
            kv_bits: Quantise the keys and values of full attention to so many bits.
            kv_group_size: Numbers that share one scale of the quantised keys and values.

        Raises :class:`~dflash.errors.GenerationError` for an empty prompt, a negative count, or a
        prompt that with ``max_tokens`` is longer than ``max_seq_length`` or the model's own limit.
        """
        if self.tokenizer is None:
            raise GenerationError("This decoder has no tokenizer; pass one, or token ids to spec_generate.")
        stop_strings = _checked_stop_strings(stop_strings)
        tokens = self.loaded_target.build_prompt(prompt, chat) if isinstance(prompt, str) else _row(prompt)
        if isinstance(prompt, str) and not prompt.strip():
            raise GenerationError("The prompt is empty; expected text.")
        steps = self._steps(
            tokens,
            max_tokens,
            _sampler(temperature, top_p, top_k),
            self.loaded_target.stop_token_ids(),
            {"max_kv_size": max_kv_size, "kv_bits": kv_bits, "kv_group_size": kv_group_size},
        )
        return self._respond(tokens, steps, TextStream(self.tokenizer.detokenizer, stop_strings))

    def spec_generate(
        self,
        input_ids: mx.array,
        max_new_tokens: int,
        temperature: float = 0.0,
        stop_token_ids: Sequence[int] | None = None,
        stream_callback: Callable[[list[int]], None] | None = None,
        *,
        max_kv_size: int | None = None,
        kv_bits: int | None = None,
        kv_group_size: int = 64,
    ) -> mx.array:
        """Token ids ``[1, prompt + generated]`` for ``input_ids [1, prompt]``.

        ``stop_token_ids`` default to the target's; a stop token ends the result and is part of it.
        ``stream_callback`` is called with each step's new tokens. The cache options and the errors are those
        of :meth:`stream_generate`.
        """
        prompt = _row(input_ids)
        stops = self.loaded_target.stop_token_ids() if stop_token_ids is None else frozenset(stop_token_ids)
        tokens = list(prompt)
        cache_options = {"max_kv_size": max_kv_size, "kv_bits": kv_bits, "kv_group_size": kv_group_size}
        for step in self._steps(prompt, max_new_tokens, _sampler(temperature), stops, cache_options):
            tokens += step.tokens
            if stream_callback is not None:
                stream_callback(step.tokens)
        return mx.array([tokens])

    def _steps(
        self,
        prompt: list[int],
        max_tokens: int,
        sampler: Sampler,
        stops: frozenset[int],
        cache_options: Mapping[str, Any],
    ) -> Iterator["_Step"]:
        """Check the request now, decode lazily: the prompt's own token, then blocks, to a stop or the limit."""
        self._check_request(prompt, max_tokens)
        self.loaded_target.make_cache(**cache_options)  # refuses options that do not fit, before the first token
        return self._decode(prompt, max_tokens, sampler, stops, cache_options)

    def _decode(
        self,
        prompt: list[int],
        max_tokens: int,
        sampler: Sampler,
        stops: frozenset[int],
        cache_options: Mapping[str, Any],
    ) -> Iterator["_Step"]:
        if max_tokens == 0:
            return
        with wired_limit(self.target_model):  # on Metal, keeps the weights resident; elsewhere nothing
            state = prefill(self.loaded_target, self.draft_model, prompt, sampler, cache_options=cache_options)
            blocks = decode(self.loaded_target, self.draft_model, state, max_tokens, self.block_size, sampler)
            generated = 0
            for block in chain([_first_block(state)], blocks):
                tokens = _through_stop(block.tokens, stops)
                generated += len(tokens)
                stopped = tokens[-1] in stops
                finish = "stop" if stopped else "length" if generated == max_tokens else None
                yield _Step(tokens, block, finish)
                if finish is not None:
                    return

    def _respond(self, prompt: list[int], steps: Iterator["_Step"], text: TextStream) -> Iterator[DFlashResponse]:
        """Add text and timing to decoded steps, and end at a stop string."""
        start, prompt_seconds, generated = time.perf_counter(), 0.0, 0
        for step in steps:
            now = time.perf_counter()
            first = generated == 0
            if first:
                prompt_seconds, start = now - start, now
            generated += len(step.tokens)
            shown = step.tokens[:-1] if step.finish_reason == "stop" else step.tokens
            piece = text.add(shown)
            finish = "stop" if text.stopped else step.finish_reason
            if finish is not None:
                piece += text.finish()
                finish = "stop" if text.stopped else finish
            yield DFlashResponse(
                text=piece,
                tokens=step.tokens,
                accepted=0 if first else len(step.tokens),
                drafted=step.block.drafted,
                target_tokens=step.block.target_tokens,
                prompt_tokens=len(prompt),
                prompt_tps=len(prompt) / prompt_seconds,
                generation_tokens=generated,
                generation_tps=generated / max(time.perf_counter() - start, 1e-9),
                peak_memory=mx.get_peak_memory() / 1e9,
                finish_reason=finish,
            )
            if finish is not None:
                return

    def _check_request(self, prompt: list[int], max_tokens: int) -> None:
        _require_count("max_tokens", max_tokens, 0)
        if not prompt:
            raise GenerationError("The prompt is empty; expected at least one token.")
        vocabulary = self.loaded_target.vocab_size
        if not 0 <= min(prompt) <= max(prompt) < vocabulary:
            raise GenerationError(f"The prompt holds token ids outside 0 to {vocabulary - 1}.")
        if len(prompt) + max_tokens > self.max_seq_length:
            raise GenerationError(
                f"A prompt of {len(prompt)} tokens plus max_tokens {max_tokens} exceeds the limit of "
                f"{self.max_seq_length} tokens; shorten the prompt or lower max_tokens."
            )


@dataclass(frozen=True)
class _Step:
    """A block cut at the first stop token."""

    tokens: list[int]
    block: Block
    finish_reason: str | None


def _first_block(state: DecodeState) -> Block:
    """The prompt's own pass seen as a block that drafted nothing."""
    return Block(drafted=[], target_tokens=state.tokens[state.prompt_length :])


def _through_stop(tokens: list[int], stops: frozenset[int]) -> list[int]:
    """``tokens`` up to and including the first stop token."""
    end = next((i for i, token in enumerate(tokens) if token in stops), len(tokens) - 1)
    return tokens[: end + 1]


def _sampler(temperature: float, top_p: float = 0.0, top_k: int = 0) -> Sampler:
    numbers = all(isinstance(value, int | float) for value in (temperature, top_p, top_k))
    if not (numbers and temperature >= 0 and top_k >= 0 and 0 <= top_p <= 1):  # so that NaN fails too
        raise GenerationError(
            f"temperature {temperature!r} and top_k {top_k!r} must be numbers of at least 0, top_p {top_p!r} "
            "between 0 and 1."
        )
    return make_sampler(temp=temperature, top_p=top_p, top_k=top_k)


def _row(tokens: Sequence[int] | mx.array) -> list[int]:
    """Token ids of one sequence, from ``[L]``, ``[1, L]`` or a list."""
    try:
        array = mx.array(tokens)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise GenerationError(f"Expected a text or token ids, got {type(tokens).__name__}: {error}.") from error
    if array.ndim == 2 and array.shape[0] != 1:
        raise GenerationError(f"Batch size {array.shape[0]} is not supported; decode one sequence at a time.")
    if array.ndim not in (1, 2) or (array.size and not mx.issubdtype(array.dtype, mx.integer)):
        raise GenerationError(f"Expected token ids of shape [length] or [1, length], got {array.shape} {array.dtype}.")
    return cast(list[int], array.reshape(-1).tolist())


def _checked_stop_strings(stop_strings: Sequence[str] | None) -> tuple[str, ...]:
    if isinstance(stop_strings, str):
        raise GenerationError(f"stop_strings must be a list of strings; did you mean [{stop_strings!r}]?")
    if any(not isinstance(s, str) or not s for s in stop_strings or ()):
        raise GenerationError("stop_strings must be non-empty strings.")
    return tuple(stop_strings or ())


def _require_count(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise GenerationError(f"{name} must be a whole number of at least {least}, got {value!r}.")
