"""A benchmark's results as JSON, as a table, and as a verdict."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from .runs import PromptResult
from .speedup import LEAST_BLOCKS, LEAST_TOKENS, Limit
from .statistics import acceptance_length, overall_tps, spread, summarize

_SHOWN = 48  # characters of a prompt in the table
_Verdict = tuple[bool, bool] | None


@dataclass(frozen=True)
class Report:
    """What a benchmark found with one drafter.

    Args:
        settings: What was asked for.
        results: One a prompt.
        greedy: Whether tokens were compared.
        limit: The arithmetic limit of the ratio, if it was measured; shown as its ceiling (``--limit`` is another).
        verdicts: Whether the answers of (plain, DFlash) are correct, for each prompt; ``None`` without a check.
        about: More entries of the JSON, next to ``settings``, such as the environment.
    """

    settings: dict[str, Any]
    results: list[PromptResult]
    greedy: bool
    limit: Limit | None = None
    verdicts: list[_Verdict] | None = None
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def lossless(self) -> bool:
        """No difference was found; sampled tokens are not compared."""
        return all(r.difference is None for r in self.results)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: ``settings``, what ``about`` holds, ``prompts``, ``total`` and ``limit``."""
        return {"settings": self.settings, **self.about, **self.found()}

    def found(self) -> dict[str, Any]:
        """Plain data of the results alone: ``prompts``, ``total``, ``by_kind`` and ``limit``."""
        rows = [self._prompt_dict(*pair) for pair in self._judged()]
        by_kind = {kind: report.total() for kind, report in self.by_kind().items()}
        return {"prompts": rows, "total": self.total(), "by_kind": by_kind, "limit": self._limit_dict()}

    def by_kind(self) -> dict[str, "Report"]:
        """A report on the prompts of each kind, without the limit; empty if prompts have none."""
        kinds: dict[str, list[tuple[PromptResult, _Verdict]]] = {}
        for result, verdict in self._judged():
            if result.prompt.kind is not None:
                kinds.setdefault(result.prompt.kind, []).append((result, verdict))
        return {
            kind: replace(self, results=[r for r, _ in own], verdicts=[v for _, v in own], limit=None)
            for kind, own in kinds.items()
        }

    def _judged(self) -> list[tuple[PromptResult, _Verdict]]:
        return list(zip(self.results, self.verdicts or [None] * len(self.results), strict=True))

    def render(self) -> RenderableType:
        """A table of prompts, one of their kinds if they have some, and the totals below."""
        table = Table("", "prompt", box=None, pad_edge=False)
        for name in ("tokens", "plain tok/s", "DFlash tok/s", "ratio", "accepted", "correct"):
            table.add_column(name, justify="right")
        table.add_column("tokens are")
        for i, (result, verdict) in enumerate(self._judged(), 1):
            table.add_row(str(i), *self._cells(result, verdict))
        kinds = self.by_kind()
        below: list[RenderableType] = [_totals("kind", kinds), ""] if kinds else []
        return Group(table, "", *below, *self._total_lines())

    def _prompt_dict(self, result: PromptResult, verdict: _Verdict) -> dict[str, Any]:
        difference = result.difference
        return {
            "prompt": result.prompt.text,
            "kind": result.prompt.kind,
            "prompt_tokens": len(result.prompt.tokens),
            "generation_tokens": len(result.dflash[0].tokens),
            "plain_tps": overall_tps(result.plain),
            "dflash_tps": overall_tps(result.dflash),
            "ratio": spread(result.ratios),
            "request_ratio": spread(result.request_ratios),
            "acceptance_length": acceptance_length(result.dflash),
            "committed": [run.committed for run in result.dflash],
            "drafted": [run.drafted for run in result.dflash],
            "accepted": [run.accepted for run in result.dflash],
            "identical": difference is None if self.greedy else None,
            "difference": asdict(difference) if difference else None,
            "correct": {"plain": verdict[0], "dflash": verdict[1]} if verdict else None,
        }

    def total(self) -> dict[str, Any]:
        """Plain data over all prompts, as in :func:`~dflash.evaluation.statistics.summarize`."""
        total = summarize(self.results)
        if not self.greedy:
            total["identical"] = None
        judged = [v for v in self.verdicts or () if v]
        sides = {"plain": sum(p for p, _ in judged), "dflash": sum(d for _, d in judged), "of": len(judged)}
        return total | {"correct": sides if judged else None}

    def _limit_dict(self) -> dict[str, Any] | None:
        if self.limit is None:
            return None
        reached = summarize(self.results)["overall_ratio"]
        return {
            "acceptance_length": self.limit.acceptance_length,
            "plain_ms": 1000 * self.limit.plain,
            "draft_ms": 1000 * self.limit.draft,
            "verify_ms": 1000 * self.limit.verify,
            "speedup": self.limit.speedup,
            "fraction_reached": reached and reached / self.limit.speedup,
        }

    def _cells(self, result: PromptResult, verdict: _Verdict) -> list[str]:
        return [
            _shortened(result.prompt.text),
            str(len(result.dflash[0].tokens)),
            _number(overall_tps(result.plain), 1),
            _number(overall_tps(result.dflash), 1),
            _spread(spread(result.ratios)),
            _number(acceptance_length(result.dflash), 2),
            _verdict(verdict),
            self._identity(result),
        ]

    def _identity(self, result: PromptResult) -> str:
        if not self.greedy:
            return "sampled"
        if result.difference is None:
            return "identical"
        d = result.difference
        margin = "one answer ends" if d.margin is None else f"logit margin {d.margin:.3g}"
        return f"different at {d.position} ({margin})"

    def _total_lines(self) -> list[str]:
        total, limit = self.total(), self._limit_dict()
        lines = [
            f"tokens/s     plain mlx_lm {_number(total['plain_tps'], 1)}, DFlash {_number(total['dflash_tps'], 1)}, "
            f"ratio of the totals {_number(total['overall_ratio'], 2)}",
            f"ratio        {_spread(total['ratio'])} (median, least to greatest over prompts and runs)",
            f"with prompt  {_spread(total['request_ratio'])} (the same for whole requests, their prompts included)",
            f"acceptance   {_number(total['acceptance_length'], 2)} tokens per block",
            f"tokens are   {self.overall_identity()}",
        ]
        if total["correct"]:
            c = total["correct"]
            lines.append(f"correct      plain {c['plain']}, DFlash {c['dflash']} of {c['of']}")
        if limit is None:
            return [
                *lines,
                f"ceiling      not measured: too few blocks were verified whole, or answers are too short; give more "
                f"prompts ({LEAST_BLOCKS} blocks), longer answers ({LEAST_TOKENS} tokens) or --policy full",
            ]
        reached = limit["fraction_reached"]
        return [
            *lines,
            f"ceiling      {limit['speedup']:.2f} = {limit['acceptance_length']:.2f} x {limit['plain_ms']:.2f} ms / "
            f"({limit['draft_ms']:.2f} ms + {limit['verify_ms']:.2f} ms), tau x plain / (draft + verify)",
            f"reached      {_number(reached and 100 * reached, 0)} % of the ceiling, by the ratio of the totals",
        ]

    def overall_identity(self) -> str:
        """One phrase on whether the tokens of both sides are the same."""
        if not self.greedy:
            return "sampled by each side for itself, so not compared"
        different = sum(r.difference is not None for r in self.results)
        if not different:
            return f"identical on all {len(self.results)} prompts"
        return f"DIFFERENT on {different} of {len(self.results)} prompts"


