"""What a caller may ask for: a prompt in its three forms, and the options of decoding, checked once.

Knows prompts, the names and ranges of options, and the target's tokenizer. Must not know drafters or blocks.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar, cast

import mlx.core as mx
from mlx_lm.generate import DEFAULT_QUANTIZED_KV_START
from mlx_lm.sample_utils import make_logits_processors

from . import speculative as _registers_its_rule  # noqa: F401
from .errors import GenerationError, did_you_mean, one_line
from .policy import POLICIES, Adaptive, Fixed, Policy
from .prompt_cache import PromptCache
from .registry import Registry
from .sampling import GREEDY, LOGITS_PROCESSORS, SAMPLERS, DrawingSampler, LogitsProcessor, Sampler
from .target import LoadedTargetModel
from .values import check_logit_bias, check_stop_strings, check_stop_tokens, require_count, require_number, short
from .verify import VERIFY_RULES, VerifyRule

Message = Mapping[str, Any]
Prompt = str | Sequence[Message] | Sequence[int] | mx.array
"""A user's text, the messages of a conversation (``role`` and ``content`` each), or token ids."""

DEFAULT_MAX_TOKENS = 2048
GREEDY_BELOW = 1e-5
"""A temperature below this is greedy: float32 could not hold the scaled log-probabilities."""

T = TypeVar("T")
_WATCHING = ("trace", "profile", "prompt_cache")


