"""Preparing a training dataset: conversations as tokens with responses written by the target, in resumable shards.

Settings, conversations and target determine the contents of every shard, and a shard's randomness depends on the seed
and its number alone. The plan is written first, so a run killed at any moment continues from its last complete shard to
the same bytes, on the same machine and versions. (Elsewhere logits round differently, and near ties can swap.)
"""

import logging
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dflash import LoadedTargetModel
from dflash.core.errors import DataError, one_line
from dflash.core.files import exclusive_lock, write_json
from dflash.core.progress import progress
from dflash.prompts.conversations import Conversation, digest
from dflash.target.identity import target_fingerprint

from .chat import Row
from .dataset import (
    FORMAT,
    MANIFEST,
    PLAN,
    VERSION,
    Example,
    read_description,
    read_manifest,
    read_shard,
    remove_unfinished,
    require_only_a_dataset,
    shard_path,
    text_path,
    tokenizer_fingerprint,
    write_manifest,
    write_shard,
)
from .plan import SHORTEST_RESPONSE, Plan, PrepareSettings, make_plan
from .responses import answer_rows, require_batches
from .sequences import Ints
from .split import HeldoutRule, opening_digest

__all__ = ["HeldoutRule", "PrepareSettings", "prepare"]

logger = logging.getLogger(__name__)


def prepare(
    conversations: Sequence[Conversation],
    target: LoadedTargetModel,
    settings: PrepareSettings,
    folder: Path,
    source: str = "",
    heldout: HeldoutRule | None = None,
) -> dict[str, Any]:
    """Make the dataset in ``folder``, or the shards that are missing; returns its manifest.

    ``heldout`` decides which conversations are held out; ``None`` keeps the dataset's rule, or takes the default rule
    for a new one. The rule can change without new responses.

    Raises ``DataError`` if the folder holds other files or a dataset of other settings, conversations or another
    target, if nothing is left to train on, or if writing fails, and ``DFlashError`` if another process is writing to
    it.
    """
    settings.decoding.check_vocabulary(target.vocab_size)
    require_only_a_dataset(folder)
    with _writing_to(folder):
        plan = make_plan(conversations, target, settings)
        description: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "target": target_fingerprint(target),
            "tokenizer": tokenizer_fingerprint(target),
            "conversations": {"count": len(conversations), "sha256": digest(conversations)},
            "settings": settings.to_dict(),
            "sequences": {"count": len(plan.rows), "sha256": plan.digest()},
        }
        _start(folder, description)
        _write_shards(plan, target, settings, folder)
        if heldout is None:
            finished = (folder / MANIFEST).exists()
            heldout = HeldoutRule(**read_manifest(folder)["heldout"]) if finished else HeldoutRule()
        shards = sum(1 for _ in plan.shards(settings.shard_size))
        written = sum(len(read_shard(shard_path(folder, number))[0]) for number in range(shards))
        dropped = plan.dropped | {"no_response": plan.dropped["no_response"] + len(plan.rows) - written}
        made = {"source": source, "dropped": dropped, "shards": shards, "stop_tokens": sorted(target.stop_token_ids())}
        return write_manifest(folder, description | made, heldout)


@contextmanager
def _writing_to(folder: Path) -> Iterator[None]:
    """Lock ``folder``, and turn a failure to write there into a ``DataError``."""
    try:
        with exclusive_lock(folder):
            tempfile.TemporaryFile(dir=folder).close()  # better now than hours later
            yield
    except OSError as error:
        reason = error.strerror or one_line(error)
        raise DataError(
            f"Cannot write to {folder}: {reason}. Make room or choose another folder; "
            "in this one, the same command continues where it stopped."
        ) from error


def _start(folder: Path, description: dict[str, Any]) -> None:
    """Write the plan, or check it against the existing one, and remove a killed process's temporary files."""
    path = folder / PLAN
    if not path.exists():
        write_json(path, description)
    elif difference := _difference(read_description(path), description):
        raise DataError(
            f"{folder} holds a dataset begun with other input: {difference}. "
            "Give the same command as then to continue it, or choose an empty folder."
        )
    remove_unfinished(folder)


_WHAT_DIFFERS = {
    "target": "another target",
    "tokenizer": "another tokenizer",
    "conversations": "other conversations",
    "sequences": "the chat template gives other text (a date in it? fix it with --chat-template-config)",
}


def _difference(begun: dict[str, Any], now: dict[str, Any]) -> str | None:
    """The first difference between two plans, in words."""
    for name, value in now["settings"].items():
        before = begun.get("settings", {}).get(name)
        if before != value:
            return f"{name} was {before}, now it is {value}"
    return next((words for key, words in _WHAT_DIFFERS.items() if begun.get(key) != now[key]), None)


def _write_shards(plan: Plan, target: LoadedTargetModel, settings: PrepareSettings, folder: Path) -> None:
    """Write every missing shard."""
    work = [
        shard
        for shard in plan.shards(settings.shard_size)
        if not (shard_path(folder, shard[0]).exists() and text_path(folder, shard[0]).exists())
    ]
    unanswered = sum(row.loss_mask is None for _, _, rows in work for row in rows)
    if unanswered:
        require_batches(target)
        logger.info("The target writes %d responses of up to %d tokens each.", unanswered, settings.max_tokens)
    total, left = len(plan.rows), sum(len(rows) for _, _, rows in work)
    if left < total:
        logger.info("%d of %d sequences are in %s already.", total - left, total, folder)
    for _ in progress(_written(work, target, settings, folder), "responses", total, done=total - left):
        pass


def _written(
    work: list[tuple[int, list[Conversation], list[Row]]],
    target: LoadedTargetModel,
    settings: PrepareSettings,
    folder: Path,
) -> Iterator[None]:
    """Write shards; yields once per sequence."""
    for number, conversations, rows in work:
        begin = time.monotonic()
        examples: dict[int, Example] = {}
        for i, tokens, loss_mask in answer_rows(rows, target, settings, f"shard {number}"):
            if loss_mask.sum() >= SHORTEST_RESPONSE:
                text = _as_text(conversations[i], rows[i], tokens, target)
                examples[i] = Example(tokens, loss_mask, opening_digest(conversations[i]), text)
            yield
        write_shard(folder, number, [examples[i] for i in sorted(examples)])
        count = sum(int(example.loss_mask.sum()) for example in examples.values())
        given = all(row.loss_mask is not None for row in rows)
        speed = "given" if given else f"{count / (time.monotonic() - begin):.0f} a second"
        logger.info("shard %d: %d response tokens, %s", number, count, speed)


def _as_text(conversation: Conversation, row: Row, tokens: Ints, target: LoadedTargetModel) -> dict[str, Any]:
    """A line of a shard's text: messages, mlx-lm's ``finish_reason``, and the prompt's other keys."""
    if row.loss_mask is not None:
        return {"messages": list(conversation.messages)} | conversation.extra
    response = tokens[len(row.tokens) :].tolist()
    ended = response[-1] in target.stop_token_ids()
    content = target.tokenizer.decode(response[:-1] if ended else response)
    messages = [*conversation.unanswered().messages, {"role": "assistant", "content": content}]
    return conversation.extra | {"messages": messages, "finish_reason": "stop" if ended else "length"}
