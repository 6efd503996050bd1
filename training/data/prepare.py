"""A training dataset: every conversation as tokens, its response written by the target, in resumable shards.

Knows the order of the work and what makes it repeatable. Must not know the command line or file formats.

The settings, the conversations and the target fix which conversation goes into which shard, and a shard's
randomness comes from the seed and the shard alone. All that is written down before the work starts, so a run that
was killed at any moment continues, without its unfinished shard, to the same bytes (on the same machine and
versions: elsewhere logits round differently, and two tokens that nearly tie can swap).
"""

import hashlib
import logging
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler
from tqdm import tqdm

from dflash import LoadedTargetModel
from dflash.errors import DataError
from dflash.files import exclusive_lock, write_json
from dflash.prompts import Conversation, digest, message_bytes

from .chat import Row, encode, encode_draft
from .dataset import (
    FORMAT,
    MANIFEST,
    PLAN,
    SPLITS,
    VERSION,
    Split,
    count,
    read_description,
    read_manifest,
    read_shard,
    remove_unfinished,
    shard_path,
    target_fingerprint,
    tokenizer_fingerprint,
    write_shard,
)
from .responses import accepted_prefixes, generate_responses
from .sequences import Ints

logger = logging.getLogger(__name__)

SHORTEST_RESPONSE = 2
"""Tokens: an anchor and the one token behind it."""


@dataclass(frozen=True)
class PrepareSettings:
    """What a dataset is made of. Lengths are in tokens.

    A response is cut at ``max_tokens``, or where its sequence reaches ``max_length``; given sequences longer than
    that are dropped. ``temp`` 0 is greedy; ``top_p`` and ``top_k`` 0 are off. ``shard_size`` conversations are
    written at a time. ``regenerate`` has the target write given last responses anew; at ``temp`` 0
    those that are its own already cost one pass.
    """

    max_tokens: int = 2048
    max_length: int = 3072
    temp: float = 0.0
    top_p: float = 0.0
    top_k: int = 0
    seed: int = 0
    batch_size: int = 32
    shard_size: int = 512
    heldout_percent: float = 1.0
    regenerate: bool = False
    chat: bool = True
    chat_template_config: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("max_tokens", "batch_size", "shard_size"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        self._require("max_length", self.max_length > SHORTEST_RESPONSE, f"more than {SHORTEST_RESPONSE}")
        for name in ("temp", "top_k", "seed"):
            self._require(name, getattr(self, name) >= 0, "at least 0")
        self._require("top_p", 0 <= self.top_p <= 1, "between 0 and 1")
        self._require("heldout_percent", 0 <= self.heldout_percent < 100, "at least 0 and below 100")

    def _require(self, name: str, holds: bool, expected: str) -> None:
        if not holds:
            raise DataError(f"{name} must be {expected}, got {getattr(self, name)}.")


@dataclass(frozen=True)
class Plan:
    """What goes where: the sequences of each split in the order of the shards, and what was left out and why."""

    rows: dict[Split, list[Row]]
    dropped: dict[str, int]

    def shards(self, split: Split, size: int) -> Iterator[tuple[int, list[Row]]]:
        """Numbers and sequences of a split's shards."""
        for number, start in enumerate(range(0, len(self.rows[split]), size)):
            yield number, self.rows[split][start : start + size]

    def digest(self) -> str:
        """SHA-256 over the tokens and masks of all sequences, and which split they are in."""
        total = hashlib.sha256()
        for split, rows in self.rows.items():
            for row in rows:
                total.update(f"{split} {len(row.tokens)} {row.loss_mask is None}".encode())
                total.update(row.tokens.tobytes())
                total.update(b"" if row.loss_mask is None else row.loss_mask.tobytes())
        return total.hexdigest()


def prepare(
    conversations: Sequence[Conversation],
    target: LoadedTargetModel,
    settings: PrepareSettings,
    folder: Path,
    source: str = "",
) -> dict[str, Any]:
    """Make the dataset in ``folder``, or what is left of it; returns its manifest.

    Raises :class:`~dflash.errors.DataError` if the folder holds a dataset of other settings, conversations or
    another target, if nothing is left to train on, or if the folder cannot be written, and
    :class:`~dflash.errors.DFlashError` if another process is writing to it.
    """
    if settings.top_k >= target.vocab_size:
        raise DataError(f"top_k must be below the target's {target.vocab_size} tokens, got {settings.top_k}.")
    with _writing_to(folder), exclusive_lock(folder):
        tempfile.TemporaryFile(dir=folder).close()  # hours later would be a bad time to find out
        return _prepare(conversations, target, settings, folder, source)


def _prepare(
    conversations: Sequence[Conversation],
    target: LoadedTargetModel,
    settings: PrepareSettings,
    folder: Path,
    source: str,
) -> dict[str, Any]:
    plan = make_plan(conversations, target, settings)
    if not plan.rows["heldout"] and settings.heldout_percent:
        logger.warning(
            "None of %d sequences falls into the held-out %g %%, and 'dflash train' needs some: stop here and "
            "give a greater --heldout-percent with an empty folder.",
            len(plan.rows["train"]),
            settings.heldout_percent,
        )
    description: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "target": target_fingerprint(target),
        "tokenizer": tokenizer_fingerprint(target),
        "conversations": {"count": len(conversations), "sha256": digest(conversations)},
        "settings": asdict(settings),
        "sequences": {"count": sum(map(len, plan.rows.values())), "sha256": plan.digest()},
    }
    _start(folder, description)
    _write_shards(plan, target, settings, folder)
    splits = {split: _summary(plan, split, target, settings, folder) for split in SPLITS}
    empty = description["sequences"]["count"] - sum(summary["sequences"] for summary in splits.values())
    dropped = plan.dropped | {"no_response": plan.dropped["no_response"] + empty}
    manifest = description | {"source": source, "dropped": dropped, "splits": splits}
    if not (folder / MANIFEST).exists() or read_manifest(folder) != manifest:
        write_json(folder / MANIFEST, manifest)
    return manifest


