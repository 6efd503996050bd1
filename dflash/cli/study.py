"""``dflash ablate`` and ``compare``: one thing varied, many runs side by side.

Knows options, files and what to print. Must not know how a cell is carried out. Mounted by ``cli``.
"""

import json
import logging
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from ..core.errors import DFlashError, install_extra
from .options import TrustRemoteCode, in_a_folder
from .terminal import print_rich
from .training import loss_mark, print_settings, runs_table, table

if TYPE_CHECKING:
    from ..study.compare import ComparedRun
    from ..study.plan import Plan
    from ..study.results import Effect

app = typer.Typer()

_CELLS_NOTE = "acceptance length: of all prompts together; tokens/s, and over plain: the median over prompts."
_EFFECTS_NOTE = (
    "pairs agree: of the pairs of cells that differ in the factor alone, those that changed the way the ratio says; "
    "pairs without any change are left out.\n"
    "ratio of acceptance_length: of the cells' own; of tokens_per_s: the median over prompts of each prompt's ratio, "
    "which need not be that of the cells' medians; of several pairs: their geometric mean."
)


class _WithSettings(TyperCommand):
    """A command whose help lists every key of a study."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the command's help, then the keys."""
        super().format_help(ctx, formatter)
        from ..study.settings import PromptSet, Study

        print_settings("Keys of a study", Study)
        print_settings("Keys of a set of prompts", PromptSet)


