"""Plots of a study: a metric by the levels of each factor, a panel a factor.

A panel shows the cells in which its factor alone differs. Thin lines join cells alike in everything else; the thick
mark is their geometric mean with the 95 % interval over prompts. It is hollow for an acceptance
that is no property of the drafter: in some passes the policy fell back to plain decoding.
"""

import os
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from ..core.files import atomic_write, remove_unfinished
from ..evaluation.statistics import geometric_mean
from .effects import matched
from .results import CellAnswers
from .settings import short_name

COLOURS = ("#0b5cad", "#c2410c", "#15803d", "#7e22ce", "#57534e")
_METRICS = {
    "acceptance": ("acceptance", "tokens per target pass"),
    "speed": ("speedup", "speed over plain mlx_lm"),
}


def draw(folder: Path, factors: Sequence[str], cells: Sequence[CellAnswers]) -> list[Path]:
    """Write ``acceptance.svg`` and, where plain decoding was timed too, ``speed.svg`` into ``folder``.

    One that there is nothing to show in is removed: it is of an earlier call.
    """
    files = []
    for name, (attribute, label) in _METRICS.items():
        usable = [cell for cell in cells if cell.complete and (cell.plain or attribute != "speedup")]
        usable = [cell for cell in usable if np.isfinite(cell.value(attribute))]
        shown = [factor for factor in factors if matched(usable, factor)]
        if shown:
            files.append(_save(folder / f"{name}.svg", _figure(shown, usable, attribute, label)))
        else:
            (folder / f"{name}.svg").unlink(missing_ok=True)
    return files


def draw_intervals(path: Path, values: Mapping[str, tuple[float, Sequence[float] | None]], label: str) -> Path:
    """Write a number, with the limits of its interval if it has one, for each name, from left to right.

    What paths have in common, as the drafters of a run do, stands below the axis.
    """
    shared = os.path.dirname(os.path.commonprefix([*values]))  # noqa: RUF071 (only whole folders are left of it)
    figure = Figure(figsize=(max(3.6, 0.7 * len(values)), 3), layout="constrained")
    panel = figure.subplots()
    numbers = np.array([value for value, _ in values.values()])
    bars = np.abs(np.array([limits or (value, value) for value, limits in values.values()]).T - numbers)
    panel.errorbar(range(len(values)), numbers, bars, color=COLOURS[0], marker="o", markersize=5, capsize=3)
    labels = [name.removeprefix(shared).lstrip(os.sep) if shared else name for name in values]
    panel.set_xticks(range(len(values)), labels, rotation=20, ha="right", fontsize=8)
    panel.set_xlabel(shared, fontsize=8)
    panel.set_ylabel(label, fontsize=9)
    panel.grid(axis="y", alpha=0.25)
    return _save(path, figure)


def draw_curves(
    path: Path, curves: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]], objectives: Mapping[str, str]
) -> Path:
    """Write learning curves, a panel each: ``curves`` has those of each run by their names.

    Losses have a panel for each of the ``objectives``, named by run: those of different ones share no axis.
    """
    panels: dict[str, dict[str, Sequence[tuple[int, float]]]] = {}
    for name in dict.fromkeys(name for own in curves.values() for name in own):
        for run, own in curves.items():
            objective = f" ({objectives[run]})" if "loss" in name and objectives[run] else ""
            if own[name]:
                panels.setdefault(name.replace("_", " ") + objective, {})[run] = own[name]
    columns = max(1, min(3, len(panels)))
    rows = max(1, -(-len(panels) // columns))
    figure = Figure(figsize=(3.6 * columns, 2.7 * rows + 0.3), layout="constrained")
    colours = {run: COLOURS[number % len(COLOURS)] for number, run in enumerate(curves)}
    lines: dict[str, Any] = {}
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for panel, (title, shown) in zip(axes, panels.items(), strict=False):
        for run, points in shown.items():
            (lines[run],) = panel.plot(*zip(*points, strict=True), color=colours[run], marker=".", markersize=3)
        panel.set_title(textwrap.fill(title, 45), fontsize=9)
        panel.set_xlabel("step", fontsize=8)
        panel.tick_params(labelsize=8)
        panel.grid(alpha=0.25)
    for panel in axes[len(panels) :]:
        panel.set_visible(False)
    figure.legend(lines.values(), lines, fontsize=7, frameon=False, loc="outside lower center")
    return _save(path, figure)


def _figure(factors: Sequence[str], cells: Sequence[CellAnswers], attribute: str, label: str) -> Figure:
    columns = min(3, len(factors))
    rows = -(-len(factors) // columns)
    figure = Figure(figsize=(3.1 * columns + 0.6, 2.7 * rows), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False, sharey=True).flat)
    sets = list(dict.fromkeys(cell.prompts for cell in cells))
    for panel, factor in zip(panels, factors, strict=False):
        for number, name in enumerate(sets):
            mine = [cell for cell in cells if cell.prompts == name]
            _panel(panel, factor, mine, attribute, COLOURS[number % len(COLOURS)], name)
        panel.set_title(short_name(factor), fontsize=9)
        panel.tick_params(labelsize=8)
        panel.grid(axis="y", alpha=0.25)
    for panel in panels[len(factors) :]:
        panel.set_visible(False)
    figure.supylabel(label, fontsize=9)
    if len(sets) > 1:
        figure.axes[0].legend(fontsize=8, frameon=False)
    return figure


def _panel(panel: Any, factor: str, cells: Sequence[CellAnswers], attribute: str, colour: str, name: str) -> None:
    groups = matched(cells, factor)
    labels = list(dict.fromkeys(cell.planned.cell.levels[factor] for group in groups for cell in group))
    lines = []
    for group in groups:
        points = [(labels.index(cell.planned.cell.levels[factor]), cell.value(attribute)) for cell in group]
        lines.append(sorted(points))
    panel.add_collection(LineCollection(lines, colors=colour, alpha=0.25, linewidths=0.8))
    for x, label in enumerate(labels):
        mine = [cell for group in groups for cell in group if cell.planned.cell.levels[factor] == label]
        mean = geometric_mean([getattr(cell, attribute) for cell in mine]).interval()
        low, high = mean.low or mean.value, mean.high or mean.value
        bars = [[max(0.0, mean.value - low)], [max(0.0, high - mean.value)]]
        shown = name if x == 0 else None
        filled = "white" if attribute == "acceptance" and any(cell.plain_passes for cell in mine) else colour
        style = {"color": colour, "marker": "o", "markersize": 5, "capsize": 3, "markerfacecolor": filled}
        panel.errorbar([x], [mean.value], bars, label=shown, **style)
    panel.set_xticks(range(len(labels)), labels, rotation=20 if max(map(len, labels), default=0) > 8 else 0)
    panel.set_xlim(-0.5, len(labels) - 0.5)


def _save(path: Path, figure: Figure) -> Path:
    remove_unfinished(path)
    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": "dflash", "font.family": "sans-serif"}
    with matplotlib.rc_context(settings):  # text stays text, and equal results give equal files
        atomic_write(path, lambda file: figure.savefig(file, metadata={"Date": None}))
    return path