@dataclass(frozen=True)
class DecodeOptions:
    """How to decode one request, in mlx-lm's names.

    Args:
        max_tokens: Most tokens to generate. ``None``: 2048, or as many as there is room for.
        temp: Temperature; 0 (and anything below 1e-5) is greedy. At any other the target's own samples are emitted.
        top_p: Nucleus sampling, off at 0.
        min_p: Drop tokens whose probability is less than this fraction of the highest one, off at 0.
        top_k: Sample among the ``top_k`` most probable tokens, off at 0.
        seed: Seeds MLX's global random state as decoding begins; ``None`` leaves it as it is. The text is then that
            of plain mlx-lm with this seed, under any policy (with the rule ``"first_mismatch"``).
        sampler: A sampler of one's own in place of the five above, or the name of a registered one.
        logits_processors: Applied to the target's logits in order: mlx-lm's, one's own, or registered names.
        logit_bias: What is added to the logits of some token ids; before the penalties, as in mlx-lm.
        repetition_penalty: mlx-lm's penalty on tokens that occurred: a factor, off at 0. It comes, as the other two do,
            before ``logits_processors``.
        repetition_context_size: It looks at this many last tokens, prompt included.
        presence_penalty: Taken from the logits of tokens that occurred, off at 0.
        presence_context_size: It looks at this many last tokens.
        frequency_penalty: Taken from the logits of tokens as often as they occurred, off at 0.
        frequency_context_size: It looks at this many last tokens.
        verify: The verification rule, or the name of a registered one: ``"first_mismatch"`` or
            ``"speculative_sampling"``, both exact, or one's own.
        policy: How many drafts each block verifies: ``"adaptive"`` (what commits most tokens per second here; the
            drafter sleeps where it does not pay), ``"full"`` (all), a number, the name of a registered policy, a file
            of costs (``.json``) that an adaptive one saved, or a :class:`~dflash.policy.Policy` of one's own. It never
            changes the text.
        stop_strings: The text ends before the first of these; matched across token boundaries.
        stop_token_ids: Tokens that end the answer; ``None``: the target's own.
        max_kv_size: Bound the target's caches to this many tokens, the first four always kept. As in mlx-lm, without
            effect on models that choose their caches themselves.
        kv_bits: Quantise keys and values to this many bits, as mlx-lm does: after the pass with which the caches hold
            ``quantized_kv_start`` tokens.
        kv_group_size: Numbers per scale of the quantised keys and values.
        quantized_kv_start: Tokens in the caches from which on they are quantised.
        prompt_cache: What was read already: a :class:`~dflash.PromptCache`, which holds prompt and answer afterwards.
            It never changes the text, and only the rest of the prompt is read.
        prefill_step_size: Tokens of the prompt in one pass.
        trace: Gets a record of every block (:mod:`dflash.trace`): a path of a JSONL file, or a function of one record,
            such as ``list.append`` or a :class:`~dflash.TraceFile`. It never changes the text.
        profile: Wait for the device after every part of a block, and let the last response tell where the time went.

    Raises :class:`~dflash.errors.GenerationError`, naming the option, for a value out of range.
    """

    max_tokens: int | None = None
    temp: float = 0.0
    top_p: float = 0.0
    min_p: float = 0.0
    top_k: int = 0
    seed: int | None = None
    sampler: Sampler | str | None = None
    logits_processors: Sequence[LogitsProcessor | str] = ()
    logit_bias: Mapping[int, float] | None = None
    repetition_penalty: float | None = None
    repetition_context_size: int = 20
    presence_penalty: float | None = None
    presence_context_size: int = 20
    frequency_penalty: float | None = None
    frequency_context_size: int = 20
    verify: VerifyRule | str = "first_mismatch"
    policy: Policy | str | int = "adaptive"
    stop_strings: Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    max_kv_size: int | None = None
    kv_bits: int | None = None
    kv_group_size: int = 64
    quantized_kv_start: int = DEFAULT_QUANTIZED_KV_START
    prompt_cache: PromptCache | None = None
    prefill_step_size: int = 2048
    trace: Callable[[dict[str, Any]], object] | str | Path | None = None
    profile: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            require_count("max_tokens", self.max_tokens, 0)
        require_number("temperature", self.temp, 0.0)
        require_number("top_p", self.top_p, 0.0, 1.0)
        require_number("min_p", self.min_p, 0.0, 1.0)
        require_count("top_k", self.top_k, 0)
        if self.seed is not None:
            require_count("seed", self.seed, 0, 2**64 - 1)
        for name, least in (("repetition", 0.0), ("presence", -math.inf), ("frequency", -math.inf)):
            require_number(f"{name}_penalty", getattr(self, f"{name}_penalty") or 0.0, least)
            require_count(f"{name}_context_size", getattr(self, f"{name}_context_size"), 1)
        check_logit_bias(self.logit_bias)
        require_count("prefill_step_size", self.prefill_step_size, 1)
        require_count("quantized_kv_start", self.quantized_kv_start, 0)
        check_stop_strings(self.stop_strings)
        check_stop_tokens(self.stop_token_ids)
        if not isinstance(self.prompt_cache, PromptCache | None):
            raise GenerationError(
                "prompt_cache must be what make_prompt_cache or load_prompt_cache of the decoder returns, "
                f"got {type(self.prompt_cache).__name__}."
            )
        if not (self.trace is None or callable(self.trace) or isinstance(self.trace, str | Path)):
            raise GenerationError(
                f"trace must be the path of a file or a function of one record, got {type(self.trace).__name__}; "
                "records.append puts them into a list."
            )
        if self.sampler is not None and (self.temp or self.top_p or self.min_p or self.top_k):
            raise GenerationError("Give either a sampler, or temperature, top_p, min_p and top_k, not both.")
        if isinstance(self.logits_processors, str) or callable(self.logits_processors):
            raise GenerationError("logits_processors must be a list; put the one processor into brackets.")
        (
            self.build_sampler(),
            self.build_processors(),
            self.verify_rule(),
            self.build_policy(),
        )  # unknown names are refused here

    def build_sampler(self) -> Sampler:
        """The sampler asked for."""
        if self.sampler is not None:
            return _found(SAMPLERS, self.sampler)
        if self.temp < GREEDY_BELOW:
            return GREEDY
        return DrawingSampler(self.temp, self.top_p, self.min_p, self.top_k)

    def build_processors(self) -> list[LogitsProcessor]:
        """The logits processors asked for, in order."""
        known = make_logits_processors(
            None if self.logit_bias is None else dict(self.logit_bias),
            self.repetition_penalty,
            self.repetition_context_size,
            self.presence_penalty,
            self.presence_context_size,
            self.frequency_penalty,
            self.frequency_context_size,
        )
        return [*known, *(_found(LOGITS_PROCESSORS, processor) for processor in self.logits_processors)]

    def verify_rule(self) -> VerifyRule:
        """The verification rule asked for."""
        return _found(VERIFY_RULES, self.verify)

    def build_policy(self) -> Policy:
        """The policy asked for, a new one where it was asked for by name."""
        policy = self.policy
        if isinstance(policy, str):
            policy = Adaptive.load(policy) if policy.endswith(".json") else POLICIES.get(policy)()
        elif not isinstance(policy, Policy):
            require_count("policy", policy, 0)
            policy = Fixed(policy)
        return policy

    @property
    def watched(self) -> bool:
        """Whether somebody wants to know what each block did."""
        return self.trace is not None or self.profile

    def given(self) -> dict[str, Any]:
        """The options that differ from the defaults, ``trace`` and ``profile`` apart."""
        values = {field.name: (getattr(self, field.name), field.default) for field in fields(self)}
        return {name: v for name, (v, default) in values.items() if v != default and name not in _WATCHING}

    @property
    def cache_options(self) -> dict[str, Any]:
        """The options of :meth:`~dflash.target.LoadedTargetModel.make_cache`."""
        return {
            "max_kv_size": self.max_kv_size,
            "kv_bits": self.kv_bits,
            "kv_group_size": self.kv_group_size,
            "quantized_kv_start": self.quantized_kv_start,
        }

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise :class:`~dflash.errors.GenerationError` for what does not fit ``vocab_size`` tokens."""
        if self.top_k >= vocab_size:
            raise GenerationError(
                f"top_k must be less than the target's vocabulary of {vocab_size} tokens, got {self.top_k}; 0 is off."
            )
        unknown = next((token for token in self.logit_bias or () if not 0 <= token < vocab_size), None)
        if unknown is not None:
            raise GenerationError(f"logit_bias names token {unknown}; this target's ids are 0 to {vocab_size - 1}.")

    def token_limit(self, prompt_length: int, max_length: int) -> int:
        """Most tokens to generate after ``prompt_length`` tokens of ``max_length``.

        Raises :class:`~dflash.errors.GenerationError` if there is no room, or not enough for an explicit limit.
        """
        room = max_length - prompt_length
        if self.max_tokens is None and room > 0:
            return min(DEFAULT_MAX_TOKENS, room)
        if self.max_tokens is None or room < 0:
            raise GenerationError(
                f"A prompt of {prompt_length} tokens leaves no room in the limit of {max_length} tokens; shorten it."
            )
        if self.max_tokens > room:
            raise GenerationError(
                f"A prompt of {prompt_length} tokens plus max_tokens {self.max_tokens} exceeds the limit of "
                f"{max_length} tokens; shorten the prompt or lower max_tokens to {room}."
            )
        return self.max_tokens


def decode_options(given: Mapping[str, Any]) -> DecodeOptions:
    """The record of the options ``given``, in which ``temperature`` is ``temp`` and ``None`` is not given.

    Raises :class:`~dflash.errors.GenerationError` for an unknown name, with the nearest known one.
    """
    values = {"temp" if name == "temperature" else name: value for name, value in given.items() if value is not None}
    known = [field.name for field in fields(DecodeOptions)]
    for name in values:
        if name not in known:
            raise GenerationError(f"Unknown option {name!r}; {did_you_mean(name, [*known, 'temperature'])}")
    return DecodeOptions(**values)


# --- prompts ----------------------------------------------------------------------------------------------


def prompt_tokens(
    target: LoadedTargetModel,
    prompt: Prompt,
    *,
    chat: bool = True,
    system: str | None = None,
    chat_template_config: Mapping[str, Any] | None = None,
    opening: bool = False,
) -> list[int]:
    """Token ids of ``prompt``; text and messages go through the target's chat template.

    Args:
        target: The target with its tokenizer, which token ids alone do not need.
        prompt: A user's text, messages that end with the one to answer, or token ids, taken as they stand.
        chat: ``False`` takes a text as it stands.
        system: The system prompt, put before the prompt.
        chat_template_config: Switches of the chat template, such as ``{"enable_thinking": False}``.
        opening: End within the last message, rather than where its answer begins.

    Raises :class:`~dflash.errors.GenerationError` for an empty or malformed prompt, and where an option needs a
    chat template that is not used.
    """
    config = _checked_config(chat_template_config)
    if not isinstance(prompt, str) and not _is_messages(prompt):
        if system is not None or config:
            raise GenerationError("Token ids are taken as they stand: system and chat_template_config need text.")
        return token_row(cast(Any, prompt))
    if target.tokenizer is None:
        raise GenerationError("This target has no tokenizer; pass token ids.")
    templated = chat and target.tokenizer.has_chat_template
    if not templated and (system is not None or config or not isinstance(prompt, str)):
        why = "the target's tokenizer has none" if chat else "the prompt is to be taken as it stands"
        raise GenerationError(f"Messages, system and chat_template_config need the chat template, and {why}.")
    messages = _checked_messages(prompt, system)
    if opening:
        config |= {"add_generation_prompt": False, "continue_final_message": True}
    with _quiet_about_length():
        try:
            if templated and opening:
                tokens = target.tokenizer.apply_chat_template(messages, **config)
            elif templated:
                tokens = target.adapter.chat_tokens(target.tokenizer, messages, **config)
            else:
                tokens = target.tokenizer.encode(prompt)
        except Exception as error:  # templates are programs of the target's makers
            raise GenerationError(f"The target's tokenizer cannot take this prompt: {one_line(error)}") from error
    if not tokens:
        raise GenerationError(
            "The tokenizer makes no tokens of this text; is there a tokenizer.json in the target's folder?"
        )
    return list(tokens)


def continuation_tokens(
    target: LoadedTargetModel,
    text: str,
    *,
    chat: bool = True,
    chat_template_config: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids that go on within a user's message that is cached: ``text``, and what the chat template puts after it.

    Tokens never join across the seam. Raises :class:`~dflash.errors.GenerationError` as :func:`prompt_tokens`.
    """
    prompt_tokens(target, text, chat=chat, chat_template_config=chat_template_config)  # refuses what cannot be
    if not chat or not target.tokenizer.has_chat_template:
        return list(target.tokenizer.encode(text, add_special_tokens=False))
    messages = _checked_messages(text, None)
    config = {"add_generation_prompt": True, "tokenize": False} | _checked_config(chat_template_config)
    whole = target.tokenizer.apply_chat_template(messages, **config)
    if text not in whole:
        raise GenerationError("The chat template changes this text, so that it cannot follow a prompt cache.")
    return list(target.tokenizer.encode(whole[whole.rindex(text) :], add_special_tokens=False))


