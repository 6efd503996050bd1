"""What a server records of its requests: a dataset that grows, which training reads as any other.

    manifest.json          the target's and its tokenizer's fingerprints, and the rule of what is held out
    shards/000000.jsonl    a line for each complete answer: {"messages", "prompt_tokens", "answer_tokens", ...}

A line is on the disk before the end of its answer is sent, so a killed process loses requests in flight at most. It may
leave a part of a line at the end of a file, which is no request; the next process begins a new file.
"""

import json
import logging
import os
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..core.errors import DataError, one_line
from ..core.files import exclusive_lock, read_json, write_json
from ..target import LoadedTargetModel
from ..target.identity import target_fingerprint, tokenizer_fingerprint

logger = logging.getLogger(__name__)

ABOUT = {"format": "dflash-dataset", "version": 2, "recorded": True, "heldout": {"percent": 10.0, "at_least": 5}}
MANIFEST, SHARDS = "manifest.json", "shards"
PARTS = 16
"""How many files a record has at most, of equal size, of which the oldest goes."""


@contextmanager
def recording(folder: Path | None, most_bytes: int, redact: Path | None) -> Iterator["Record | None"]:
    """A record in ``folder``, which no other process writes to meanwhile; ``None`` without one.

    Raises ``DataError`` for a pattern of the file ``redact`` that is wrong, and for a folder with other files;
    ``DFlashError`` if another process writes to it, ``OSError`` if it cannot be written to.
    """
    if folder is None:
        if redact is not None:
            raise DataError("redact says what a record leaves out; give record, the folder of one, too.")
        yield None
        return
    patterns = [] if redact is None else read_patterns(redact)
    if any(folder.glob("[!.]*")) and not (folder / MANIFEST).exists():
        raise DataError(f"{folder} holds other files; choose an empty folder for the record.")
    with exclusive_lock(folder):
        folder.chmod(0o700)
        yield Record(folder, most_bytes, patterns)


def read_patterns(path: Path) -> list[re.Pattern[str]]:
    """The regular expressions of a file, one a line. Raises ``DataError``, naming the line, for a wrong one."""
    found = []
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()  # an editor's mark is no part of a pattern
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"Cannot read the patterns in {path}: {one_line(error)}") from error
    for number, line in enumerate(lines, 1):
        try:
            found += [re.compile(line)] if line.strip() else []
        except re.error as error:
            raise DataError(f"{path}, line {number} is no regular expression: {error}.") from error
    return found


class Record:
    """The record of one server. It takes at most ``most_bytes``; no request that matches a pattern is in it."""

    def __init__(self, folder: Path, most_bytes: int, patterns: Sequence[re.Pattern[str]]):
        self.folder, self._most, self._patterns = folder, most_bytes, patterns
        self._lock, self._file = threading.Lock(), -1

    def begin(self, target: LoadedTargetModel) -> None:
        """Record answers of ``target`` from now on. Raises ``DataError`` if the folder holds another target's."""
        self._target, path = target, self.folder / MANIFEST
        whose = {"target": target_fingerprint(target), "tokenizer": tokenizer_fingerprint(target)}
        if not path.exists():
            write_json(path, ABOUT | whose | {"source": "serve", "stop_tokens": sorted(target.stop_token_ids())})
        elif not (before := read_json(path)).get("recorded") or any(before.get(name) != whose[name] for name in whose):
            raise DataError(f"{self.folder} holds no record of this target; choose an empty folder.")
        (self.folder / SHARDS).mkdir(exist_ok=True)

    def add(self, messages: list[dict[str, Any]], prompt: list[int], answer: list[int], **about: Any) -> None:
        """Record one answer, unless it or its request matches a pattern; a disk that is full is told of in the log.

        ``messages`` end with the request; a token that ends the answer is among ``answer``.
        """
        decode = self._target.tokenizer.decode
        ended = answer[-1] in self._target.stop_token_ids()
        text = decode(answer[:-1] if ended else answer)
        kept = [{"role": m["role"], "content": _text(m.get("content"))} for m in messages]
        kept.append({"role": "assistant", "content": text})
        for pattern in self._patterns:  # the prompt has what the template makes of tools, too
            if any(pattern.search(own) for own in (*(m["content"] for m in kept), decode(prompt))):
                return
        line = {"messages": kept, "prompt_tokens": prompt, "answer_tokens": answer} | about
        data = (json.dumps(line) + "\n").encode()
        with self._lock:
            try:
                self._append(data)
            except OSError as error:
                logger.warning("A request is not recorded: %s", error.strerror or one_line(error))

    def _append(self, data: bytes) -> None:
        if self._file < 0 or os.fstat(self._file).st_size + len(data) > self._most // PARTS:
            self.close()
            numbers = shard_numbers(self.folder)
            path = recorded_path(self.folder, numbers[-1] + 1 if numbers else 0)
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o600)
            self._make_room()
        size = os.fstat(self._file).st_size
        if os.write(self._file, data) < len(data):
            os.ftruncate(self._file, size)
            raise OSError("the disk took a part of it")
        os.fsync(self._file)

    def _make_room(self) -> None:
        """Remove the oldest files until a new one fits."""
        paths = [recorded_path(self.folder, number) for number in shard_numbers(self.folder)]
        held = sum(path.stat().st_size for path in paths) + self._most // PARTS
        while held > self._most and len(paths) > 1:
            held -= paths[0].stat().st_size
            logger.info("The record is full: its oldest file, %s, is removed.", paths[0])
            paths.pop(0).unlink()

    def close(self) -> None:
        """Let the next request begin a new file."""
        with suppress(OSError):
            os.close(self._file)
        self._file = -1


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content or ())


# --- reading ------------------------------------------------------------------------------------------------


def recorded_path(folder: Path, number: int) -> Path:
    """A file of a record."""
    return folder / SHARDS / f"{number:06d}.jsonl"


def shard_numbers(folder: Path) -> list[int]:
    """The numbers of a record's files, the oldest first."""
    return sorted(int(path.stem) for path in (folder / SHARDS).glob("[0-9]*.jsonl"))


def recorded(path: Path) -> list[dict[str, Any]]:
    """The lines of a record's file, without one that was cut off. Raises ``DataError`` for a damaged file."""
    try:
        with path.open("rb") as file:
            return [json.loads(line) for line in file if line.endswith(b"\n")]
    except FileNotFoundError:  # it made room
        return []
    except ValueError as error:
        raise DataError(f"{path} is damaged ({one_line(error)}); remove it.") from error
