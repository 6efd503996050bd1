"""Requests written by the target itself, so that a drafter needs no data.

Given its chat template up to the user's message, an instruct model continues as a user would (Magpie,
arXiv:2406.08464). Requests are sampled in rounds, of which the first are small: they show soon what the target writes.
A round's size and randomness depend on the settings and its number alone, and rounds are added to the file one by one,
so a killed run continues to the same bytes.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx

from dflash import LoadedTargetModel
from dflash.core.errors import CheckpointError, DataError
from dflash.core.files import exclusive_lock, read_json, write_json
from dflash.core.progress import forecast, progress
from dflash.options import DecodeOptions
from dflash.target.identity import target_fingerprint

from ...core.settings import Checked, setting
from ..cpu import model_to_write_with
from .chat import MARK
from .dataset import json_line
from .responses import generate_responses, require_batches, tokens_per_second

FRUITLESS_ROUNDS = 20
"""After as many samples as this many rounds have, without a new request, the target counts as unable to write more."""

_GROWTH = 4  # rounds have 4, 16, 64, .. requests, up to the settings' size
_REQUEST_TOKENS = 64  # written for each request that is kept, those of dropped ones included: an estimate


@dataclass(frozen=True)
class PromptSettings(Checked):
    """How requests are written. A round samples at most ``round_size`` of them, ``batch_size`` at a time.

    Tokens less probable than ``min_p`` times the most probable one are never sampled, which keeps a small model from
    writing nonsense. (Nucleus sampling would sort the vocabulary for every token.) ``begins`` are beginnings of
    requests, used alternately; an empty one leaves the target free. ``system`` replaces the template's system prompt.
    Raises ``DFlashError`` for values out of range.
    """

    max_tokens: int = setting(256, at_least=1)
    temp: float = 1.0
    min_p: float = 0.02
    seed: int = 0
    batch_size: int = setting(64, at_least=1)
    round_size: int = setting(256, at_least=1)
    begins: tuple[str, ...] = ("",)
    system: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temp <= 0:
            raise DataError(f"temp must be greater than 0, got {self.temp}: greedy requests would all be the same.")
        self.decoding  # noqa: B018 - it checks its values

    @property
    def decoding(self) -> DecodeOptions:
        """How the target generates."""
        return DecodeOptions(self.max_tokens, temp=self.temp, min_p=self.min_p, seed=self.seed)


def write_prompts(target: LoadedTargetModel, count: int, path: Path, settings: PromptSettings) -> dict[str, int]:
    """Write ``count`` different requests to the JSONL file ``path``, or the remaining ones.

    Returns the numbers of ``requests`` and of those ``sampled``, and of the dropped ones by reason. The folder
    ``PATH.work`` next to the file holds the state for resuming; a higher ``count`` adds requests.

    Raises ``DataError`` if the target has no chat template, the file is a folder or was started with other settings
    or another target, or the target writes nothing new any more.
    """
    if count < 1:
        raise DataError(f"count must be at least 1, got {count}.")
    if path.is_dir():
        raise DataError(f"Requests go to a file, but {path} is a folder; name a file, such as prompts.jsonl.")
    settings.decoding.check_vocabulary(target.vocab_size)
    prefix, stops = user_turn(target, settings.system)
    require_batches(target)
    path.parent.mkdir(parents=True, exist_ok=True)
    with exclusive_lock(path.with_name(path.name + ".work")):
        state, requests = _resume(path, target, settings)
        there = len(requests)
        if there < count:
            forecast("requests", writing_seconds(target, count - there, settings))
        new = _new_requests(target, prefix, stops, count, path, settings, state, requests)
        for _ in progress(new, "requests", count, done=there):
            pass
    counts = {name: getattr(state, name) for name in ("sampled", "unfinished", "unsuitable", "repeated")}
    return {"requests": max(there, count)} | counts


def writing_seconds(target: LoadedTargetModel, count: int, settings: PromptSettings) -> float:
    """Roughly how long the target takes to write ``count`` requests, by a short measurement."""
    batch = min(settings.batch_size, count)
    # The last ones to end have others beside them only at first.
    return (count * _REQUEST_TOKENS + batch * settings.max_tokens) / tokens_per_second(target, batch)


def user_turn(target: LoadedTargetModel, system: str | None = None) -> tuple[list[int], frozenset[int]]:
    """The tokens before the user's message, and the set of tokens that end it.

    Raises ``DataError`` if the chat template does not show them.
    """
    tokenizer = target.tokenizer
    if tokenizer is None or not tokenizer.has_chat_template:
        raise DataError("Only a target with a chat template can make up requests; give prompts of your own.")
    messages = [{"role": "user", "content": MARK}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    before, mark, after = text.partition(MARK)
    if not mark:
        raise DataError("The target's chat template does not show what the user says; give prompts of your own.")
    prefix = tokenizer.encode(before, add_special_tokens=False)
    end = tokenizer.encode(after, add_special_tokens=False)[:1]
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return list(prefix), target.stop_token_ids() | (set(end) & special)


# --- rounds -------------------------------------------------------------------------------------------------


@dataclass
class _State:
    """Progress so far: the file's size, counts, and the last round's ``surplus`` beyond the requests asked for."""

    rounds: int = 0
    bytes: int = 0
    sampled: int = 0
    unfinished: int = 0
    unsuitable: int = 0
    repeated: int = 0
    surplus: list[str] = field(default_factory=list)


def _new_requests(
    target: LoadedTargetModel,
    prefix: list[int],
    stops: frozenset[int],
    count: int,
    path: Path,
    settings: PromptSettings,
    state: _State,
    requests: list[str],
) -> Iterator[str]:
    """Add rounds to the file, which holds ``requests``, until it holds ``count``."""
    there, fruitless = len(requests), 0
    known = {_key(request) for request in requests + state.surplus}
    begun = _description(target, settings)
    while there < count:
        if not state.surplus:
            found = _sample_round(target, prefix, stops, settings, state)
            state.surplus = list(_kept(found, known, state))
            state.rounds, state.sampled = state.rounds + 1, state.sampled + len(found)
            fruitless = 0 if state.surplus else fruitless + len(found)
        if fruitless >= FRUITLESS_ROUNDS * settings.round_size:
            raise DataError(
                f"The target made up no new request in {fruitless} trials; {path} holds {there}. Take fewer, a higher "
                "temperature, or other beginnings."
            )
        added, state.surplus = state.surplus[: count - there], state.surplus[count - there :]
        _append(path, added)
        state.bytes = path.stat().st_size
        write_json(_state_path(path), {"begun": begun, "state": asdict(state)})
        there += len(added)
        yield from added


def _kept(found: list[str | None], known: set[str], state: _State) -> Iterator[str]:
    """The requests to keep; updates ``known`` and the counts of ``state``."""
    for request in found:
        if request is None:
            state.unfinished += 1
        elif unsuitable(request):
            state.unsuitable += 1
        elif _key(request) in known:
            state.repeated += 1
        else:
            known.add(_key(request))
            yield request


def _sample_round(
    target: LoadedTargetModel, prefix: list[int], stops: frozenset[int], settings: PromptSettings, state: _State
) -> list[str | None]:
    """The next round's requests in order; ``None`` for those that the target did not finish."""
    seed = hashlib.sha256(f"{settings.seed} round {state.rounds}".encode()).digest()[:8]
    mx.random.seed(int.from_bytes(seed, "big"))
    size = min(settings.round_size, _GROWTH ** (state.rounds + 1))
    begins = [settings.begins[(state.sampled + i) % len(settings.begins)] for i in range(size)]
    tokens = {begin: target.tokenizer.encode(begin, add_special_tokens=False) for begin in settings.begins}
    written: list[str | None] = [None] * len(begins)
    for i, response in generate_responses(
        model_to_write_with(target),
        [[*prefix, *tokens[begin]] for begin in begins],
        stops,
        [settings.max_tokens] * len(begins),
        settings.batch_size,
        settings.decoding.build_sampler(),
        shared_prefix=len(prefix) - 1,
    ):
        if response[-1] in stops:
            written[i] = target.tokenizer.decode([*tokens[begins[i]], *response[:-1]]).strip()
    return written