def token_row(tokens: Sequence[int] | mx.array) -> list[int]:
    """Token ids of one sequence, from ``[L]``, ``[1, L]`` or a list. Raises ``GenerationError`` for other forms."""
    expected = "Expected a text, a list of messages or token ids"
    if tokens is None or isinstance(tokens, bytes | bytearray | Mapping):
        raise GenerationError(f"{expected}, got {type(tokens).__name__}.")
    try:
        array = mx.array(tokens)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise GenerationError(f"{expected}, got {type(tokens).__name__}: {short(tokens)}.") from error
    if array.ndim == 2 and array.shape[0] != 1:
        raise GenerationError(f"Batch size {array.shape[0]} is not supported; decode one sequence at a time.")
    if array.ndim not in (1, 2) or (array.size and not mx.issubdtype(array.dtype, mx.integer)):
        raise GenerationError(f"Expected token ids of shape [length] or [1, length], got {array.shape} {array.dtype}.")
    return cast(list[int], array.reshape(-1).tolist())


def _is_messages(prompt: Any) -> bool:
    return isinstance(prompt, list | tuple) and bool(prompt) and any(isinstance(m, Mapping) for m in prompt)


def _checked_messages(prompt: Any, system: str | None) -> list[dict[str, Any]]:
    """Messages of a text or of messages, after a system prompt if there is one."""
    if isinstance(prompt, str):
        if not prompt.strip():
            raise GenerationError("The prompt is empty; expected text.")
        messages: list[dict[str, Any]] = [{"role": "user", "content": prompt}]
    else:
        for number, message in enumerate(prompt, 1):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or len(message) < 2:
                raise GenerationError(
                    f"Message {number} of the prompt must have a 'role' and a 'content', got {short(message)}."
                )
        messages = [dict(message) for message in prompt]
        if messages[-1]["role"] in ("assistant", "system", "developer"):
            raise GenerationError(
                f"The last message is the {messages[-1]['role']}'s; expected the message to answer last."
            )
    if system is not None:
        if not isinstance(system, str):
            raise GenerationError(f"system must be a text, got {short(system)}.")
        if messages[0]["role"] == "system":
            raise GenerationError("The messages begin with a system prompt already; give it once.")
        messages.insert(0, {"role": "system", "content": system})
    for message in messages:
        _check_text(f"The text of the {message['role']}", message.get("content"))
    return messages


def _check_text(what: str, text: Any) -> None:
    """Half a surrogate pair stands for a byte that was not UTF-8 where the text came from."""
    if isinstance(text, str):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise GenerationError(
                f"{what} is not valid Unicode at character {error.start + 1}; give it as UTF-8."
            ) from error


def _checked_config(config: Mapping[str, Any] | None) -> dict[str, Any]:
    if config is not None and not isinstance(config, Mapping):
        raise GenerationError(f"chat_template_config must be a dict of switches, got {short(config)}.")
    return dict(config or {})


@contextmanager
def _quiet_about_length() -> Iterator[None]:
    """Without transformers' warning about long prompts; a prompt that is too long is refused afterwards."""
    logger = logging.getLogger("transformers.tokenization_utils_base")
    disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = disabled


def _found(registry: Registry[T], wanted: T | str) -> T:
    """What is registered under a name; anything that can be called stands for itself."""
    if isinstance(wanted, str):
        return registry.get(wanted)
    if not callable(wanted):
        raise GenerationError(f"A {registry.what} must be a function or a registered name, got {short(wanted)}.")
    return wanted
