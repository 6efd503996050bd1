"""The options that several commands share, and their checks.

Knows typer, and the options of decoding. Must not know any one command, models (``loading.py``) or what is printed
(``terminal.py``).
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from ..core.errors import DataError, DFlashError

MAX_TOKENS = 512
LARGEST_SEED = 2**64 - 1


# --- checks, made as options are read ------------------------------------------------------------------


def not_empty(ctx: typer.Context, parameter: typer.CallbackParam, value: Any) -> Any:
    """Refuse an option that was given as an empty text, as an unset shell variable gives it."""
    values = value if isinstance(value, list | tuple) else [value]
    if any(isinstance(v, str) and not v.strip() for v in values):
        raise DFlashError(f"{parameter.opts[0]} is empty; give a value, or leave the option out.")
    return value


def is_text(ctx: typer.Context, parameter: typer.CallbackParam, value: Any) -> Any:
    """Refuse an argument whose bytes are not text in the terminal's encoding."""
    for text in value if isinstance(value, list | tuple) else [value]:
        try:
            (text or "").encode()
        except UnicodeEncodeError as error:
            raise DFlashError(f"{_shown(parameter)} is not UTF-8 text (character {error.start + 1}).") from error
    return value


def stop_strings(ctx: typer.Context, parameter: typer.CallbackParam, value: Any) -> Any:
    """Refuse an empty stop string, and one that is not text."""
    if any(not text for text in value or ()):
        raise DFlashError("--stop must not be empty: every text contains the empty text.")
    return is_text(ctx, parameter, value)


def seed_in_range(ctx: typer.Context, parameter: typer.CallbackParam, value: int | None) -> int | None:
    """Refuse a seed that MLX's random state cannot hold."""
    if value is not None and not 0 <= value <= LARGEST_SEED:
        raise DFlashError(f"--seed must be a whole number from 0 to {LARGEST_SEED}, got {value}.")
    return value


def in_a_folder(ctx: typer.Context, parameter: typer.CallbackParam, value: Path | None) -> Path | None:
    """Refuse a file to be written whose folder is not there: most such paths are mistyped."""
    if value is not None and not value.parent.is_dir():
        raise DFlashError(f"{parameter.opts[-1]} {value}: there is no folder {value.parent}; make it, or name another.")
    return value


def new_trace(ctx: typer.Context, parameter: typer.CallbackParam, value: Path | None) -> Path | None:
    """Refuse a trace that would replace one, which may have taken hours."""
    if value is not None and value.is_file() and value.stat().st_size:
        raise DFlashError(f"{parameter.opts[0]} {value} exists and is not empty; remove it, or name another file.")
    return in_a_folder(ctx, parameter, value)


def two_positions(ctx: typer.Context, parameter: typer.CallbackParam, value: int | None) -> int | None:
    """Refuse a block of the anchor alone, which drafts nothing."""
    if value is not None and value < 2:
        raise DFlashError(f"{parameter.opts[0]} must be at least 2, the anchor and one draft; got {value}.")
    return value


def _shown(parameter: typer.CallbackParam) -> str:
    name = parameter.opts[0]
    return name if name.startswith("-") else f"The {name}"


# --- options -------------------------------------------------------------------------------------------

