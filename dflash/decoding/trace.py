"""What each block did, as records: for watching a request live, and for studying it afterwards (``dflash.study``).

``dflash/docs/traces.md`` documents the format.
"""

import fcntl
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import IO, Any

from ..core.environment import PACKAGES, device_name, package_version
from ..core.errors import DataError, DFlashError
from .block import Block
from .inspection import inspected_record
from .profile import Profile

logger = logging.getLogger(__name__)

FORMAT = 1

Record = dict[str, Any]
Trace = Callable[[Record], object]
"""Called with each record of a request: ``list.append``, a :class:`TraceFile`, or any function."""

_encode = json.JSONEncoder(ensure_ascii=False, check_circular=False, separators=(",", ":")).encode


class TraceFile:
    """Writes records to a JSONL file, one line each; as a :data:`Trace` it takes any number of requests.

    A process that is killed loses no block that was answered. The open file may be read meanwhile.

    Args:
        path: An existing file is replaced.
        about: Fields to put into every ``request`` record, such as ``drafter="mine"``.

    Raises ``OSError`` if the file cannot be written, ``DFlashError`` if another trace is being written to it. A context
    manager.
    """

    def __init__(self, path: str | Path, **about: Any):
        self._path, self._about = path, about
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._file: IO[str] = open(path, "a", encoding="utf-8")  # noqa: SIM115  # closed by `close`
            if Path(path).is_file():  # and no device
                self._hold()
                self._file.truncate(0)
        except OSError as error:
            raise self._cannot_write(error) from error

    def _hold(self) -> None:
        """Lock the file against other traces until it is closed, on a disk that has locks."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise DFlashError(f"Another request is writing the trace {self._path}; name another file.") from error
        except OSError:
            logger.info("%s is on a disk without locks: take care that nothing else writes to it.", self._path)

    def __call__(self, record: Record) -> None:
        """Write one record. Raises ``DFlashError`` once the file is closed."""
        if self._file.closed:
            raise DFlashError(f"The trace {self._path} is closed; make another TraceFile for another file.")
        if record["record"] == "request":
            record = record | self._about
        try:
            self._file.write(_encode(record) + "\n")
            self._file.flush()
        except OSError as error:
            raise self._cannot_write(error) from error

    def _cannot_write(self, error: OSError) -> OSError:
        return OSError(f"Cannot write the trace {self._path}: {error.strerror or error}.")

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):  # what could not be written has been told
            self._file.close()

    def __enter__(self) -> "TraceFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def together(*traces: Trace | None) -> Trace | None:
    """One trace that passes each record to all of ``traces``; ``None`` if there are none."""
    given = [trace for trace in traces if trace is not None]

    def send(record: Record) -> None:
        for trace in given:
            trace(record)

    return send if len(given) > 1 else next(iter(given), None)


def read_records(path: str | Path) -> Iterator[Record]:
    """The records of a trace file. Raises ``DataError``, naming the line, for any other file.

    A partial last line, as a killed process leaves it, is skipped.
    """
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    record = json.loads(line)
                    known = record["record"] in ("request", "block") and record.get("format", FORMAT) == FORMAT
                except (ValueError, TypeError, KeyError) as error:
                    if not line.endswith("\n") and number > 1:
                        return
                    raise DataError(f"{path}:{number} is no record of a trace; expected a file of --trace.") from error
                if not known:
                    raise DataError(f"{path}:{number} is of another format; expected format {FORMAT} of --trace.")
                yield record
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"Cannot read the trace {path}: {getattr(error, 'strerror', None) or error}.") from error


def shown_pieces(blocks: Iterable[Record]) -> Iterator[list[tuple[str, int, int]]]:
    """For each ``block`` record the pieces of text that became certain with it: ``(text, block number, token)``.

    ``token`` counts within its block. Joined, the pieces are the text of the answer; a piece is cut where a stop string
    begins.
    """
    waiting: list[tuple[str, int, int]] = []
    for block in blocks:
        waiting += [(piece, block["number"], i) for i, piece in enumerate(block["pieces"])]
        left, certain = len(block["text"]), []
        while waiting and (left > 0 or not waiting[0][0]):
            piece, number, token = waiting.pop(0)
            if len(piece) > left:
                waiting.insert(0, (piece[left:], number, token))
            certain.append((piece[:left], number, token))
            left -= len(certain[-1][0])
        yield certain


# --- records of a request ------------------------------------------------------------------------------


class TokenTexts:
    """The text of single tokens, each looked up once; the id itself if there is no tokenizer."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def __getitem__(self, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = self._look_up(token)
        return self._texts[token]

    def _look_up(self, token: int) -> str:
        if self._tokenizer is None:
            return f"<{token}>"
        text = self._tokenizer.decode([token])
        # A SentencePiece tokenizer drops the space before the first word of a text.
        begins_word = str(self._tokenizer.convert_ids_to_tokens(token)).startswith("\u2581")
        return f" {text}" if begins_word and not text.startswith(" ") else str(text)


