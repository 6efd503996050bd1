"""What a caller may ask for: the options of decoding, checked once.

Knows the names and ranges of options, and what each one builds. Must not know prompts (``tokens.py``), drafters or
blocks.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from mlx_lm.generate import DEFAULT_QUANTIZED_KV_START
from mlx_lm.sample_utils import make_logits_processors

from .core.errors import GenerationError, did_you_mean
from .core.registry import Registry
from .core.values import check_logit_bias, check_stop_strings, check_stop_tokens, require_count, require_number, short
from .decoding.sampling import GREEDY, LOGITS_PROCESSORS, SAMPLERS, DrawingSampler, LogitsProcessor, Sampler
from .decoding.verify import VERIFY_RULES, VerifyRule, first_mismatch
from .policies import adaptive as _registers_adaptive  # noqa: F401
from .policies.base import POLICIES, Fixed, Policy
from .prompts.prompt_cache import PromptCache

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
        policy: How many drafts each block verifies: ``"adaptive"`` (what commits most tokens per second here; plain
            decoding where no length pays), ``"full"`` (all), a number, the name of a registered policy, or a
            :class:`~dflash.Policy`. It never changes the text.
        tree: Verify a tree of this many drafts in each block, the likeliest paths through it, in place of a chain
            (``core/trees.py``); a policy chooses how many of them. For targets whose layers all keep full attention's
            caches, and the rule ``"first_mismatch"``. It never changes the text.
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
        trace: Gets a record of every block (``decoding/trace.py``): a path of a JSONL file, or a function of one
            record, such as ``list.append`` or a :class:`~dflash.TraceFile`. It never changes the text.
        profile: Wait for the device after every part of a block, and let the last response tell where the time went.

    Raises ``GenerationError``, naming the option, for a value out of range.
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
    tree: int | None = None
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
        if self.tree is not None:
            require_count("tree", self.tree, 1)
        if self.tree is not None and self.verify_rule() is not first_mismatch:
            raise GenerationError("A tree is verified by the rule 'first_mismatch'; leave out tree or verify.")
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
        sampler, rule, _, _ = self.build_sampler(), self.verify_rule(), self.build_processors(), self.build_policy()
        if hasattr(rule, "check_sampler"):
            rule.check_sampler(sampler)

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
            made = POLICIES.get(policy)()
            if not isinstance(made, Policy):
                raise GenerationError(
                    f"The policy {policy!r} is a {type(made).__name__}; it must be a subclass of dflash.Policy."
                )
            return made
        if isinstance(policy, int) and not isinstance(policy, bool):
            require_count("policy", policy, 0)
            return Fixed(policy)
        if not isinstance(policy, Policy):
            raise GenerationError(
                f"A policy must be a number of drafts, a registered name or a dflash.Policy, got {short(policy)}."
            )
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
        """Raise ``GenerationError`` for what does not fit ``vocab_size`` tokens."""
        if self.top_k >= vocab_size:
            raise GenerationError(
                f"top_k must be less than the target's vocabulary of {vocab_size} tokens, got {self.top_k}; 0 is off."
            )
        unknown = next((token for token in self.logit_bias or () if not 0 <= token < vocab_size), None)
        if unknown is not None:
            raise GenerationError(f"logit_bias names token {unknown}; this target's ids are 0 to {vocab_size - 1}.")

    def token_limit(self, prompt_length: int, max_length: int) -> int:
        """Most tokens to generate after ``prompt_length`` tokens of ``max_length``.

        Raises ``GenerationError`` if there is no room, or not enough for an explicit limit.
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

    Raises ``GenerationError`` for an unknown name, with the nearest known one.
    """
    values = {"temp" if name == "temperature" else name: value for name, value in given.items() if value is not None}
    known = [field.name for field in fields(DecodeOptions)]
    for name in values:
        if name not in known:
            raise GenerationError(f"Unknown option {name!r}; {did_you_mean(name, [*known, 'temperature'])}")
    return DecodeOptions(**values)


def _found(registry: Registry[T], wanted: T | str) -> T:
    """What is registered under a name; anything that can be called stands for itself."""
    if isinstance(wanted, str):
        return registry.get(wanted)
    if not callable(wanted):
        raise GenerationError(f"A {registry.what} must be a function or a registered name, got {short(wanted)}.")
    return wanted
