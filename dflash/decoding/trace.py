"""What each block did, as records: to watch a text being written, and to study it afterwards (``dflash.study``).

Knows blocks, the logits of drafter and target, and the text of tokens. Must not know how a block is decoded, or what
becomes of the records.

**The format.** A trace is a sequence of records, each a ``dict`` of plain data, in a file one JSON object a line
(JSONL, UTF-8). A request is one record ``"request"`` and, after it, one record ``"block"`` for the prompt's own pass
and each block or plain step. A reader ignores keys that it does not know; arrays have one entry a token unless said.

``request``: ``format`` (1), ``target``, ``drafter`` (names), ``block_size``, ``options`` (those given),
``prompt_tokens``, ``prompt`` (text, special tokens included), ``parts_apart`` (whether the seconds are those of the
parts, as with ``profile=True``, or of work that overlaps on the device), ``date``, ``device``, ``versions``.

``block``:

- ``number`` (0: the prompt's own pass), ``position`` (of its first token in the sequence, the prompt included),
  ``asleep`` (a plain step; no drafter was asked), ``source`` (which of several drafters)
- ``drafts`` (all ``n`` proposed tokens), ``verified`` (``k``: the target checked the first so many),
  ``accepted``, ``why`` (the policy's reasons as numbers by name: what it expected of a length, or, of a plain step,
  after how many tokens it will draft again)
- ``tokens`` (committed: accepted drafts and one token of the target's own, to a stop token), ``pieces`` (their texts,
  which joined are the text of the answer), ``text`` (what became certain in this step; a stop string can hold text
  back or cut it), ``finish_reason``
- ``draft_probability`` (``n``; the drafter's of its drafts), ``confidence`` (``n``; where it has a head for that),
  ``draft_top`` (``tokens`` and ``probabilities``, each ``n`` rows of the few likeliest); absent where the drafter has
  no logits, as an n-gram drafter
- ``target_probability`` (``k``; the target's of the drafts that it checked), ``target_top`` (``k + 1`` rows): after the
  logits processors, at temperature 1. A row after the first rejected draft tells what would follow that draft
- ``parents`` (``n``; only of a tree: the draft that each follows, -1 for the anchor). The accepted drafts stand first,
  then the others from the likeliest on, and row ``i`` of ``target_top`` is the one that checked draft ``i``
- ``texts`` (of each token id that this request names for the first time)
- ``seconds`` by part: ``prefill``, or ``draft``, ``verify`` and ``rewind``, or ``plain``; and ``host``, the rest, in
  which the caller's own time is. ``time``: seconds since the request began
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import IO, Any

import mlx.core as mx
import numpy as np

from ..core.backend import on_cpu
from ..core.environment import PACKAGES, device_name, package_version
from ..core.errors import DataError
from ..drafters.protocol import Proposal
from .block import Block
from .profile import Profile

FORMAT = 1
TOP = 4
"""How many of the likeliest tokens are recorded for each position."""

TOGETHER = 0.5
"""Seconds of records that are made together for a :class:`TraceFile`."""

Record = dict[str, Any]
Trace = Callable[[Record], object]
"""Gets the records of a request one after another: ``list.append``, a :class:`TraceFile`, or one's own."""

_encode = json.JSONEncoder(ensure_ascii=False, check_circular=False, separators=(",", ":")).encode