class Recorder:
    """Makes the records of one request and passes them on."""

    def __init__(self, traces: Sequence[Trace], texts: TokenTexts, profile: Profile | None = None):
        self.profile = profile
        self._traces: list[Trace] = list(traces) if profile is None else [*traces, profile]
        self._texts, self._known = texts, set[int]()
        self._number = self._position = 0
        self._began = self._last = time.perf_counter()

    def request(self, prompt: Sequence[int], about: Mapping[str, Any]) -> None:
        """The request's own record; the clock starts after it."""
        text = "".join(self._texts[token] for token in prompt)
        self._position = len(prompt)
        self._send({"record": "request", "format": FORMAT, **about, "prompt_tokens": prompt, "prompt": text})
        self._began = self._last = time.perf_counter()

    def block(self, block: Block, tokens: list[int], why: Mapping[str, float], shown: Record) -> None:
        """The record of ``block``, cut to ``tokens``; ``shown`` has its ``pieces``, ``text`` and ``finish_reason``."""
        record = {"record": "block", "number": self._number, "position": self._position, "asleep": block.asleep}
        record |= {"source": block.source, "verified": len(block.drafted), "accepted": block.accepted}
        record |= {"why": {} if self._number == 0 else dict(why), "tokens": tokens}
        pieces = shown["pieces"] + [""] * (len(tokens) - len(shown["pieces"]))  # a stop token has no text
        now = time.perf_counter()
        record |= {**shown, "pieces": pieces, "seconds": self._seconds(block, now - self._last)}
        record["time"] = now - self._began
        self._last, self._number, self._position = now, self._number + 1, self._position + len(tokens)
        seen = inspected_record(block) if block.inspected is not None else {"drafts": block.drafted}
        self._send(record | seen | {"texts": self._new_texts(seen, tokens)})

    def _send(self, record: Record) -> None:
        for trace in self._traces:
            trace(record)

    def _seconds(self, block: Block, elapsed: float) -> dict[str, float]:
        if self._number == 0:
            parts = {"prefill": elapsed}
        elif block.asleep:
            parts = {"plain": block.times.total}
        else:
            parts = {"draft": block.times.draft, "verify": block.times.verify, "rewind": block.times.rewind}
        parts["host"] = max(0.0, elapsed - sum(parts.values()))
        return {name: round(seconds, 7) for name, seconds in parts.items()}

    def _new_texts(self, seen: Record, tokens: list[int]) -> dict[str, str]:
        ids = {*seen["drafts"], *tokens}
        for top in ("draft_top", "target_top"):
            if top in seen:
                ids.update(*seen[top]["tokens"])
        new = ids - self._known
        self._known |= new
        return {str(token): self._texts[token] for token in sorted(new)}


@contextmanager
def recording(
    trace: Trace | str | Path | None,
    profile: bool,
    texts: TokenTexts,
    prompt: Sequence[int],
    models: Mapping[str, Any],
    about: Mapping[str, Any],
) -> Iterator[Recorder | None]:
    """The recorder of a request, whose first record is sent; ``None`` without a trace and a profile.

    ``models`` are named by their type, unless the trace names them; ``about`` goes into the record as plain data.
    """
    if trace is None and not profile:
        yield None
        return
    with ExitStack() as stack:
        sink = stack.enter_context(TraceFile(trace)) if isinstance(trace, str | Path) else trace
        recorder = Recorder([] if sink is None else [sink], texts, Profile() if profile else None)
        names = {name: getattr(model, "model_type", type(model).__name__) for name, model in models.items()}
        now = {"date": datetime.now(UTC).isoformat(timespec="seconds")}
        recorder.request(list(prompt), names | _plain(about) | now | _surroundings())
        yield recorder


@cache
def _surroundings() -> Record:
    return {"device": device_name(), "versions": {name: package_version(name) for name in PACKAGES}}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, Sequence):
        return [_plain(item) for item in value]
    return getattr(value, "__name__", type(value).__name__)