# --- suitable requests --------------------------------------------------------------------------------------

SHORTEST, FEWEST_WORDS, FEWEST_DIFFERENT = 12, 3, 0.4
_NOT_TEXT = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\ufffd\ue000-\uf8ff]|<\|")


def unsuitable(request: str) -> bool:
    """Whether a request is too short, repetitive, or contains characters that are not text."""
    words = request.casefold().split()
    return (
        len(request) < SHORTEST
        or len(words) < FEWEST_WORDS
        or len(set(words)) < FEWEST_DIFFERENT * len(words)
        or _NOT_TEXT.search(request) is not None
    )


def _key(request: str) -> str:
    """Equal for requests that differ only in case, punctuation and spaces."""
    return re.sub(r"\W+", " ", request.casefold()).strip()


# --- files --------------------------------------------------------------------------------------------------


def _resume(path: Path, target: LoadedTargetModel, settings: PromptSettings) -> tuple[_State, list[str]]:
    """The state of the file and its requests, without the remains of a killed round; new if there is no file."""
    now = _description(target, settings)
    if not path.exists():
        write_json(_state_path(path), {"begun": now, "state": asdict(_State())})
        path.touch()
        return _State(), []
    try:
        saved = read_json(_state_path(path))
        state, begun = _State(**saved["state"]), saved["begun"]
    except (CheckpointError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is there, but {_state_path(path).name} beside it does not say how it was made; "
            "choose another name, or remove the file."
        ) from error
    other = next((name for name, value in now.items() if begun.get(name) != value), None)
    if other is not None:
        what = "with another target" if other == "target" else f"with {other} {begun.get(other)}, not {now[other]}"
        raise DataError(f"{path} was begun {what}; give the same command as then, or choose another name.")
    if path.stat().st_size < state.bytes:
        raise DataError(f"{path} is shorter than it was; remove it and give the same command again.")
    os.truncate(path, state.bytes)
    return state, _read(path)


def _description(target: LoadedTargetModel, settings: PromptSettings) -> dict[str, Any]:
    return {"target": target_fingerprint(target), **asdict(settings), "begins": list(settings.begins)}


def _state_path(path: Path) -> Path:
    return path.with_name(path.name + ".work") / "state.json"


def _read(path: Path) -> list[str]:
    with path.open(encoding="utf-8") as file:
        return [json.loads(line)["prompt"] for line in file]


def _append(path: Path, requests: list[str]) -> None:
    with path.open("ab") as file:
        file.write("".join(json_line({"prompt": request}) for request in requests).encode())
        file.flush()
        os.fsync(file.fileno())
