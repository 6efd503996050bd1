"""Traces as tables, and the standard quantities of speculative decoding computed from them.

Tables have a row for each request, block or draft, and the columns ``trace`` and ``request`` in common, to filter and
group by: ``acceptance_length(blocks[blocks.source == "ngram"])``.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.errors import DataError, DFlashError, install_extra
from ..decoding.profile import PARTS
from ..decoding.trace import Record, read_records
from .served import read_served
from .statistics import Interval, Ratio

if TYPE_CHECKING:
    import pandas as pd


logger = logging.getLogger(__name__)

CUT = "only the beginning was recorded."


@dataclass(frozen=True)
class Request:
    """One request of a trace: its record, and those of its blocks, the prompt's own pass first."""

    trace: str
    number: int
    about: Record
    blocks: list[Record]

    @property
    def finished(self) -> bool:
        """Whether the answer was recorded to its end."""
        return self.blocks[-1]["finish_reason"] is not None

    @property
    def prompt(self) -> tuple[int, ...]:
        """The prompt's tokens, by which requests of several traces are the same."""
        return tuple(self.about["prompt_tokens"])


@dataclass(frozen=True)
class Traces:
    """What :func:`read_traces` found; ``names`` are those of the traces. Records of a server have no ``records``.

    ``requests``: ``trace request target drafter prompt_length tokens blocks seconds tokens_per_second``, then
    ``option_...``. ``blocks``: ``trace request block position source asleep proposed verified accepted committed``,
    then ``seconds_...`` by part and ``why_...``. ``drafts``: ``trace request block position`` (from 1) ``token text
    probability confidence target_probability target_text verified reached accepted``.
    """

    names: list[str]
    records: list[Request]
    requests: "pd.DataFrame"
    blocks: "pd.DataFrame"
    drafts: "pd.DataFrame"


def read_traces(*sources: str | Path | Sequence[Record]) -> Traces:
    """Tables of trace files, of lists of records, or of folders of ``dflash serve --record``.

    A file is called by its name without suffix, or by its path if two have the same name; a list by its number. A
    folder has fewer columns (:func:`~.served.read_served`). Raises ``DataError`` for other files and traces without a
    request, and ``DFlashError`` without pandas.
    """
    pandas = require_pandas()
    requests, names, tables = list[Request](), list[str](), []
    for name, source in zip(_names(sources), sources, strict=True):
        if isinstance(source, str | Path) and Path(source).is_dir():
            tables.append(read_served(name, Path(source)))
            names += dict.fromkeys(tables[-1][0].trace)
        else:
            requests += _requests(name, source)
            names.append(name)
    if requests:
        rows = [_request_row(request) for request in requests], [r for own in requests for r in _block_rows(own)]
        drafts = pandas.DataFrame([r for own in requests for r in _draft_rows(own)], columns=_DRAFT_COLUMNS)
        tables.insert(0, (pandas.DataFrame(rows[0]), pandas.DataFrame(rows[1]), drafts))
    requests_of, blocks, drafts = (pandas.concat(parts, ignore_index=True) for parts in zip(*tables, strict=True))
    return Traces(names, requests, requests_of, blocks, drafts.reindex(columns=_DRAFT_COLUMNS))


def require_pandas() -> Any:
    """The module. Raises ``DFlashError`` if it is not installed."""
    try:
        import pandas
    except ImportError as error:
        raise DFlashError(f"Tables of traces need pandas; {install_extra('study')}.") from error
    return pandas


def _names(sources: Sequence[Any]) -> list[str]:
    stems = [Path(s).stem if isinstance(s, str | Path) else str(i) for i, s in enumerate(sources, 1)]
    if len(set(stems)) == len(stems):
        return stems
    names = [str(s) if isinstance(s, str | Path) else stem for s, stem in zip(sources, stems, strict=True)]
    if len(set(names)) < len(names):
        raise DataError(f"One trace is given twice; expected different ones, got {', '.join(names)}.")
    return names