Prompt = typer.Argument(help="The request; - reads it from standard input.", callback=is_text, show_default=False)
Target = Annotated[
    str | None,
    typer.Option(
        metavar="PATH|HUB",
        help="Folder or hub name of the target. Default: bundled, the one of the package.",
        callback=not_empty,
    ),
]
DrafterName = Annotated[
    str | None,
    typer.Option(
        "--drafter",
        metavar="PATH|HUB",
        help="The drafter for the target; ngram needs no training, ngram+PATH copies where the text repeats. "
        "Default: the one that is bundled for the target.",
        callback=not_empty,
    ),
]
DrafterNames = Annotated[
    list[str] | None,
    typer.Option(
        "--drafter",
        metavar="PATH|HUB",
        help="A drafter for the target; repeatable, to compare several. Also: bundled, ngram, ngram+PATH.",
        callback=not_empty,
    ),
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run the Python code that comes with the target.")
]
Prompts = Annotated[
    str | None,
    typer.Option(
        metavar="FILE.jsonl|HUB",
        help='Lines such as {"prompt": "..."} or {"messages": [...]}. Default: heldout requests of the bundled models.',
        callback=not_empty,
    ),
]
Template = Annotated[
    str | None, typer.Option(help="Makes the prompt from a line's keys: 'Question: {question}'.", callback=is_text)
]
Limit = Annotated[int | None, typer.Option(metavar="N", help="Take only the first N prompts.")]
MaxTokens = Annotated[
    int | None,
    typer.Option(help=f"Most tokens to generate. Default: {MAX_TOKENS}, or fewer where the target has less room."),
]
Temp = Annotated[float, typer.Option(help="Temperature; 0 is greedy.")]
TopP = Annotated[float, typer.Option(help="Nucleus sampling; 0 is off.")]
MinP = Annotated[float, typer.Option(help="Drop what is less probable than this fraction of the best; 0 is off.")]
TopK = Annotated[int, typer.Option(help="Sample among the k most probable tokens; 0 is off.")]
Seed = Annotated[int | None, typer.Option(help="Seed for sampling.", callback=seed_in_range)]
RunSeed = Annotated[int, typer.Option(help="Seed for sampling.", callback=seed_in_range)]
BlockSize = Annotated[
    int | None,
    typer.Option(help="Positions per block, the anchor included. Default: the drafter's own.", callback=two_positions),
]
DraftBits = Annotated[
    int | None,
    typer.Option("--draft-bits", help="Quantise the drafter as it is loaded: 8, 6, 5, 4, 3 or 2 bits a weight."),
]
DraftWindow = Annotated[
    int | None,
    typer.Option(
        "--draft-window",
        metavar="N",
        help="Newest context tokens that the drafter's full attention sees; its memory stops growing with the text.",
    ),
]
LogitBias = Annotated[
    str | None, typer.Option("--logit-bias", metavar="JSON", help="Add to the logits of token ids: '{\"7\": -100}'.")
]
RepetitionPenalty = Annotated[
    float, typer.Option(help="Divides logits of the last 20 tokens, as mlx-lm's does; 0 is off.")
]
PresencePenalty = Annotated[float, typer.Option(help="Taken from the logits of the last 20 tokens; 0 is off.")]
FrequencyPenalty = Annotated[float, typer.Option(help="The same, once each time that a token occurred; 0 is off.")]
Chat = Annotated[bool, typer.Option("--chat/--raw", help="Use the chat template, or the prompt as it is.")]
System = Annotated[
    str | None, typer.Option(metavar="TEXT", help="System prompt, where the prompt has none.", callback=is_text)
]
TEMPLATE_CONFIG = typer.Option(metavar="JSON", help="Switches of the chat template: '{\"enable_thinking\": false}'.")
TemplateConfig = Annotated[str | None, TEMPLATE_CONFIG]
Verify = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Verification rule: first_mismatch (default), speculative_sampling, or one that a plug-in adds.",
        callback=not_empty,
    ),
]
PolicyName = Annotated[
    str | None,
    typer.Option(
        "--policy",
        metavar="NAME|N",
        help="Drafts that a block verifies: adaptive (default, by measured cost), full (all), a number, a plug-in's.",
        callback=not_empty,
    ),
]
TreeNodes = Annotated[
    int | None,
    typer.Option(
        "--tree",
        metavar="N",
        help="Verify a tree of N drafts in a block, the likeliest paths, in place of a chain. Full attention only.",
    ),
]
SamplerName = Annotated[
    str | None, typer.Option("--sampler", metavar="NAME", help="A sampler that a plug-in adds.", callback=not_empty)
]
ProcessorNames = Annotated[
    list[str] | None,
    typer.Option(
        "--logits-processor",
        metavar="NAME",
        help="A logits processor that a plug-in adds; repeatable.",
        callback=not_empty,
    ),
]
TraceTo = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        metavar="FILE.jsonl",
        help="Record what each block did, for `dflash report` and studies, in a new file.",
        callback=new_trace,
    ),
]
MaxKvSize = Annotated[
    int | None,
    typer.Option(
        help="Bound the target's caches to this many tokens. As in mlx-lm, without effect on models that choose their "
        "caches themselves, such as those with sliding windows."
    ),
]
KvBits = Annotated[
    int | None,
    typer.Option(
        help="Quantise the target's keys and values to 8, 6, 4, 3 or 2 bits, once there are --quantized-kv-start."
    ),
]
KvGroupSize = Annotated[int, typer.Option(help="Keys and values that share one scale: 32, 64 or 128.")]
QuantizedKvStart = Annotated[int, typer.Option(help="With --kv-bits: tokens in the caches before they are quantised.")]
PromptCacheFile = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Go on from this prompt (dflash cache-prompt, mlx_lm.cache_prompt) within its message.",
        callback=not_empty,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn and verified, as the command line names it."""

    temp: float = 0.0
    top_p: float = 0.0
    min_p: float = 0.0
    top_k: int = 0
    sampler: str | None = None
    logits_processors: tuple[str, ...] = ()
    penalties: dict[str, Any] = field(default_factory=dict)
    verify: str | None = None
    policy: str | None = None
    tree: int | None = None

    def for_dflash(self) -> dict[str, Any]:
        """Options of ``stream_generate`` beside the temperature; what was not asked for is left to its defaults."""
        asked = {
            "top_p": self.top_p,
            "min_p": self.min_p,
            "top_k": self.top_k,
            **self.penalties,
            "sampler": self.sampler,
            "logits_processors": list(self.logits_processors),
            "verify": self.verify,
            "policy": int(self.policy) if self.policy and self.policy.isdecimal() else self.policy,
        }
        given = {name: value for name, value in asked.items() if value or (name == "policy" and value is not None)}
        return given if self.tree is None else given | {"tree": self.tree}

    def for_plain(self) -> dict[str, Any]:
        """The same for plain mlx_lm: a sampler and logits processors.

        Raises ``GenerationError`` for what cannot be, which needs no model.
        """
        from ..options import decode_options

        checked = decode_options({"temp": self.temp} | self.for_dflash())
        return {"sampler": checked.build_sampler(), "logits_processors": checked.build_processors() or None}

    @property
    def greedy(self) -> bool:
        """Whether both sides must write the same tokens."""
        from ..options import GREEDY_BELOW

        return self.temp < GREEDY_BELOW and self.sampler is None


def penalties(repetition: float, presence: float, frequency: float, logit_bias: str | None) -> dict[str, Any]:
    """What is done to the logits before a token is drawn. Raises ``DFlashError`` for a bad bias."""
    bias = json_object(logit_bias, "--logit-bias", '{"7": -100}')
    unknown = next((token for token in bias if not token.isdecimal()), None)
    if unknown is not None:
        raise DFlashError(f"--logit-bias must name token ids, got {unknown!r}.")
    named = {"repetition_penalty": repetition, "presence_penalty": presence, "frequency_penalty": frequency}
    return named | {"logit_bias": {int(token): value for token, value in bias.items()}}


def caching(
    max_kv_size: int | None, kv_bits: int | None, kv_group_size: int, quantized_kv_start: int
) -> dict[str, Any]:
    """Options of ``stream_generate`` for the target's caches."""
    return {
        "max_kv_size": max_kv_size,
        "kv_bits": kv_bits,
        "kv_group_size": kv_group_size,
        "quantized_kv_start": quantized_kv_start,
    }


def json_object(text: str | None, option: str, example: str = '{"enable_thinking": false}') -> dict[str, Any]:
    """A JSON object given on the command line. Raises ``DataError`` for anything else."""
    try:
        value = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise DataError(f"{option} is not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise DataError(f"{option} must be a JSON object such as {example}, got {text}.")
    return value