def several_dict(reports: Mapping[str, Report]) -> dict[str, Any]:
    """Plain data of reports on the same prompts with several drafters: ``settings`` and ``drafters`` by name."""
    first = next(iter(reports.values()))
    found = {name: report.found() for name, report in reports.items()}
    return {"settings": first.settings, **first.about, "drafters": found}


def render_several(reports: Mapping[str, Report]) -> RenderableType:
    """A table of prompts with the ratio and acceptance length of each drafter, and each drafter's totals."""
    table = Table("", "prompt", box=None, pad_edge=False)
    for name in ("tokens", "plain tok/s", *reports):
        table.add_column(name, justify="right")
    for i, results in enumerate(zip(*(report.results for report in reports.values()), strict=True), 1):
        cells = (
            f"{_spread(spread(r.ratios))} x, {_number(acceptance_length(r.dflash), 2)}"
            + ("" if r.difference is None else f", differs at {r.difference.position}")
            for r in results
        )
        first = results[0]
        speed = _number(overall_tps(first.plain), 1)
        table.add_row(str(i), _shortened(first.prompt.text), str(len(first.plain[0].tokens)), speed, *cells)
    rows: dict[str, Report] = {}
    for name, report in reports.items():
        rows |= {name: report} | {f"{name}, {kind}": own for kind, own in report.by_kind().items()}
    return Group(table, "", _totals("drafter", rows))


def _totals(heading: str, reports: Mapping[str, Report]) -> Table:
    """A row of totals for each report."""
    totals = Table(heading, box=None, pad_edge=False)
    for name in ("prompts", "tok/s", "ratio of the totals", "ratio", "with prompt", "accepted", "correct"):
        totals.add_column(name, justify="right")
    totals.add_column("tokens are")
    for name, report in reports.items():
        total, limit = report.total(), report.limit
        correct = total["correct"]
        totals.add_row(
            name,
            str(total["prompts"]),
            _number(total["dflash_tps"], 1),
            _number(total["overall_ratio"], 2) + (f" of {limit.speedup:.2f}" if limit else ""),
            _spread(total["ratio"]),
            _spread(total["request_ratio"]),
            _number(total["acceptance_length"], 2),
            f"{correct['dflash']} of {correct['of']}" if correct else "-",
            report.overall_identity(),
        )
    return totals


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN else line[: _SHOWN - 1] + "…"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _spread(values: dict[str, float] | None) -> str:
    if values is None:
        return "-"
    if values["min"] == values["max"]:
        return f"{values['median']:.2f}"
    return f"{values['median']:.2f} ({values['min']:.2f}-{values['max']:.2f})"


def _verdict(verdict: _Verdict) -> str:
    if verdict is None:
        return "-"
    plain, dflash = ("yes" if ok else "no" for ok in verdict)
    return plain if plain == dflash else f"{plain}/{dflash}"