@app.command(cls=_WithSettings)
def ablate(
    study: Annotated[Path, typer.Argument(metavar="STUDY.yaml", help="What varies, and what all cells share.")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Replace a key of the study; repeatable.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="CELL", help="This cell only, by the name in the table; repeatable.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the cells and the expected time.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Vary settings of decoding and training: train what needs it, decode the same prompts with each, compare.

    A study is a grid: factors with their values, a cell for each combination.
    Cells take turns on every prompt, so that a machine that slows down does so
    for all alike. Stopped or killed, the same command continues; what is there
    is never computed twice, and a changed setting is a new cell. Tables (CSV),
    plots (SVG) and the command that makes each cell again are in the folder.

    Examples:

    dflash ablate configs/studies/decoding.yaml --dry-run
    dflash ablate configs/studies/decoding.yaml
    dflash ablate my.yaml --set seeds=[0,1,2] --set folder=runs/three-seeds
    """
    from ..study.ablation import ablate as run
    from ..study.files import write_results
    from ..study.results import collect, effects
    from ..study.settings import load_study

    checked = load_study(study, settings or ())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    if dry_run:
        _print_expected(checked, only or [], as_json, trust_remote_code)
        return
    try:
        plan = run(checked, only or [], trust_remote_code=trust_remote_code)
    except KeyboardInterrupt:
        print(f"Stopped. What is finished stays in {checked.folder}; the same command continues.", file=sys.stderr)
        raise
    files = write_results(plan, None if settings else study)
    cells = collect(plan)
    rows, found = [cell.row() for cell in cells], effects(plan, cells)
    if as_json:
        print(json.dumps({"cells": rows, "effects": [e.row() for e in found], "files": [str(f) for f in files]}))
        return
    print_rich(_cells_table(rows, list(checked.factors)))
    print(_CELLS_NOTE)
    if found:
        print_rich(_effects_table(found))
        print(_EFFECTS_NOTE)
    print("\n".join(str(file) for file in files))


def _print_expected(checked: Any, only: list[str], as_json: bool, trust_remote_code: bool) -> None:
    from ..study.ablation import open_plan
    from ..study.expected import cell_states, expected_time
    from ..training.loop.clock import duration

    plan: Plan = open_plan(checked, only, trust_remote_code)
    states, expected = cell_states(plan), expected_time(plan)
    if as_json:
        cells = [asdict(state) | {"levels": p.cell.levels, "seed": p.cell.seed}
                 for state, p in zip(states, plan.cells, strict=True)]  # fmt: skip
        print(json.dumps({"cells": cells, "expected": asdict(expected)}))
        return
    rows = []
    for state, planned in zip(states, plan.cells, strict=True):
        steps = f"{state.steps}/{state.of_steps}" if state.of_steps else "-"
        levels = tuple(planned.cell.levels.values())
        rows.append((state.name, *levels, str(planned.cell.seed), steps, f"{state.answers}/{state.of_answers}"))
    print_rich(table(("cell", *_short(list(checked.factors)), "seed", "steps done", "answers done"), rows))
    print(f"{len(states)} cells, {len(plan.trainings)} drafters to train, {len(plan.prompts)} prompts.")
    print(f"training  at most about {duration(expected.training)}: {expected.training_from}")
    print(f"decoding  at most about {duration(expected.decoding)}: {expected.decoding_from}")


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Two or more folders of runs of dflash train.")],
    prompts: Annotated[
        str | None,
        typer.Option(metavar="FILE.jsonl|HUB", help="Prompts to decode. Default: the first run's heldout ones."),
    ] = None,
    limit: Annotated[int, typer.Option(metavar="N", min=1, help="Take only the first N prompts.")] = 32,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of each answer.")] = 128,
    decode: Annotated[bool, typer.Option("--decode/--no-decode", help="Decode, or read the logs alone.")] = True,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.svg", help="Draw the learning curves.", callback=in_a_folder)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list instead of tables.")] = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Compare runs: settings that differ, learning curves, acceptance on the same prompts with 95 % intervals.

    Each run's best drafter decodes the same prompts in turns. Prompts are drawn
    anew together for all runs (paired bootstrap), so what is hard about a
    prompt does not blur the difference. `dflash runs` is the quick table.

    Examples:

    dflash compare runs/one runs/two
    dflash compare runs/* --prompts mine.jsonl --limit 50 --plot curves.svg
    dflash compare runs/one runs/two --no-decode
    """
    from ..study.compare import compare as run
    from ..study.settings import PromptSet
    from .terminal import show_progress

    if len(runs) < 2:
        raise DFlashError("compare needs at least two runs; dflash runs shows one.")
    show_progress()
    chosen = None if prompts is None else PromptSet(file=prompts, limit=limit)
    found = run(runs, chosen, limit, max_tokens, decode, trust_remote_code=trust_remote_code)
    if plot is not None:
        _draw_curves(plot, found)
    if as_json:
        print(json.dumps([one.results() for one in found]))
        return
    print_rich(runs_table([one.summary for one in found]))
    print_rich(_curves_table(found))
    if decode:
        print_rich(_acceptance_table(found))
        print(_prompts_line(found[0].prompts, all_heldout=prompts is None and found[0].prompts < limit))


def _draw_curves(path: Path, found: list["ComparedRun"]) -> None:
    try:
        from ..study.plots import draw_curves
    except ImportError as error:
        raise DFlashError(f"--plot needs matplotlib; {install_extra('study')}.") from error
    draw_curves(path, {one.summary.folder: one.curves for one in found})


def _curves_table(found: list["ComparedRun"]) -> Any:
    """Acceptance and heldout loss at every step at which some run was evaluated."""
    names = ("acceptance_length", "heldout_loss")
    steps = sorted({step for one in found for name in names for step, _ in one.curves[name]})
    shown = ("acceptance", f"heldout loss{loss_mark([one.summary for one in found])}")
    columns = ["step", *(f"{_name(one)} {name}" for name in shown for one in found)]
    rows = []
    for step in steps:
        values = [dict(one.curves[name]).get(step) for name in names for one in found]
        rows.append((str(step), *("-" if value is None else f"{value:.3f}" for value in values)))
    return table(tuple(columns), rows)


def _acceptance_table(found: list["ComparedRun"]) -> Any:
    rows = []
    for one in found:
        intervals = (one.acceptance, one.ratio)
        rows.append((one.summary.folder, *("-" if i is None else _interval(i.value, i.low, i.high) for i in intervals)))
    return table(("run", "acceptance length (95 %)", "over the first run"), rows)


def _prompts_line(count: int, all_heldout: bool) -> str:
    """How many prompts were decoded, and why there is no interval where there is none."""
    line = f"{count} prompt{'' if count == 1 else 's'} decoded{', all that the dataset holds out' * all_heldout}."
    return line if count > 1 else f"{line} One says nothing about others, so there is no 95 % interval."


def _name(one: "ComparedRun") -> str:
    return Path(one.summary.folder).name


def _cells_table(rows: list[dict[str, Any]], factors: list[str]) -> Any:
    lines = [
        (
            row["cell"],
            *(row[factor] for factor in factors),
            str(row["seed"]),
            row["prompts"],
            _with_limits(row, "acceptance_length"),
            _with_limits(row, "tokens_per_s"),
            _with_limits(row, "speedup"),
            {True: "yes", False: "NO", None: "-"}[row.get("identical")],
        )
        for row in rows
    ]
    measured = ("acceptance length", "tokens/s", "over plain", "same text")
    return table(("cell", *_short(factors), "seed", "prompts", *measured), lines)


def _effects_table(found: list["Effect"]) -> Any:
    lines = []
    for effect in found:
        row = effect.row()
        change = (_short([effect.factor])[0], f"{effect.before} -> {effect.after}", effect.prompts, effect.metric)
        lines.append((*change, _with_limits(row, "ratio"), _agreement(effect), effect.verdict))
    return table(("factor", "change", "prompts", "of", "ratio (95 %)", "pairs agree", "verdict"), lines)


def _agreement(effect: "Effect") -> str:
    changed = effect.pairs - effect.tied
    return f"{effect.agreeing}/{changed}" if changed else "-"


def _short(factors: list[str]) -> list[str]:
    return [factor.removeprefix("decode.").removeprefix("train.") for factor in factors]


def _with_limits(row: dict[str, Any], name: str) -> str:
    value, low, high = (row.get(key) for key in (name, f"{name}_low", f"{name}_high"))
    return "-" if value is None else _interval(value, low, high)


def _interval(value: float, low: float | None, high: float | None) -> str:
    return f"{value:.4g}" if low is None else f"{value:.4g} ({low:.4g}-{high:.4g})"
