"""A dataset as text: its conversations with the target's responses."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dflash.core.errors import DataError
from dflash.core.files import atomic_write

from .dataset import json_line, read_manifest, recorded_examples, shard_numbers, shards_with_split, text_path
from .split import Split


@dataclass(frozen=True)
class Conversed:
    """One conversation of a dataset: its number, split and sizes in tokens.

    ``text`` holds ``messages``, the last of which is the response, and the prompt's other keys.
    """

    number: int
    split: Split
    tokens: int
    response_tokens: int
    text: dict[str, Any]


def read_dataset(folder: Path, split: Split | None = None) -> Iterator[Conversed]:
    """The conversations of a finished dataset in order, of one split or of both.

    Raises ``DataError`` if there is no such dataset, or its text is missing or damaged.
    """
    manifest = read_manifest(folder)
    if manifest["version"] == 1:
        raise DataError(
            f"The dataset in {folder} has format version 1, which keeps no text. It can still be trained on; to read "
            "it, give its 'dflash prepare' command with an empty folder."
        )
    number = 0
    numbers, shards = shard_numbers(folder, manifest), shards_with_split(folder, manifest)
    for shard, (sequences, heldout) in zip(numbers, shards, strict=False):  # a record may have begun one more
        if manifest.get("recorded"):
            texts = [example.text for example in recorded_examples(folder, shard)[: len(sequences)]]
        else:
            texts = _read_texts(text_path(folder, shard), len(sequences))
        ends = np.cumsum(sequences.lengths)
        for i, text in enumerate(texts):
            of: Split = "heldout" if heldout[i] else "train"
            response = int(sequences.loss_mask[ends[i] - sequences.lengths[i] : ends[i]].sum())
            if split in (None, of):
                yield Conversed(number + i, of, int(sequences.lengths[i]), response, text)
        number += len(sequences)


def export_dataset(folder: Path, path: Path, split: Split | None = None) -> int:
    """Write the conversations of :func:`read_dataset` to a JSONL file that ``dflash prepare`` reads; returns how many.

    Raises ``OSError`` if the file cannot be written.
    """
    count = 0

    def write(file: Path) -> None:
        nonlocal count
        with file.open("w", encoding="utf-8") as lines:
            for row in read_dataset(folder, split):
                lines.write(json_line(row.text))
                count += 1

    atomic_write(path, write)
    return count


def _read_texts(path: Path, count: int) -> list[dict[str, Any]]:
    try:
        with path.open(encoding="utf-8") as file:  # str.splitlines would also split at U+2028, which JSON may hold
            texts = [json.loads(line) for line in file]
    except FileNotFoundError:
        raise DataError(f"{path} is missing; give the 'dflash prepare' command again to write it.") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError(
            f"{path} is damaged ({error}); remove it and give the 'dflash prepare' command again."
        ) from error
    if len(texts) != count:
        raise DataError(
            f"{path} holds {len(texts)} conversations, but its shard holds {count}; remove it and give the "
            "'dflash prepare' command again."
        )
    return texts
