"""The options of decoding: each stated once, with its help, its limits and its name on the command line.

The command line makes its parameters from these fields, Python takes them by keyword, and a study names them in its
settings. Importing this is quick: what options build is imported when it is built.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from .core.errors import GenerationError, did_you_mean
from .core.option import check_limits, named, option
from .core.values import check_caches, check_logit_bias, check_stop_strings, check_stop_tokens, require_count, short

if TYPE_CHECKING:
    from .core.registry import Registry
    from .decoding.sampling import LogitsProcessor, Sampler
    from .decoding.verify import VerifyRule
    from .policies.base import Policy
    from .prompts.prompt_cache import PromptCache

DEFAULT_MAX_TOKENS = 2048
GREEDY_BELOW = 1e-5
"""A temperature below this is greedy: float32 could not hold the scaled log-probabilities."""
INT32 = 2**31 - 1
"""MLX takes no more for the bounds of a slice."""

ANSWERS = {
    "adapter_path": "adapters load with a target that decodes; to train a drafter, fuse them first (mlx_lm.fuse).",
    "draft_model": "name the drafter where the decoder is made: DFlashSpeculativeDecoder.from_pretrained(drafter=...).",
    "ignore_chat_template": "give chat=False.",
    "image": "only text is decoded; leave it out.",
    "input_embeddings": "a prompt is a text, messages or token ids.",
    "num_draft_tokens": "policy N verifies at most N drafts in a block, and block_size is one more than is drafted.",
    "prompt_progress_callback": "the first response of stream_generate comes when the prompt is read.",
    "quantize_activations": "activations stay as they are, so that blocks and single tokens are computed alike.",
    "system_prompt": "give system.",
    "use_default_chat_template": "it has no effect in mlx-lm either; leave it out.",
    "verbose": "the responses of stream_generate hold text, speeds and peak_memory.",
}
"""What to do in place of options that mlx-lm has and DFlash has not, by their names in Python."""

T = TypeVar("T")


def option_names(*parts: str) -> tuple[str, ...]:
    """The fields of :class:`DecodeOptions` that belong to ``parts``.

    The part ``"sampling"`` is what decides a text; plain decoding has these options too.
    """
    return tuple(field.name for field in fields(DecodeOptions) if field.metadata["part"] in parts)


@dataclass(frozen=True)
class DecodeOptions:
    """How to decode one request, in mlx-lm's names. ``None`` stands for the default of any option.

    Raises ``GenerationError``, naming the option, for a value out of range.
    """

    max_tokens: int | None = option(
        None,
        "Most tokens to generate. Default: 2048, or as many as there is room for.",
        "sampling",
        kind=int,
        also=("-m",),
        at_least=0,
    )
    temp: float = option(
        0.0, "Temperature; 0 is greedy.", "sampling", also=("temperature",), called="temperature", at_least=0
    )
    """At any other than 0 (or below 1e-5) the target's own samples are emitted."""
    top_p: float = option(0.0, "Nucleus sampling; 0 is off.", "sampling", at_least=0, at_most=1)
    min_p: float = option(
        0.0,
        "Drop what is less probable than this fraction of the best; 0 is off.",
        "sampling",
        at_least=0,
        at_most=1,
    )
    min_tokens_to_keep: int = option(1, "Most probable tokens that --min-p never drops.", "sampling", at_least=1)
    top_k: int = option(0, "Sample among the k most probable tokens; 0 is off.", "sampling", at_least=0)
    xtc_probability: float = option(
        0.0,
        "How often a token is sampled without the most probable choices (XTC); 0 is off.",
        "sampling",
        at_least=0,
        at_most=1,
    )
    """With the rule ``"first_mismatch"``. As in ``mlx_lm.generate``, line breaks and end tokens always stay."""
    xtc_threshold: float = option(
        0.1,
        "With --xtc-probability: of the tokens above this probability only the least probable stays.",
        "sampling",
        at_least=0,
        at_most=0.5,
    )
    seed: int | None = option(None, "Seed for sampling.", "sampling", kind=int, at_least=0, at_most=2**64 - 1)
    """Seeds MLX's global random state as decoding begins; ``None`` leaves it as it is. The text is then that of plain
    mlx-lm with this seed, under any policy (with the rule ``"first_mismatch"``)."""
    sampler: "Sampler | str | None" = option(
        None, "A sampler that a plug-in adds.", "sampling", kind=str, metavar="NAME[:KEY=VALUE]"
    )
    """A sampler of one's own in place of temperature and filters, or the name of a registered one."""
    logits_processors: "Sequence[LogitsProcessor | str]" = option(
        (),
        "A logits processor that a plug-in adds; repeatable.",
        "sampling",
        kind=list[str],
        metavar="NAME[:KEY=VALUE]",
        flag="--logits-processor",
    )
    """Applied to the target's logits in order, after bias and penalties: mlx-lm's, one's own, or registered names."""
    logit_bias: Mapping[int, float] | None = option(
        None, "Add to the logits of token ids: '{\"7\": -100}'.", "sampling", kind=str, metavar="JSON"
    )
    repetition_penalty: float | None = option(
        0.0, "Divides logits of the last 20 tokens, as mlx-lm's does; 0 is off.", "sampling", at_least=0
    )
    repetition_context_size: int = option(
        20, "Last tokens, prompt included, that --repetition-penalty looks at.", "sampling", at_least=1, at_most=INT32
    )
    presence_penalty: float | None = option(0.0, "Taken from the logits of the last 20 tokens; 0 is off.", "sampling")
    presence_context_size: int = option(
        20, "Last tokens that --presence-penalty looks at.", "sampling", at_least=1, at_most=INT32
    )
    frequency_penalty: float | None = option(
        0.0, "The same, once each time that a token occurred; 0 is off.", "sampling"
    )
    frequency_context_size: int = option(
        20, "Last tokens that --frequency-penalty looks at.", "sampling", at_least=1, at_most=INT32
    )
    verify: "VerifyRule | str" = option(
        "first_mismatch",
        "Verification rule: first_mismatch (default), speculative_sampling, or one that a plug-in adds.",
        "verification",
        metavar="NAME[:KEY=VALUE]",
    )
    """The rule or its name. Both named rules are exact."""
    policy: "Policy | str | int" = option(
        "adaptive",
        "Drafts that a block verifies: adaptive (default, by measured cost), full (all), a number, a plug-in's.",
        "verification",
        metavar="NAME[:KEY=VALUE]|N",
    )
    """A name, a number of drafts, or a :class:`~dflash.Policy`. ``"adaptive"`` commits most tokens per second on this
    machine and decodes plainly where no length pays. It never changes the text."""
    tree: int | None = option(
        None,
        "Verify a tree of N drafts in a block, the likeliest paths, in place of a chain. Full attention only.",
        "verification",
        kind=int,
        metavar="N",
        at_least=1,
    )
    """For targets whose layers all keep full attention's caches, and the rule ``"first_mismatch"``. A policy chooses
    how many of the drafts are verified. It never changes the text."""
    stop_strings: Sequence[str] | None = option(
        None, "End before this text; repeatable.", "stops", kind=list[str], metavar="STR", flag="--stop", also=("stop",)
    )
    """Matched across token boundaries."""
    stop_token_ids: Sequence[int] | None = option(
        None,
        "End with this token, in place of the target's own; repeatable.",
        "stops",
        kind=list[int],
        metavar="ID",
        flag="--stop-token",
    )
    max_kv_size: int | None = option(
        None,
        "Bound the target's caches to this many tokens. As in mlx-lm, without effect on models that choose their "
        "caches themselves, such as those with sliding windows.",
        "caches",
        kind=int,
    )
    """The first four tokens are always kept."""
    kv_bits: int | None = option(
        None,
        "Quantise the target's keys and values to 8, 6, 4, 3 or 2 bits, once there are --quantized-kv-start.",
        "caches",
        kind=int,
    )
    """As mlx-lm does: after the pass with which the caches hold ``quantized_kv_start`` tokens."""
    kv_group_size: int = option(64, "Keys and values that share one scale: 32, 64 or 128.", "caches")
    quantized_kv_start: int = option(
        5000, "With --kv-bits: tokens in the caches before they are quantised.", "caches", at_least=0
    )
    prompt_cache: "PromptCache | None" = option(
        None,
        "Go on from this prompt (dflash cache-prompt, mlx_lm.cache_prompt) within its message.",
        "prompt",
        kind=str,
        metavar="FILE",
        flag="--prompt-cache-file",
    )
    """A :class:`~dflash.PromptCache` with what was read already, which holds prompt and answer afterwards. Only the
    rest of the prompt is read. It changes no text, unless caches are quantised or bounded."""
    prefill_step_size: int = option(2048, "Tokens of the prompt in one pass.", "prompt", at_least=1)
    trace: Callable[[dict[str, Any]], object] | str | Path | None = option(
        None,
        "Record what each block did, for `dflash report` and studies, in a new file.",
        "watching",
        kind=Path,
        metavar="FILE.jsonl",
    )
    """The path of a JSONL file (``decoding/trace.py``), or a function that gets each record, such as ``list.append`` or
    a :class:`~dflash.TraceFile`. It never changes the text."""
    profile: bool = option(False, "Show where the time went, and which verify lengths were chosen.", "watching")
    """Waits for the device after every part of a block; the last response tells where the time went."""

    def __post_init__(self) -> None:
        from .decoding.verify import first_mismatch
        from .prompts.prompt_cache import PromptCache

        check_limits(self)
        check_logit_bias(self.logit_bias)
        if self.tree is not None and self.verify_rule() is not first_mismatch:
            raise GenerationError("A tree is verified by the rule 'first_mismatch'; leave out tree or verify.")
        check_stop_strings(self.stop_strings)
        check_stop_tokens(self.stop_token_ids)
        check_caches(self.max_kv_size, self.kv_bits, self.kv_group_size)
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
        if self.sampler is not None and any((self.temp, self.top_p, self.min_p, self.top_k, self.xtc_probability)):
            raise GenerationError("Give either a sampler, or temperature, top_p, min_p, top_k and xtc, not both.")
        if isinstance(self.logits_processors, str) or not isinstance(self.logits_processors, Sequence):
            raise GenerationError("logits_processors must be a list; put the one processor into brackets.")
        sampler, rule, _, _ = self.build_sampler(), self.verify_rule(), self.build_processors(), self.build_policy()
        if hasattr(rule, "check_sampler"):
            rule.check_sampler(sampler)

    def build_sampler(self, tokenizer: Any = None) -> "Sampler":
        """The sampler asked for; of a text's tokens, XTC spares those that ``tokenizer`` breaks lines and ends with."""
        from mlx_lm.sample_utils import make_sampler

        from .decoding.sampling import GREEDY, SAMPLERS, DrawingSampler

        if self.sampler is not None:
            return _found(SAMPLERS, self.sampler, arguments=1)
        if self.temp < GREEDY_BELOW:
            return GREEDY
        filters = float(self.temp), self.top_p, self.min_p, self.min_tokens_to_keep, self.top_k
        if not self.xtc_probability:
            return DrawingSampler(*filters)
        spared = [] if tokenizer is None else [*tokenizer.encode("\n"), *tokenizer.eos_token_ids]
        return make_sampler(*filters, self.xtc_probability, self.xtc_threshold, spared)

    def build_processors(self) -> "list[LogitsProcessor]":
        """The logits processors asked for, in order."""
        from mlx_lm.sample_utils import make_logits_processors

        from .decoding.sampling import LOGITS_PROCESSORS

        known = make_logits_processors(
            None if self.logit_bias is None else {token: float(bias) for token, bias in self.logit_bias.items()},
            float(self.repetition_penalty or 0),
            self.repetition_context_size,
            float(self.presence_penalty or 0),
            self.presence_context_size,
            float(self.frequency_penalty or 0),
            self.frequency_context_size,
        )
        return [*known, *(_found(LOGITS_PROCESSORS, own, arguments=2) for own in self.logits_processors)]

    def verify_rule(self) -> "VerifyRule":
        """The verification rule asked for."""
        from .decoding.verify import VERIFY_RULES

        return _found(VERIFY_RULES, self.verify, arguments=3)

    def build_policy(self) -> "Policy":
        """The policy asked for, a new one where it was asked for by name."""
        from .core.parts import make
        from .policies.base import POLICIES, Fixed, Policy

        policy = self.policy
        if isinstance(policy, str):
            made = make(POLICIES, policy)
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
    def greedy(self) -> bool:
        """Whether plain decoding must write the same tokens, however many are computed at once."""
        return self.temp < GREEDY_BELOW and self.sampler is None

    @property
    def on_texts(self) -> bool:
        """Whether the target's greedy texts alone say which drafts are right, and all of those are verified."""
        others = self.asked("max_tokens", "temp", "seed", "stop_token_ids", "prefill_step_size", "policy")
        return self.greedy and self.policy == "full" and not others

    @property
    def watched(self) -> bool:
        """Whether each block is recorded or timed."""
        return self.trace is not None or self.profile

    def asked(self, *without: str) -> dict[str, Any]:
        """The options that differ from the defaults, except those named."""
        values = {f.name: (getattr(self, f.name), f.default) for f in fields(self) if f.name not in without}
        return {name: value for name, (value, default) in values.items() if value != default}

    def given(self) -> dict[str, Any]:
        """The same without ``trace``, ``profile`` and ``prompt_cache``, which do not change the text."""
        return self.asked("trace", "profile", "prompt_cache")

    def plain(self, tokenizer: Any = None) -> dict[str, Any]:
        """Arguments of ``mlx_lm.stream_generate`` that make plain decoding write the same, but for where it ends."""
        return {
            "sampler": self.build_sampler(tokenizer),
            "logits_processors": self.build_processors() or None,
            "prefill_step_size": self.prefill_step_size,
            **self.cache_options,
        }

    @property
    def cache_options(self) -> dict[str, Any]:
        """The options of :meth:`~dflash.target.LoadedTargetModel.make_cache`."""
        return {name: getattr(self, name) for name in option_names("caches")}

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ``GenerationError`` for what does not fit ``vocab_size`` tokens."""
        if self.top_k >= vocab_size:
            raise GenerationError(
                f"top_k must be less than the target's vocabulary of {vocab_size} tokens, got {self.top_k}; 0 is off."
            )
        if self.min_tokens_to_keep > vocab_size:
            raise GenerationError(
                f"min_tokens_to_keep must be at most the target's vocabulary of {vocab_size} tokens, "
                f"got {self.min_tokens_to_keep}."
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
    """The record of the options ``given``, by any of their names; ``None`` is not given.

    Raises ``GenerationError`` for an unknown name, with what to do instead or the nearest known one.
    """
    values = named(DecodeOptions, given)
    known = [field.name for field in fields(DecodeOptions)]
    for name in values:
        if name not in known:
            answer = ANSWERS.get(name) or did_you_mean(name, [*known, "temperature"])
            raise GenerationError(f"Unknown option {name!r}; {answer}")
    return DecodeOptions(**values)


def _found(registry: "Registry[T]", wanted: T | str, arguments: int) -> T:
    """What is registered under a name, with its options; anything that can be called stands for itself."""
    if isinstance(wanted, str):
        from .core.parts import with_options

        return cast(T, with_options(registry, wanted, arguments))
    if not callable(wanted):
        raise GenerationError(f"A {registry.what} must be a function or a registered name, got {short(wanted)}.")
    return wanted