class TraceFile:
    """Writes records to a JSONL file, a line each; as a :data:`Trace` it takes any number of requests.

    Its records are made and written together, twice a second and at the end of a request: hot caches make that three
    times as quick as one at a time. A process that is killed leaves whole lines, without its last half second.

    Args:
        path: A file that exists is replaced.
        about: Fields of every request's record, such as ``drafter="mine"``.

    Raises ``OSError`` if the file cannot be written. A context manager; an open one may be read by others meanwhile.
    """

    def __init__(self, path: str | Path, **about: Any):
        self._about = about
        self.held_back: list[Callable[[], None]] = []
        """Called before the file closes: each hands on the records that a request under way still holds back."""
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._file: IO[str] = open(path, "w", encoding="utf-8")  # noqa: SIM115  # closed by `close`
        except OSError as error:
            raise OSError(f"Cannot write the trace {path}: {error.strerror or error}.") from error

    def __call__(self, record: Record) -> None:
        """Write one record."""
        if record["record"] == "request":
            record = record | self._about
        self._file.write(_encode(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Write what requests under way hold back, and close the file."""
        for send in self.held_back:
            send()
        self._file.close()

    def __enter__(self) -> "TraceFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def together(*traces: Trace | None) -> Trace | None:
    """One trace that hands each record to all of ``traces``; ``None`` of none."""
    given = [trace for trace in traces if trace is not None]

    def send(record: Record) -> None:
        for trace in given:
            trace(record)

    return send if len(given) > 1 else next(iter(given), None)


def read_records(path: str | Path) -> Iterator[Record]:
    """The records of a trace file. Raises ``DataError``, naming the line, for anything else.

    A last line without its end, as a killed process leaves it, is passed over.
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
    """For each ``block`` record the pieces of text that it made certain: ``(text, block number, token)``.

    ``token`` counts within its block. Joined they are the text of the answer: a piece is cut where a stop string
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
    """The text of single tokens, each looked up once; ids themselves where there is no tokenizer."""

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
        # A sentence-piece tokenizer drops the space before the first word of a text.
        begins_word = str(self._tokenizer.convert_ids_to_tokens(token)).startswith("\u2581")
        return f" {text}" if begins_word and not text.startswith(" ") else str(text)


class Recorder:
    """Makes the records of one request and hands them on: at once, unless all of ``traces`` are files."""

    def __init__(self, traces: Sequence[Trace], texts: "TokenTexts", profile: "Profile | None" = None):
        self.profile = profile
        self._traces: list[Trace] = list(traces) if profile is None else [*traces, profile]
        self._together = TOGETHER if all(isinstance(trace, TraceFile) for trace in traces) else 0.0
        self._texts, self._known = texts, set[int]()
        self._number = self._position = 0
        self._waiting: list[tuple[Block, Record]] = []
        self._began = self._last = self._sent = time.perf_counter()

    def request(self, prompt: Sequence[int], about: Mapping[str, Any]) -> None:
        """The request's own record; the clock starts after it."""
        text = "".join(self._texts[token] for token in prompt)
        self._position = len(prompt)
        self._send({"record": "request", "format": FORMAT, **about, "prompt_tokens": prompt, "prompt": text})
        self._began = self._last = self._sent = time.perf_counter()

    def block(self, block: Block, tokens: list[int], why: Mapping[str, float], said: Record) -> None:
        """The record of ``block``, which is cut to ``tokens``; ``said`` holds what is known of its text."""
        record = {"record": "block", "number": self._number, "position": self._position, "asleep": block.asleep}
        record |= {"source": block.source, "verified": len(block.drafted), "accepted": block.accepted}
        record |= {"why": {} if self._number == 0 else dict(why), "tokens": tokens}
        pieces = said["pieces"] + [""] * (len(tokens) - len(said["pieces"]))  # a stop token has no text
        now = time.perf_counter()
        record |= {**said, "pieces": pieces, "seconds": self._seconds(block, now - self._last)}
        self._waiting.append((block, record | {"time": now - self._began}))
        self._last, self._number, self._position = now, self._number + 1, self._position + len(tokens)
        if said["finish_reason"] is not None or now - self._sent >= self._together:
            self.send_waiting()

    def send_waiting(self) -> None:
        """Finish and hand on the records that wait for others."""
        waiting, self._waiting = self._waiting, []
        for block, record in waiting:
            seen = _read(block.inspected, block) if block.inspected is not None else {"drafts": block.drafted}
            self._send({**record, **seen, "texts": self._new_texts(seen, record["tokens"])})
        self._sent = time.perf_counter()

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
    """The recorder of a request, its first record sent; ``None`` where nobody watches.

    ``models`` are named by their type where nobody knows better, and ``about`` goes into the record as plain data.
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
        held_back = sink.held_back if isinstance(sink, TraceFile) else []
        held_back.append(recorder.send_waiting)
        try:
            yield recorder
        finally:
            held_back.remove(recorder.send_waiting)
            recorder.send_waiting()


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


# --- probabilities ---------------------------------------------------------------------------------------


def inspect(proposal: Proposal, logits_LV: mx.array) -> dict[str, mx.array]:
    """What a trace needs of a block, as lazy arrays that are computed with it (:attr:`Decoding.inspect`).

    On a CPU these are the logits themselves, of which numpy finds the likeliest tokens fifteen times as quickly as
    MLX. On other devices the search stays on the device, and a few numbers a position leave it.
    """
    arrays = {"drafts": proposal.tokens[0]}
    if proposal.confidence is not None:
        arrays["confidence"] = proposal.confidence[0].astype(mx.float32)
    if proposal.parents is not None:
        arrays["parents"] = mx.array(proposal.parents)
    scores = proposal.logits if proposal.log_q is None else proposal.log_q
    if scores is not None and proposal.tokens.size:
        arrays["draft_scores"] = scores[0].astype(mx.float32)
        if proposal.candidates is not None:
            arrays["candidates"] = proposal.candidates[0]
    arrays["target_scores"] = logits_LV.astype(mx.float32)
    if on_cpu():
        return arrays
    for name in ("draft", "target"):
        if f"{name}_scores" in arrays:
            places = _places(mx, arrays, name)
            own, top_NK, probabilities_NK = _likeliest(arrays.pop(f"{name}_scores"), *places)
            arrays |= {f"{name}_own": own, f"{name}_top": top_NK, f"{name}_probabilities": probabilities_NK}
    return arrays


def _places(xp: Any, arrays: Mapping[str, Any], name: str) -> tuple[Any, Any]:
    """Row and column of each draft in the scores of drafter or target; ``xp`` is the module of ``arrays``."""
    drafts_N, scores_NV = arrays["drafts"], arrays[f"{name}_scores"]
    if name == "draft" and "candidates" in arrays:
        return xp.arange(len(drafts_N)), xp.argmax(arrays["candidates"] == drafts_N[:, None], axis=-1)
    checked = len(drafts_N) if name == "draft" else len(scores_NV) - 1
    tree = name == "target" and "parents" in arrays
    rows = arrays["parents"][:checked] + 1 if tree else xp.arange(checked)
    # Ids are checked by the decode loop, but only once they are known; without a sign, a negative one is large.
    return rows, xp.minimum(drafts_N[:checked].astype(xp.uint32), scores_NV.shape[-1] - 1)


def _likeliest(scores_NV: mx.array, rows: mx.array, columns: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """The probabilities at ``rows`` and ``columns``, and of each row the likeliest tokens with theirs."""
    log_total_N1 = mx.logsumexp(scores_NV, axis=-1, keepdims=True)
    own = mx.exp(scores_NV[rows, columns] - log_total_N1[rows, 0])
    everywhere_V, top, values, rest_NV = mx.arange(scores_NV.shape[-1]), [], [], scores_NV
    for _ in range(min(TOP, scores_NV.shape[-1])):
        best_N1 = mx.argmax(rest_NV, axis=-1, keepdims=True)
        top.append(best_N1)
        values.append(mx.take_along_axis(rest_NV, best_N1, axis=-1))
        rest_NV = mx.where(everywhere_V == best_N1, -mx.inf, rest_NV)
    return own, mx.concatenate(top, axis=-1), mx.exp(mx.concatenate(values, axis=-1) - log_total_N1)


def _likeliest_on_host(scores_NV: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> tuple[np.ndarray, ...]:
    """As :func:`_likeliest`; ``scores_NV`` is overwritten, since each pass over new memory costs."""
    every_N, count, own = np.arange(len(scores_NV)), min(TOP, scores_NV.shape[-1]), scores_NV[rows, columns]
    top_NK, values_NK = np.empty((len(scores_NV), count), np.int64), np.empty((len(scores_NV), count), np.float32)
    for k in range(count):
        top_NK[:, k] = best_N = scores_NV.argmax(axis=-1)
        values_NK[:, k] = scores_NV[every_N, best_N]
        scores_NV[every_N, best_N] = -np.inf
    highest_N1 = values_NK[:, :1]
    scores_NV -= highest_N1
    likeliest_NK = np.exp(values_NK - highest_N1)
    total_N = np.exp(scores_NV, out=scores_NV).sum(axis=-1) + likeliest_NK.sum(axis=-1)
    return np.exp(own - highest_N1[rows, 0]) / total_N[rows], top_NK, likeliest_NK / total_N[:, None]


def _read(inspected: Mapping[str, mx.array], block: Block) -> Record:
    """The record's part that ``inspect`` prepared; the drafts of a tree in the order of the block's."""
    arrays = {name: np.array(array) for name, array in inspected.items()}
    checked = block.order[: len(block.drafted)]
    record: Record = {"drafts": arrays["drafts"][block.order].tolist()}
    target_rows = [*range(len(checked) + 1)]
    if "parents" in arrays:  # the rows at which drafts were checked, then that of the last accepted one
        new = {-1: -1} | {old: new for new, old in enumerate(block.order)}
        record["parents"] = [new[parent] for parent in arrays["parents"][block.order].tolist()]
        last = block.order[block.accepted - 1] + 1 if block.accepted else 0
        target_rows = [*(arrays["parents"][checked] + 1).tolist(), last]
    if "confidence" in arrays:
        record["confidence"] = _rounded(arrays["confidence"][block.order])
    for name, owns, rows in (("draft", block.order, block.order), ("target", checked, target_rows)):
        if f"{name}_scores" in arrays:
            places = _places(np, arrays, name)
            own, top_NK, probabilities_NK = _likeliest_on_host(arrays[f"{name}_scores"], *places)
        elif f"{name}_top" in arrays:
            own, top_NK, probabilities_NK = (arrays[f"{name}_{key}"] for key in ("own", "top", "probabilities"))
        else:
            continue
        if name == "draft" and "candidates" in arrays:
            own = own * (arrays["candidates"] == arrays["drafts"][:, None]).any(axis=-1)
            top_NK = np.take_along_axis(arrays["candidates"], top_NK, axis=-1)
        record[f"{name}_probability"] = _rounded(own[owns])
        record[f"{name}_top"] = {"tokens": top_NK[rows].tolist(), "probabilities": _rounded(probabilities_NK[rows])}
    return record


def _rounded(probabilities: np.ndarray) -> Any:
    return np.round(probabilities.astype(np.float64), 5).tolist()
