"""A finished benchmark as JSON, as a table, and as a verdict.

Knows how results are shown. Must not know how they were measured, or the command line.
"""

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from . import PromptResult, acceptance_length, overall_tps, spread, summarize
from .speedup import Limit

_SHOWN = 48  # characters of a prompt in the table


@dataclass(frozen=True)
class Report:
    """What a benchmark found; ``verdicts`` has (plain, DFlash) for each prompt with a check, else ``None``."""

    settings: dict[str, Any]
    results: list[PromptResult]
    greedy: bool
    limit: Limit | None = None
    verdicts: list[tuple[bool, bool] | None] | None = None

    @property
    def lossless(self) -> bool:
        """No difference was found; sampled tokens are not compared."""
        return all(r.difference is None for r in self.results)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: ``settings``, ``prompts``, ``total`` and ``limit``."""
        verdicts = self.verdicts or [None] * len(self.results)
        rows = [self._prompt_dict(*pair) for pair in zip(self.results, verdicts, strict=True)]
        return {"settings": self.settings, "prompts": rows, "total": self._total(), "limit": self._limit_dict()}

    def render(self) -> RenderableType:
        """A table of prompts and the totals below it."""
        table = Table("", "prompt", box=None, pad_edge=False)
        for name in ("tokens", "plain tok/s", "DFlash tok/s", "ratio", "accepted", "correct"):
            table.add_column(name, justify="right")
        table.add_column("tokens are")
        verdicts = self.verdicts or [None] * len(self.results)
        for i, (result, verdict) in enumerate(zip(self.results, verdicts, strict=True), 1):
            table.add_row(*self._cells(i, result, verdict))
        return Group(table, "", *self._total_lines())

    def _prompt_dict(self, result: PromptResult, verdict: tuple[bool, bool] | None) -> dict[str, Any]:
        difference = result.difference
        return {
            "prompt": result.prompt.text,
            "prompt_tokens": len(result.prompt_tokens),
            "generation_tokens": len(result.dflash[0].tokens),
            "plain_tps": overall_tps(result.plain),
            "dflash_tps": overall_tps(result.dflash),
            "ratio": spread(result.ratios),
            "acceptance_length": acceptance_length(result.dflash),
            "accepted": [run.accepted for run in result.dflash],
            "identical": difference is None if self.greedy else None,
            "difference": asdict(difference) if difference else None,
            "correct": {"plain": verdict[0], "dflash": verdict[1]} if verdict else None,
        }

    def _total(self) -> dict[str, Any]:
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
            "share_reached": reached and reached / self.limit.speedup,
        }

    def _cells(self, number: int, result: PromptResult, verdict: tuple[bool, bool] | None) -> list[str]:
        text = " ".join(result.prompt.text.split())
        return [
            str(number),
            text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…",
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
        total, limit = self._total(), self._limit_dict()
        lines = [
            f"tokens/s     plain mlx_lm {_number(total['plain_tps'], 1)}, DFlash {_number(total['dflash_tps'], 1)}, "
            f"ratio of the totals {_number(total['overall_ratio'], 2)}",
            f"ratio        {_spread(total['ratio'])} (median, least to greatest over prompts and runs)",
            f"acceptance   {_number(total['acceptance_length'], 2)} tokens per block",
            f"tokens are   {self._overall_identity(total)}",
        ]
        if total["correct"]:
            c = total["correct"]
            lines.append(f"correct      plain {c['plain']}, DFlash {c['dflash']} of {c['of']}")
        if limit is None:
            return [*lines, "limit        not measured: no answer was long enough for a block"]
        share = limit["share_reached"]
        return [
            *lines,
            f"limit        {limit['speedup']:.2f} = {limit['acceptance_length']:.2f} x {limit['plain_ms']:.2f} ms / "
            f"({limit['draft_ms']:.2f} ms + {limit['verify_ms']:.2f} ms), tau x plain / (draft + verify)",
            f"reached      {_number(share and 100 * share, 0)} % of the limit, by the ratio of the totals",
        ]

    def _overall_identity(self, total: dict[str, Any]) -> str:
        if not self.greedy:
            return "sampled by each side for itself, so not compared"
        if self.lossless:
            return f"identical on all {total['prompts']} prompts"
        return f"DIFFERENT on {total['prompts'] - total['identical']} of {total['prompts']} prompts"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _spread(values: dict[str, float] | None) -> str:
    if values is None:
        return "-"
    if values["min"] == values["max"]:
        return f"{values['median']:.2f}"
    return f"{values['median']:.2f} ({values['min']:.2f}-{values['max']:.2f})"


def _verdict(verdict: tuple[bool, bool] | None) -> str:
    if verdict is None:
        return "-"
    plain, dflash = ("yes" if ok else "no" for ok in verdict)
    return plain if plain == dflash else f"{plain}/{dflash}"
