"""``DFlashSpeculativeDecoder``: text in, the target's own text out, faster.

It loads and checks the models and keeps what lasts from one request to the next.
"""

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, overload

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import wired_limit

from .adapters import TargetAdapter
from .batches import BATCH_SIZE, stream_batch
from .core.errors import GenerationError
from .core.option import all_names, named
from .core.values import require_count
from .decoding.block import Decoding
from .decoding.inspection import inspect
from .decoding.loop import decode, prefill, prefill_context
from .decoding.stream import DFlashResponse, Step, first_block, responses, through_stop
from .decoding.text import TextStream
from .decoding.trace import TokenTexts, recording
from .drafters.checks import check_drafter, fitting_block_size
from .drafters.protocol import Drafter
from .drafters.tree import TreeDrafter
from .models import ModelOptions
from .options import DecodeOptions, decode_options
from .policies.base import Policy
from .policies.threads import threads_for
from .prompts.prompt_cache import PromptCache
from .prompts.tokens import Prompt, prompt_tokens, token_row
from .target import LoadedTargetModel, TargetCache
from .target.load import PAIR as PAIR

T = TypeVar("T")

CLOCK: Callable[[], float] = time.perf_counter
"""The clock of new decoders."""


class DFlashSpeculativeDecoder:
    """Lossless speculative decoding of one target with one drafter, one sequence at a time.

    Args:
        target_model: A model loaded by mlx-lm, or a :class:`~dflash.target.LoadedTargetModel`.
        draft_model: A :class:`~dflash.drafters.dflash.DFlashDraftModel` or anything that follows
            :class:`~dflash.drafters.protocol.Drafter`. It serves one target: for another one load it again.
        tokenizer: The target's tokenizer; ``None`` takes the one of a ``LoadedTargetModel``, and where
            there is none only token ids can be decoded, by :meth:`spec_generate`.
        block_size: Positions per block, the anchor included; the drafter's own by default. A larger one is
            lowered to the drafter's own, with a warning.
        max_seq_length: Longest prompt plus generation in tokens; the model's own limit holds as well.
        adapter: The target's adapter; found by ``model_type`` when ``None``.
        options: Defaults for every request: fields of :class:`~dflash.options.DecodeOptions`.

    :attr:`threads` says how many BLAS threads it chose on a CPU, and why
    (:class:`~dflash.policies.threads.DecodeThreads`); :attr:`clock` is the time that policies see, in seconds.

    Raises ``IncompatibleModelsError`` if drafter and target do not fit, or the
    target's caches cannot be rewound exactly, and ``GenerationError`` for impossible sizes
    and options.
    """

    def __init__(
        self,
        target_model: nn.Module | LoadedTargetModel,
        draft_model: Drafter,
        tokenizer: Any = None,
        block_size: int | None = None,
        max_seq_length: int = 8192,
        adapter: TargetAdapter | None = None,
        **options: Any,
    ):
        if block_size is not None:
            require_count("block_size", block_size, 1)
        require_count("max_seq_length", max_seq_length, 1)
        check_drafter(draft_model)
        decode_options(options)
        if isinstance(target_model, LoadedTargetModel):
            loaded = LoadedTargetModel(
                target_model.model,
                tokenizer or target_model.tokenizer,
                adapter or target_model.adapter,
                target_model.folder,
            )
        else:
            loaded = LoadedTargetModel(target_model, tokenizer, adapter)
        self.max_seq_length = min(max_seq_length, loaded.max_length or max_seq_length)
        self.block_size = fitting_block_size(block_size, draft_model.block_size, loaded.max_length)
        draft_model.bind(loaded)
        loaded.make_cache()  # refuses a cache that cannot be rewound, before the first token
        self.loaded_target = loaded
        self.target_model = loaded.model
        self.draft_model = draft_model
        self.tokenizer = loaded.tokenizer
        self.options = options
        self.threads = threads_for(loaded, self.block_size)
        self._policies: dict[tuple[str, bool], Policy] = {}
        self.clock = CLOCK
        self._texts = TokenTexts(loaded.tokenizer)

    @classmethod
    def from_pretrained(
        cls,
        target: str | Path | None = None,
        drafter: str | Path | None = None,
        **options: Any,
    ) -> "DFlashSpeculativeDecoder":
        """Load target and drafter from folders or hub names; without arguments, the bundled models.

        A ``target`` alone gets the bundled drafter that was made for it, at whatever precision it is kept. A
        ``drafter`` alone gets the bundled target, if it was trained for that one or needs no training. Both may be
        named ``"bundled"``.
        ``options`` are the other fields of :class:`~dflash.models.ModelOptions` (``trust_remote_code``, ``draft_bits``,
        ``draft_window``, ``adapter_path``, ``extra_eos_token``), and those of the constructor. mlx-lm's names ``model``
        and ``draft_model`` work too. Raises ``DFlashError`` on bad checkpoints and options, for a ``target`` alone for
        which no drafter is bundled, and for a ``drafter`` alone of another target.
        """
        loading = {name: options.pop(name) for name in all_names(ModelOptions) if name in options}
        models = ModelOptions(**named(ModelOptions, {"target": target, "drafter": drafter} | loading))
        own = ("tokenizer", "max_seq_length", "adapter")
        decode_options({name: value for name, value in options.items() if name not in own})  # before minutes of loading
        loaded = models.load_target()
        return cls(loaded, models.load_drafter(loaded), block_size=models.block_size, **options)

    @overload
    def generate(self, prompt: Prompt, *, stream: Literal[True], **options: Any) -> Iterator[str]: ...

    @overload
    def generate(
        self,
        prompt: Prompt,
        max_tokens: int | None = ...,
        temperature: float | None = ...,
        stop_strings: Sequence[str] | None = ...,
        stream: Literal[False] = ...,
        **options: Any,
    ) -> str: ...

    def generate(
        self,
        prompt: Prompt,
        max_tokens: int | None = None,
        temperature: float | None = None,
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
        max_tokens: int | None = None,
        temperature: float | None = None,
        stop_strings: Sequence[str] | None = None,
        *,
        chat: bool = True,
        system: str | None = None,
        chat_template_config: Mapping[str, Any] | None = None,
        prefill_response: str | None = None,
        **options: Any,
    ) -> Iterator[DFlashResponse]:
        """Generate step by step: one response for the first token, then one a block.

        Args:
            prompt: A user's text or the messages of a conversation, put into the target's chat template, or
                token ids, taken as they stand.
            max_tokens: Most tokens to generate; by default 2048, or as many as there is room for.
            temperature: 0, the default, is greedy; else the target's own samples are what is emitted.
            stop_strings: The text ends before the first of these; matched across token boundaries.
            chat: ``False`` takes a text as it stands, without the chat template.
            system: A system prompt, put before the prompt.
            chat_template_config: Switches of the chat template, such as ``{"enable_thinking": False}``.
            prefill_response: The beginning of the answer, after which the target goes on.
            options: Any other field of :class:`~dflash.options.DecodeOptions`: ``top_p``, ``top_k``, ``seed``,
                ``sampler``, ``logits_processors``, ``verify``, ``kv_bits``, ...

        Raises ``GenerationError`` at once for a prompt or an option that cannot be served,
        and for a prompt that with an explicit ``max_tokens`` is longer than ``max_seq_length`` or the model's
        own limit.
        """
        if self.tokenizer is None:
            raise GenerationError("This decoder has no tokenizer; pass one, or token ids to spec_generate.")
        given = {"max_tokens": max_tokens, "temperature": temperature, "stop_strings": stop_strings}
        wanted = self._request_options(given | options)
        template: dict[str, Any] = {"chat_template_config": chat_template_config, "prefill_response": prefill_response}
        tokens = prompt_tokens(self.loaded_target, prompt, chat=chat, system=system, **template)
        steps = self._steps(tokens, wanted)
        return self._recorded(tokens, wanted, steps, TextStream(self.tokenizer.detokenizer, wanted.stop_strings or ()))

    def batch_generate(self, prompts: Sequence[Prompt], **options: Any) -> list[str]:
        """The target's answers to all ``prompts``, in order; as :meth:`stream_batch`, but any error is raised."""
        responses = self.stream_batch(prompts, **options)
        texts = [""] * len(prompts)
        for number, response in responses:
            if response.error is not None:
                raise response.error
            texts[number] += response.text
        return texts

    def stream_batch(
        self,
        prompts: Sequence[Prompt],
        batch_size: int = BATCH_SIZE,
        each: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> Iterator[tuple[int, DFlashResponse]]:
        """Answer many prompts at once: ``(number, response)`` as blocks of the prompt ``number`` are committed.

        Args:
            prompts: As in :meth:`stream_generate`.
            batch_size: Most prompts that are decoded at once. As one ends, the next begins.
            each: Options of single prompts, a mapping for each, in the place of ``options``.
            options: Those of :meth:`stream_generate` for all prompts, but for what works with one text only.

        A response holds a token of the target's own and the accepted drafts after it. If a prompt's own sampler or
        processor raises, or its logits are not numbers, it ends with the ``finish_reason`` ``"error"`` and that
        ``error``, and the others go on. Raises ``GenerationError`` before the first token, as :meth:`stream_generate`
        does, and for an option that needs a text alone; ``IncompatibleModelsError``, naming a layer, for a target of
        which several texts cannot be decoded at once.
        """
        return self._alone(stream_batch(self, prompts, batch_size, each, options))

    def spec_generate(
        self,
        input_ids: mx.array | Sequence[int],
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        stop_token_ids: Sequence[int] | None = None,
        stream_callback: Callable[[list[int]], None] | None = None,
        **options: Any,
    ) -> mx.array:
        """Token ids ``[1, prompt + generated]`` for ``input_ids [1, prompt]``.

        ``stop_token_ids`` default to the target's; a stop token ends the result and is part of it.
        ``stream_callback`` is called with each step's new tokens. ``options`` and errors are those of
        :meth:`stream_generate`; stop strings need text and are refused.
        """
        given = {"max_tokens": max_new_tokens, "temperature": temperature, "stop_token_ids": stop_token_ids}
        wanted = self._request_options(given | options)
        if wanted.stop_strings or wanted.watched:
            raise GenerationError(
                "spec_generate knows token ids only; use stream_generate for stop_strings, trace and profile."
            )
        prompt = token_row(input_ids)
        tokens = list(prompt)
        for step in self._steps(prompt, wanted):
            tokens += step.tokens
            if stream_callback is not None:
                stream_callback(step.tokens)
        return mx.array([tokens])

    def _request_options(self, given: Mapping[str, Any]) -> DecodeOptions:
        """The decoder's own options, those ``given`` in their place."""
        return decode_options(named(DecodeOptions, self.options) | named(DecodeOptions, given))

    def _steps(self, prompt: list[int], options: DecodeOptions) -> Iterator[Step]:
        """Check the request now, decode lazily: the prompt's own token, then blocks, to a stop or the limit."""
        max_tokens = self._check_request(prompt, options)
        cache = self.loaded_target.make_cache(**options.cache_options)  # refuses options that do not fit the model
        if options.tree is not None:
            with self.loaded_target.alone():
                self.loaded_target.check_trees(cache)
        if options.prompt_cache is not None:
            options.prompt_cache.check_models(self.loaded_target, self.draft_model)
        return self._alone(self._decode(prompt, max_tokens, options, cache))

    def _alone(self, steps: Generator[T, None, None]) -> Iterator[T]:
        """``steps``, each computed while no other thread computes with the target.

        A request that begins while another thread computes is refused; one that has begun waits, so that no answer ends
        in its middle.
        """
        begun = False
        try:
            while True:
                with self.loaded_target.alone(wait=begun):
                    step = next(steps, None)
                if step is None:
                    return
                begun = True
                yield step
        finally:
            if begun:
                with self.loaded_target.alone(wait=True):
                    steps.close()

    def _check_request(self, prompt: list[int], options: DecodeOptions) -> int:
        """Raise ``GenerationError`` for what cannot be served; most tokens to generate."""
        vocab_size = self.loaded_target.vocab_size
        options.check_vocabulary(vocab_size)
        if not prompt:
            raise GenerationError("The prompt is empty; expected at least one token.")
        if not 0 <= min(prompt) <= max(prompt) < vocab_size:
            raise GenerationError(f"The prompt holds token ids outside 0 to {vocab_size - 1}.")
        return options.token_limit(len(prompt), self.max_seq_length)

    def make_prompt_cache(self, **options: Any) -> PromptCache:
        """A new, empty prompt cache, for ``prompt_cache=`` of requests; ``options`` as the decoder's own.

        Raises ``GenerationError`` for cache options that do not fit the model.
        """
        return PromptCache(self.loaded_target, self.draft_model, **self._request_options(options).cache_options)

    def load_prompt_cache(self, path: str | Path) -> PromptCache:
        """A prompt cache from a file, ours or mlx-lm's; errors as in :meth:`PromptCache.load`."""
        return PromptCache.load(path, self.loaded_target, self.draft_model)

    def cache_prompt(
        self, prompt: Prompt, prompt_cache: PromptCache, prefill_step_size: int | None = None, **template: Any
    ) -> None:
        """Read a beginning of prompts into ``prompt_cache``, all of its tokens.

        A text or messages end within their last message, so that a request can go on there. ``template`` are ``chat``,
        ``system`` and ``chat_template_config`` of :meth:`stream_generate`, whose errors it raises.
        """
        tokens = prompt_tokens(self.loaded_target, prompt, opening=True, **template)
        DecodeOptions().token_limit(len(tokens), self.max_seq_length)  # an answer must have room after it
        step_size = self._request_options({"prefill_step_size": prefill_step_size}).prefill_step_size
        if prompt_cache.begin([*tokens, 0]) < len(tokens):
            caches = prompt_cache.target_cache, prompt_cache.draft_cache
            with self.loaded_target.alone(), wired_limit(self.target_model):
                prefill_context(self.loaded_target, self.draft_model, tokens, *caches, step_size)
        prompt_cache.end(tokens, len(tokens))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse copies, which would share caches and threads, and pickles, which would hold the models."""
        raise TypeError("A decoder cannot be copied or pickled; make one of the same models where it is needed.")

    def _policy(self, options: DecodeOptions, batched: bool = False) -> Policy:
        """One instance a name, another for batches: what it learned of this machine serves the next request too."""
        if not isinstance(options.policy, str):
            return options.build_policy()
        if (options.policy, batched) not in self._policies:
            self._policies[options.policy, batched] = options.build_policy()
        return self._policies[options.policy, batched]

    def _decode(
        self, prompt: list[int], max_tokens: int, options: DecodeOptions, cache: TargetCache
    ) -> Generator[Step, None, None]:
        if max_tokens == 0:
            return
        if options.seed is not None:
            mx.random.seed(options.seed)
        target, drafter, generated = self.loaded_target, self.draft_model, 0
        if options.tree is not None:
            drafter = cast(Drafter, TreeDrafter(drafter, options.tree))
        kept, caches, processors = options.prompt_cache, (cache, None), options.build_processors()
        if kept is not None:
            kept.begin(prompt, cache.quantization)
            caches = kept.target_cache, kept.draft_cache
            processors = [kept.of_known(process) for process in processors]
        run = Decoding(
            target,
            drafter,
            options.build_sampler(self.tokenizer),
            options.verify_rule(),
            processors,
            self._policy(options),
            inspect=None if options.trace is None else inspect,
            wait=options.profile,
            clock=self.clock,
        )
        stops = target.stop_token_ids() if options.stop_token_ids is None else frozenset(options.stop_token_ids)
        with wired_limit(self.target_model):  # on Metal, keeps the weights resident; elsewhere nothing
            # A prompt's products are large enough for all BLAS threads; blocks get their own count.
            state = prefill(run, prompt, options.prefill_step_size, *caches)
            with self.threads.in_use():
                blocks = decode(run, state, max_tokens, self.block_size)
                try:
                    for step in through_stop(chain([first_block(state)], blocks), stops, max_tokens):
                        generated += len(step.tokens)
                        yield replace(step, why=run.policy.why()) if options.watched else step
                finally:
                    blocks.close()  # plain steps hand over to the drafter what they kept for it
                    if kept is not None and kept.target_cache is caches[0]:  # or another request has begun with it
                        kept.end(state.tokens, len(prompt) + generated)

    def _recorded(
        self, prompt: list[int], options: DecodeOptions, steps: Iterator[Step], text: TextStream
    ) -> Iterator[DFlashResponse]:
        about = {"block_size": self.block_size, "parts_apart": options.profile, "options": options.given()}
        models = {"target": self.loaded_target.model, "drafter": self.draft_model}
        with recording(options.trace, options.profile, self._texts, prompt, models, about) as recorder:
            yield from responses(len(prompt), steps, text, recorder)