def _requests(name: str, source: str | Path | Sequence[Record]) -> Iterable[Request]:
    found: list[Request] = []
    for record in read_records(source) if isinstance(source, str | Path) else source:
        if record["record"] == "request":
            found.append(Request(name, len(found), record, []))
        elif not found:
            raise DataError(f"The trace {name} does not begin with a request; expected the whole file.")
        else:
            found[-1].blocks.append(record)
    found = [request for request in found if request.blocks]
    if not found:
        raise DataError(f"The trace {name} holds no answer; let it record one of at least one token.")
    for request in found:
        if not request.finished:
            logger.warning("The trace %s ends within answer %d, of which %s", name, request.number + 1, CUT)
    return found


# --- rows ------------------------------------------------------------------------------------------------


def _request_row(request: Request) -> dict[str, Any]:
    about, blocks = request.about, request.blocks
    tokens = sum(len(block["tokens"]) for block in blocks)
    seconds = blocks[-1]["time"] - blocks[0]["time"]  # since the first token
    row = {"trace": request.trace, "request": request.number, "target": about["target"], "drafter": about["drafter"]}
    row |= {"prompt_length": len(about["prompt_tokens"]), "tokens": tokens, "blocks": len(blocks) - 1}
    row |= {"seconds": seconds, "tokens_per_second": (tokens - 1) / seconds if seconds else np.nan}
    return row | {f"option_{name}": str(value) for name, value in about["options"].items()}


def _block_rows(request: Request) -> Iterable[dict[str, Any]]:
    for block in request.blocks:
        row = {"trace": request.trace, "request": request.number, "block": block["number"]}
        row |= {key: block[key] for key in ("position", "source", "asleep")}
        row |= {"proposed": len(block["drafts"]), "verified": block["verified"], "accepted": block["accepted"]}
        row |= {"committed": len(block["tokens"])}
        row |= {f"seconds_{part}": block["seconds"].get(part, 0.0) for part in PARTS}
        yield row | {f"why_{name}": value for name, value in block["why"].items()}


_DRAFT_COLUMNS = (
    *("trace", "request", "block", "position", "token", "text", "probability", "confidence", "target_probability"),
    *("target_text", "verified", "reached", "accepted"),
)


def _draft_rows(request: Request) -> Iterable[dict[str, Any]]:
    """A draft past the end of the answer counts as not verified: it is unknown whether it was right."""
    texts: dict[str, str] = {}
    for block in request.blocks:
        texts |= block["texts"]
        ended = block["finish_reason"] == "stop"
        verified = min(block["verified"], len(block["tokens"])) if ended else block["verified"]
        likeliest = [row[0] for row in block.get("target_top", {"tokens": []})["tokens"]]
        given = {name: block.get(name, ()) for name in ("draft_probability", "confidence", "target_probability")}
        for i, token in enumerate(block["drafts"]):
            probability, confidence, of_target = (values[i] if i < len(values) else np.nan for values in given.values())
            yield {
                "trace": request.trace,
                "request": request.number,
                "block": block["number"],
                "position": i + 1,
                "token": token,
                "text": texts[str(token)],
                "probability": probability,
                "confidence": confidence,
                "target_probability": of_target,
                "target_text": texts[str(likeliest[i])] if i < min(verified, len(likeliest)) else None,
                "verified": i < verified,
                "reached": i < verified and i <= block["accepted"],
                "accepted": i < min(verified, block["accepted"]),
            }


# --- quantities ------------------------------------------------------------------------------------------


def acceptance_length(blocks: "pd.DataFrame") -> Interval:
    """Tokens committed per drafted block, tau, with a 95 % interval over requests; plain steps are left out."""
    drafted = blocks[(blocks.block > 0) & ~blocks.asleep]
    sums = drafted.groupby(["trace", "request"]).committed.agg(["sum", "count"])
    return Ratio.of(sums["sum"], sums["count"]).interval().bounded(1)


def tokens_per_second(requests: "pd.DataFrame") -> Interval:
    """Tokens after the first of each request over the seconds since the first, with a 95 % interval."""
    return Ratio.of(requests.tokens - 1, requests.seconds).interval()


