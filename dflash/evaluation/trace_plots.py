"""The plots of a report of traces: matplotlib's SVG, inlined in the page, with the values next to each.

Equal traces give equal plots. Colours are placeholders, which become variables of the page's style sheet, so that
plots follow its light or dark scheme.
"""

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ..decoding.profile import PARTS
from .traces import Traces, acceptance_counts, acceptance_length, calibration, calibration_error, survival, time_by_part

PERIODS = 20  # parts of the requests: few enough to read as a table
INK, GRID = "#010000", "#020000"
SERIES = tuple(f"#03000{i}" for i in range(6))
PART_COLOURS = tuple(f"#04000{i}" for i in range(len(PARTS)))
_VARIABLES = {INK: "--ink", GRID: "--edge"}
_VARIABLES |= {colour: f"--c{i}" for i, colour in enumerate(SERIES)}
_VARIABLES |= {colour: f"--p{i}" for i, colour in enumerate(PART_COLOURS)}
_SETTINGS: Any = {
    **{"svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9},
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
    **{"axes.grid": True, "axes.axisbelow": True, "grid.color": GRID, "grid.linewidth": 0.8},
    **{"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False},
}


def plots(traces: Traces) -> str:
    """Figures as HTML: survival by position, accepted drafts, requests in turn; for traces calibration and time too."""
    of_traces = (_calibration, _time) if traces.records else ()
    with matplotlib.rc_context(_SETTINGS):
        return "".join(draw(traces) for draw in (_survival, _counts, _requests, *of_traces))


def _survival(traces: Traces) -> str:
    tables = {name: survival(_of(traces.drafts, name)) for name in traces.names}
    with _panel("position in the block", "blocks", percent=True) as (figure, panel):
        for i, (colour, (name, table)) in enumerate(zip(_colours(traces), tables.items(), strict=True)):
            panel.plot(table.position, table.survival, color=colour, marker="o", markersize=4, label=name)
            panel.fill_between(table.position, table.low, table.high, color=colour, alpha=0.18, linewidth=0)
            side = {"textcoords": "offset points", "xytext": (0, -10 if i % 2 else 5)}
            for position, y, blocks in zip(table.position, table.survival, table.blocks, strict=True):
                panel.annotate(str(blocks), (position, y), color=colour, ha="center", fontsize=6, **side)
        panel.set_ylim(0, 1)
        panel.xaxis.get_major_locator().set_params(integer=True)
    points = {name: list(zip(table.survival, table.position, strict=True)) for name, table in tables.items()}
    ends = "; ".join(
        f"{name} {own[0][0]:.0%} at {own[0][1]} and {own[-1][0]:.0%} at {own[-1][1]}"
        for name, own in points.items()
        if own
    )
    note = "Of verified drafts: blocks that accepted every draft up to a position, of those that checked it. "
    note += "Beside each point: how many checked it."
    if "proposed" not in traces.blocks or not (traces.blocks.verified >= traces.blocks.proposed).all():
        note += " A policy that checks more drafts of good blocks makes this rise: compare with --policy full."
    if any(table.low.notna().any() for table in tables.values()):
        note += " Bands are 95 % intervals over prompts."
    return _html("How far drafts survive", figure, f"Survival by position: {ends}", note, tables)


def _counts(traces: Traces) -> str:
    counts = {name: acceptance_counts(_of(traces.blocks, name)) for name in traces.names}
    width = 0.8 / len(counts)
    with _panel("drafts accepted", "blocks", percent=True) as (figure, panel):
        for i, (colour, (name, count)) in enumerate(zip(_colours(traces), counts.items(), strict=True)):
            left = count.index + (i + 0.5) * width - 0.4
            panel.bar(left, count / max(count.sum(), 1), width, color=colour, label=name)
        panel.xaxis.get_major_locator().set_params(integer=True)
    modes = "; ".join(f"{name} most often {count.idxmax()}" for name, count in counts.items())
    tables = {name: count.rename_axis("accepted").reset_index() for name, count in counts.items()}
    label = f"Drafts accepted by a block: {modes}"
    return _html("Drafts accepted by a block", figure, label, "Fraction of the blocks.", tables)


def _requests(traces: Traces) -> str:
    """Each request in its order, and the mean of equal parts of them; nothing for single requests."""
    if len(traces.requests) == len(traces.names):
        return ""
    tables = {}
    with _panel("request", "tokens per block") as (figure, panel):
        for colour, name in zip(_colours(traces), traces.names, strict=True):
            own = _of(traces.blocks, name)
            drafted = own[(own.block > 0) & ~own.asleep]
            each = drafted.groupby("request").committed.mean()
            panel.plot(each.index + 1, each, color=colour, linestyle="", marker=".", alpha=0.35)
            parts = pd.Series(np.arange(len(each)) * min(PERIODS, len(each)) // max(len(each), 1), each.index)
            rows = []
            for _, blocks in drafted.groupby(drafted.request.map(parts)):
                mean, numbers = acceptance_length(blocks), blocks.request + 1
                rows.append((numbers.min(), numbers.max(), len(blocks), mean.value, mean.low, mean.high))
            table = pd.DataFrame(rows, columns=["from", "to", "blocks", "tokens per block", "low", "high"])
            panel.plot((table["from"] + table.to) / 2, table["tokens per block"], color=colour, label=name)
            tables[name] = table
    means = {name: table["tokens per block"] for name, table in tables.items() if len(table)}
    ends = "; ".join(f"{name} {own.iloc[0]:.2f} first and {own.iloc[-1]:.2f} last" for name, own in means.items())
    note = f"In the order of the trace: each request, and the mean of at most {PERIODS} equal parts of them."
    return _html("Request by request", figure, f"Tokens per block by request: {ends}", note, tables)


def _calibration(traces: Traces) -> str:
    tables = {name: calibration(_of(traces.drafts, name)) for name in traces.names}
    with _panel("the drafter's probability", "accepted", percent=True) as (figure, panel):
        panel.plot((0, 1), (0, 1), color=INK, linestyle="--", linewidth=0.8)
        for colour, (name, table) in zip(_colours(traces), tables.items(), strict=True):
            panel.plot(table.probability, table.accepted, color=colour, marker="o", markersize=4, label=name)
        panel.set(xlim=(0, 1), ylim=(0, 1))
    known = {name: table for name, table in tables.items() if len(table)}
    errors = "; ".join(f"{name} {calibration_error(table):.3f}" for name, table in known.items())
    label = f"Calibration of the drafter's probabilities; expected error: {errors or 'none states probabilities'}"
    note = f"Drafts that were reached, by the drafter's probability. Expected calibration error: {errors or '-'}."
    return _html("Is the drafter right about itself?", figure, label, note, known)


def _time(traces: Traces) -> str:
    times = {}
    for name in dict.fromkeys(request.trace for request in traces.records):
        tokens = _of(traces.requests, name).tokens.sum()
        times[name] = 1000 * time_by_part(_of(traces.blocks, name)) / tokens
    names = [f"{_shortened(name)}: {parts.sum():.2f} ms" for name, parts in times.items()]
    with _panel("ms a token", "", height=1.4 + 0.5 * len(names)) as (figure, panel):
        ends = np.zeros(len(names))
        for part, colour in zip(PARTS, PART_COLOURS, strict=True):
            seconds = np.array([parts[part] for parts in times.values()])
            panel.barh(names, seconds, 0.5, ends, color=colour, label=part)
            ends += seconds
        panel.invert_yaxis()
        panel.grid(axis="y", visible=False)
        figure.legend(loc="outside lower center", ncols=len(PARTS), columnspacing=1, handlelength=1, fontsize=8)
    apart = all(request.about["parts_apart"] for request in traces.records)
    note = "Milliseconds for each token of the answers."
    note += "" if apart else " Parts overlap on the device; record with --profile to keep them apart."
    label = "Time by part: " + "; ".join(f"{name} {parts.sum():.2f} ms a token" for name, parts in times.items())
    tables = {name: p.round(3).rename("ms").rename_axis("part").reset_index() for name, p in times.items()}
    return _html("Where the time goes", figure, label, note, tables)


def _of(table: pd.DataFrame, name: str) -> pd.DataFrame:
    return table[table.trace == name]


def _colours(traces: Traces) -> list[str]:
    return [SERIES[i % len(SERIES)] for i in range(len(traces.names))]


def _shortened(text: str) -> str:
    return text if len(text) <= 20 else text[:19] + "…"


@contextmanager
def _panel(x_title: str, y_title: str, percent: bool = False, height: float = 3.0) -> Iterator[tuple[Figure, Any]]:
    """A figure with one panel to draw into; several series get a legend."""
    figure = Figure(figsize=(5, height), layout="constrained")
    panel = figure.subplots()
    panel.set(xlabel=x_title, ylabel=y_title)
    yield figure, panel
    if percent:
        panel.yaxis.set_major_locator(matplotlib.ticker.MaxNLocator(5, steps=[1, 2, 5, 10]))  # whole numbers of percent
        panel.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1, decimals=0))
    if not figure.legends and len(panel.get_legend_handles_labels()[1]) > 1:
        panel.legend()


def _svg(figure: Figure, label: str) -> str:
    """The figure to stand inside HTML: no header, no date, no ids that nothing refers to."""
    file = io.StringIO()
    nothing: Any = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context({"svg.hashsalt": label}):  # the ids of one figure are not those of another
        figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    text = re.sub(r'<g id="[^"]*"', "<g", file.getvalue())
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    return text[text.index("<svg") :].replace("<svg", f'<svg role="img" aria-label="{escape(label)}"', 1)


def _html(title: str, figure: Figure, label: str, note: str, tables: dict[str, pd.DataFrame]) -> str:
    values = "".join(
        f"<p>{escape(name)}</p>{table.to_html(index=False, border=0, na_rep='-', float_format=lambda v: f'{v:.3g}')}"
        for name, table in tables.items()
    )
    return (
        f"<figure><h3>{title}</h3>{_svg(figure, label)}<figcaption>{escape(note)}</figcaption>"
        "<details><summary>Values</summary>"
        f"<div class=scroll tabindex=0 role=group aria-label='{title}, values'>{values}</div></details></figure>"
    )