@contextmanager
def _writing_to(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or " ".join(str(error).split())
        raise DataError(
            f"Cannot write to {folder}: {reason}. Make room or choose another folder; "
            "in this one, the same command continues where it stopped."
        ) from error


# --- what goes where ----------------------------------------------------------------------------------------


def make_plan(conversations: Sequence[Conversation], target: LoadedTargetModel, settings: PrepareSettings) -> Plan:
    """Tokenize all conversations, leave out repeated and unusable ones, and part training from held-out ones."""
    longest, how = _longest(target, settings), (target, settings.chat, settings.chat_template_config)
    guessing = settings.regenerate and settings.temp == 0
    rows: dict[Split, list[Row]] = {split: [] for split in SPLITS}
    dropped = {"duplicate": 0, "too_long": 0, "no_response": 0}
    seen: set[bytes] = set()
    for conversation in tqdm(conversations, desc="tokenize", unit=" conversations", disable=None):
        row = encode(conversation.unanswered() if settings.regenerate else conversation, *how)
        if guessing and conversation.answered:
            row = replace(row, guess=encode_draft(conversation, *how, row.tokens))
        key = hashlib.sha256(row.prompt.tobytes()).digest()
        room = SHORTEST_RESPONSE if row.loss_mask is None else 0
        if key in seen:
            dropped["duplicate"] += 1
        elif len(row.tokens) + room > longest:
            dropped["too_long"] += 1
        elif row.loss_mask is not None and row.loss_mask.sum() < SHORTEST_RESPONSE:
            dropped["no_response"] += 1
        else:
            seen.add(key)
            rows["heldout" if is_heldout(conversation, settings.heldout_percent) else "train"].append(row)
    if not any(rows.values()):
        reasons = ", ".join(f"{number} {name.replace('_', ' ')}" for name, number in dropped.items() if number)
        raise DataError(
            f"None of the {len(conversations)} conversations can be used ({reasons}); max_length {longest}."
        )
    return Plan(rows, dropped)


def is_heldout(conversation: Conversation, percent: float) -> bool:
    """Whether the messages before the first response hash into the held-out part.

    The same for every target, tokenizer and file that the conversation is in; conversations that begin alike
    stay together.
    """
    number = int.from_bytes(hashlib.sha256(message_bytes(conversation.opening)).digest()[:8], "big")
    return number / 2**64 < percent / 100


# --- the work -----------------------------------------------------------------------------------------------


def _start(folder: Path, description: dict[str, Any]) -> None:
    """Write the plan down, or check that the one there is this one, and clear away what a kill left behind."""
    path = folder / PLAN
    if path.exists():
        difference = _difference(read_description(path), description)
        if difference is not None:
            raise DataError(
                f"{folder} holds a dataset begun with other input: {difference}. "
                "Give the same command as then to continue it, or choose an empty folder."
            )
        remove_unfinished(folder)
    elif any((folder / name).exists() for name in (MANIFEST, *SPLITS)):
        raise DataError(f"{folder} holds a dataset without its {PLAN}; choose an empty folder.")
    else:
        write_json(path, description)
        remove_unfinished(folder)


_WHAT_DIFFERS = {
    "target": "another target",
    "tokenizer": "another tokenizer",
    "conversations": "other conversations",
    "sequences": "the chat template gives other text (a date in it? fix it with --chat-template-config)",
}


def _difference(begun: dict[str, Any], now: dict[str, Any]) -> str | None:
    """The first thing in which two plans differ, in words."""
    for name, value in now["settings"].items():
        before = begun.get("settings", {}).get(name)
        if before != value:
            return f"{name} was {before}, now it is {value}"
    return next((words for key, words in _WHAT_DIFFERS.items() if begun.get(key) != now[key]), None)


def _write_shards(plan: Plan, target: LoadedTargetModel, settings: PrepareSettings, folder: Path) -> None:
    """Write every shard that is not there."""
    work = [
        (split, number, rows)
        for split in SPLITS
        for number, rows in plan.shards(split, settings.shard_size)
        if not shard_path(folder, split, number).exists()
    ]
    if any(row.loss_mask is None for _, _, rows in work for row in rows):
        require_batches(target)
    total, left = sum(map(len, plan.rows.values())), sum(len(rows) for _, _, rows in work)
    if left < total:
        logger.info("%d of %d sequences in %s are there already.", total - left, total, folder)
    with tqdm(total=total, initial=total - left, desc="responses", unit=" sequences", disable=None) as bar:
        for split, number, rows in work:
            answered = answer_shard(rows, target, settings, f"{split} {number}", bar.update)
            usable = [(tokens, response) for tokens, response in answered if response.sum() >= SHORTEST_RESPONSE]
            write_shard(shard_path(folder, split, number), usable)


def require_batches(target: LoadedTargetModel) -> None:
    """Raise :class:`~dflash.errors.DataError` unless mlx-lm can decode several sequences of this target at once."""
    for i, cache in enumerate(make_prompt_cache(target.model)):
        if not hasattr(cache, "merge"):
            raise DataError(
                f"mlx-lm cannot write in batches with this target: layer {i} keeps a {type(cache).__name__}. "
                "Give conversations that have the target's responses already."
            )


def answer_shard(
    rows: Sequence[Row],
    target: LoadedTargetModel,
    settings: PrepareSettings,
    name: str,
    finished: Callable[[], object] = lambda: None,
) -> list[tuple[Ints, Ints]]:
    """Tokens and response masks of the shard ``name``, responses written by the target where there are none.

    Random numbers depend on ``settings.seed`` and ``name`` only. ``finished`` is called once a sequence.
    """
    awaiting = [row for row in rows if row.loss_mask is None]
    for _ in range(len(rows) - len(awaiting)):
        finished()
    mx.random.seed(int.from_bytes(hashlib.sha256(f"{settings.seed} {name}".encode()).digest()[:8], "big"))
    written = iter(_responses(awaiting, target, settings, finished))
    answered = []
    for row in rows:
        if row.loss_mask is not None:
            answered.append((row.tokens, row.loss_mask))
        else:
            tokens = np.concatenate([row.tokens, np.asarray(next(written), np.int32)])
            answered.append((tokens, np.arange(len(tokens)) >= len(row.tokens)))
    return answered


def _responses(
    rows: Sequence[Row], target: LoadedTargetModel, settings: PrepareSettings, finished: Callable[[], object]
) -> list[list[int]]:
    """What the target writes; at temperature 0 only what it would write otherwise than guessed is decoded."""
    longest, stops = _longest(target, settings), target.stop_token_ids()
    prompts = [row.tokens.tolist() for row in rows]
    most = [min(settings.max_tokens, longest - len(prompt)) for prompt in prompts]
    written: list[list[int]] = [[] for _ in rows]
    guesses = {i: _until(stops, row.guess[: most[i]]) for i, row in enumerate(rows) if row.guess is not None}
    unfinished, guessed = list(range(len(rows))), list(guesses)
    for number, begun in accepted_prefixes(target, [prompts[i] for i in guessed], list(guesses.values())):
        i = guessed[number]
        written[i] = begun
        if len(begun) == most[i] or (begun and begun[-1] in stops):
            unfinished.remove(i)
            finished()
    if unfinished:
        rest = generate_responses(
            target.model,
            [prompts[i] + written[i] for i in unfinished],
            stops,
            [most[i] - len(written[i]) for i in unfinished],
            settings.batch_size,
            make_sampler(settings.temp, settings.top_p, top_k=settings.top_k),
            finished,
        )
        for i, more in zip(unfinished, rest, strict=True):
            written[i] = written[i] + more
    return written


def _until(stops: Collection[int], tokens: Ints) -> list[int]:
    """Tokens up to and with the first stop token."""
    ends = np.flatnonzero(np.isin(tokens, list(stops)))
    return tokens[: ends[0] + 1 if len(ends) else None].tolist()


def _longest(target: LoadedTargetModel, settings: PrepareSettings) -> int:
    """Most tokens of a sequence."""
    return min(settings.max_length, target.max_length or settings.max_length)


def _summary(
    plan: Plan, split: Split, target: LoadedTargetModel, settings: PrepareSettings, folder: Path
) -> dict[str, int]:
    """Counts over the shards of a split, as they are on disk."""
    stops = target.stop_token_ids()
    total = {"shards": 0, "sequences": 0, "tokens": 0, "response_tokens": 0, "cut": 0}
    for number, _ in plan.shards(split, settings.shard_size):
        counts = {"shards": 1} | count(read_shard(shard_path(folder, split, number)), stops)
        total = {name: value + counts[name] for name, value in total.items()}
    return total