def survival(drafts: "pd.DataFrame") -> "pd.DataFrame":
    """By position: of the blocks that verified a draft there, how many accepted it and all before it.

    Columns ``position blocks survival low high acceptance``; the last is the probability that a draft is accepted if
    all before it were. Limits are those of a 95 % interval over requests, NaN where a single request verified a draft
    or none was accepted.

    Drafts that were not verified are left out, since it is unknown whether they were right. If a policy verifies more
    drafts of promising blocks, deep positions are those of good blocks: survival is then too high, and may rise with
    the position. For the drafter's own survival, verify every draft, as with ``policy="full"``.
    """
    pandas = require_pandas()
    rows = []
    for position, here in drafts[drafts.verified.astype(bool)].groupby("position"):
        sums = here.groupby(["trace", "request"]).accepted.agg(["sum", "count"]).astype(float)
        of_all, reached = Ratio.of(sums["sum"], sums["count"]).interval().bounded(0, 1), here[here.reached]
        low, high = (np.nan if limit is None else limit for limit in (of_all.low, of_all.high))
        conditional = reached.accepted.mean() if len(reached) else np.nan
        rows.append((position, len(here), of_all.value, low, high, conditional))
    return pandas.DataFrame(rows, columns=["position", "blocks", "survival", "low", "high", "acceptance"])


def acceptance_counts(blocks: "pd.DataFrame") -> "pd.Series":
    """How many drafted blocks accepted ``0, 1, ..`` drafts."""
    drafted = blocks[(blocks.block > 0) & ~blocks.asleep]
    most = int(drafted.verified.max()) if len(drafted) else 0
    return drafted.accepted.value_counts().reindex(range(most + 1), fill_value=0).rename("blocks")


def calibration(drafts: "pd.DataFrame", bins: int = 10) -> "pd.DataFrame":
    """The reliability table: drafts that were reached, in ``bins`` equal ranges of the drafter's probability.

    The probability is that of its confidence head if it has one. Columns ``low high drafts probability accepted``:
    the last two are means, equal if the drafter is calibrated (Guo et al. 2017, arXiv:1706.04599).
    """
    pandas = require_pandas()
    reached = drafts[drafts.reached.astype(bool)]
    stated = reached.confidence.astype(float).fillna(reached.probability.astype(float))
    known = pandas.DataFrame({"stated": stated, "accepted": reached.accepted.astype(float)}).dropna()
    known["bin"] = np.minimum((known.stated * bins).astype(int), bins - 1)
    table = known.groupby("bin").agg(
        drafts=("stated", "size"), probability=("stated", "mean"), accepted=("accepted", "mean")
    )
    table.insert(0, "low", table.index / bins)
    table.insert(1, "high", (table.index + 1) / bins)
    return table.reset_index(drop=True)


def calibration_error(table: "pd.DataFrame") -> float:
    """Expected calibration error of a :func:`calibration` table; NaN without drafts."""
    weights = table.drafts / table.drafts.sum()
    return float((weights * (table.probability - table.accepted).abs()).sum()) if len(table) else float("nan")


def time_by_part(blocks: "pd.DataFrame") -> "pd.Series":
    """Seconds by part, in the order ``prefill draft verify rewind plain host``."""
    return blocks[[f"seconds_{part}" for part in PARTS]].sum().rename(lambda name: name.removeprefix("seconds_"))


def summary(traces: Traces) -> "pd.DataFrame":
    """A row for each trace, by its name: quantities, with limits (``_low``, ``_high``) of 95 % intervals over requests.

    ``acceptance_length`` and ``tokens_per_second`` are missing without a drafted block, or with a single token.
    ``tokens`` are all tokens of the answers; ``dflash eval`` counts those of blocks, without the first of each answer,
    which comes from the prompt's own pass.
    """
    rows = []
    for name in traces.names:
        requests, blocks, drafts = (t[t.trace == name] for t in (traces.requests, traces.blocks, traces.drafts))
        row: dict[str, Any] = {"trace": name, "requests": len(requests), "tokens": int(requests.tokens.sum())}
        for key, interval in (
            ("acceptance_length", acceptance_length(blocks)),
            ("tokens_per_second", tokens_per_second(requests)),
        ):
            row |= {key: interval.value, f"{key}_low": interval.low, f"{key}_high": interval.high}
        row["plain_steps"] = int(blocks.asleep.sum())
        row["calibration_error"] = calibration_error(calibration(drafts))
        rows.append(row)
    return require_pandas().DataFrame(rows).set_index("trace")
