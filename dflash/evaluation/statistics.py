"""What runs amount to: speeds, ratios, acceptance length, correct answers.

Knows finished runs only. Must not know how they were made, or how results are shown.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .runs import PromptResult, Run

Score = Callable[[list[tuple[str, dict[str, Any]]]], list[bool]]
"""Judges answers, given as text and ``check`` of the request, all in one call."""


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Median, least and greatest of ``values``; ``None`` of nothing."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)} if values else None


def acceptance_length(runs: Iterable[Run]) -> float | None:
    """Tokens committed per block over all ``runs``; ``None`` where no block was decoded."""
    committed = [n for run in runs for n in run.committed]
    return sum(committed) / len(committed) if committed else None


def overall_tps(runs: Sequence[Run]) -> float | None:
    """Tokens after the first of each run over all the time since those."""
    timed = [run for run in runs if run.tps is not None]
    return sum(len(r.tokens) - 1 for r in timed) / sum(r.seconds for r in timed) if timed else None


def summarize(results: Sequence[PromptResult]) -> dict[str, Any]:
    """Speeds, ratios over prompts and runs, acceptance length and the number of identical answers."""
    plain = [run for r in results for run in r.plain]
    dflash = [run for r in results for run in r.dflash]
    plain_tps, dflash_tps = overall_tps(plain), overall_tps(dflash)
    return {
        "prompts": len(results),
        "blocks": sum(len(run.committed) for run in dflash),
        "plain_tps": plain_tps,
        "dflash_tps": dflash_tps,
        "overall_ratio": dflash_tps / plain_tps if plain_tps and dflash_tps else None,
        "ratio": spread([ratio for r in results for ratio in r.ratios]),
        "request_ratio": spread([ratio for r in results for ratio in r.request_ratios]),
        "acceptance_length": acceptance_length(dflash),
        "identical": sum(r.difference is None for r in results),
    }


def judge(results: Sequence[PromptResult], score: Score) -> list[tuple[bool, bool] | None]:
    """Whether each prompt's first answer is correct, plain and DFlash; ``None`` for prompts without check."""
    pairs = [(run.text, r.prompt.check) for r in results if r.prompt.check for run in (r.plain[0], r.dflash[0])]
    verdicts = iter(score(pairs)) if pairs else iter(())
    return [(next(verdicts), next(verdicts)) if r.prompt.check else None for r in results]
