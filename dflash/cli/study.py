"""``dflash ablate`` and ``compare``: one thing varied, many runs next to each other."""

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core.errors import DFlashError, install_extra
from .options import AsJson, TrustRemoteCode, a_picture
from .terminal import print_rich, resumable, show_log, show_progress
from .training import WithSettings, table

if TYPE_CHECKING:
    from ..evaluation.statistics import Interval
    from ..study.compare import ComparedRun
    from ..study.effects import Effect
    from ..study.plan import Plan

app = typer.Typer()

_CELLS_NOTE = "acceptance length: of all prompts together; tokens/s, and over plain: the median over prompts."
_FALLBACK_NOTE = "* The policy fell back to plain decoding in some passes: no property of the drafter."
_EFFECTS_NOTE = (
    "pairs agree: of the pairs of drafters that differ in the factor alone, each over its ways of decoding, those that "
    "changed the way the ratio says; pairs without any change are left out.\n"
    "ratio of acceptance_length: of the cells' own; of tokens_per_s: the median over prompts of each prompt's ratio, "
    "which need not be that of the cells' medians; of several pairs: their geometric mean."
)


# --- ablate -------------------------------------------------------------------------------------------------


class _WithKeys(WithSettings):
    """A command whose help lists every key of a study."""

    def settings(self) -> dict[str, type]:
        """Keys of a study and of its prompts."""
        from ..study.settings import PromptSet, Study

        return {"Keys of a study": Study, "Keys of a set of prompts": PromptSet}


@app.command(cls=_WithKeys)
def ablate(
    study: Annotated[Path, typer.Argument(metavar="STUDY.yaml", help="What varies, and what all cells share.")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Replace a key of the study; repeatable.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="CELL", help="This cell only, by the name in the table; repeatable.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the cells and what is left of them.")] = False,
    as_json: AsJson = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Vary settings of decoding and training: train what needs it, decode the same prompts with each, compare.

    A study is a grid: factors with their values, a cell for each combination.
    Cells alternate on every prompt, so that a machine that slows down does so
    for all alike. Stopped or killed, the same command continues, and repeats
    about a minute of a training at most. A changed setting or plug-in is a new
    cell. Tables (CSV), plots (SVG) and the command that makes each cell again are
    in the folder.

    Examples:

    dflash ablate configs/studies/decoding.yaml --dry-run
    dflash ablate configs/studies/decoding.yaml
    dflash ablate my.yaml --set seeds=[0,1,2] --set folder=runs/three-seeds
    """
    from ..study import ablation, collect, effects, load_study, write_results

    checked = load_study(study, settings or ())
    show_log()
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    if dry_run:
        _print_left(ablation.open_plan(checked, only, trust_remote_code), as_json)
        return
    with resumable(checked.folder):
        plan = ablation.ablate(checked, only, trust_remote_code=trust_remote_code)
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
    if any(row["plain_passes"] for row in rows):
        print(_FALLBACK_NOTE)
    print("\n".join(str(file) for file in files))


def _print_left(plan: "Plan", as_json: bool) -> None:
    """What is done of each cell, and what is left."""
    from ..core.progress import duration

    cells: list[dict[str, Any]] = []
    for planned in plan.cells:
        steps, of_steps = plan.steps(planned.training)
        kept = plan.answers(planned.answers)
        answers = sum(prompt.key in kept for prompt in plan.prompts)
        counts = {"steps": steps, "of_steps": of_steps, "answers": answers, "of_answers": len(plan.prompts)}
        cells.append({"name": planned.name, **counts, "levels": planned.cell.levels, "seed": planned.cell.seed})
    incomplete = sum((c["steps"], c["answers"]) != (c["of_steps"], c["of_answers"]) for c in cells)
    drafters, answers = len(plan.untrained), sum(len(keys) for _, keys in plan.turns())
    took = next((done["seconds"] for key in plan.trainings if (done := plan.finished(key))), None)
    if as_json:
        left = {"cells": incomplete, "drafters": drafters, "answers": answers, "first_training_seconds": took}
        print(json.dumps({"cells": cells, "left": left}))
        return
    rows = []
    for c in cells:
        shown = "-" if c["of_steps"] == 0 else f"{c['steps']}/{c['of_steps'] or '?'}"
        levels = (*c["levels"].values(), str(c["seed"]))
        rows.append((c["name"], *levels, shown, f"{c['answers']}/{c['of_answers']}"))
    print_rich(table(("cell", *_short(plan.study.factors), "seed", "steps done", "answers done"), rows))
    first = "" if took is None else f" (the first took {duration(took)})"
    print(
        f"{incomplete} of {len(cells)} cells left. To train: {drafters} drafters{first}; to decode: {answers} answers."
    )


def _cells_table(rows: list[dict[str, Any]], factors: list[str]) -> Any:
    lines = [
        (
            row["cell"],
            *(row[factor] for factor in factors),
            str(row["seed"]),
            row["prompts"],
            _with_limits(row, "acceptance_length") + "*" * bool(row["plain_passes"]),
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
        changed = effect.pairs - effect.tied
        agreement = f"{effect.agreeing}/{changed}" if changed else "-"
        metric = effect.metric + "*" * (effect.metric == "acceptance_length" and effect.plain_passes > 0)
        change = (*_short([effect.factor]), f"{effect.before} -> {effect.after}", effect.within, effect.prompts, metric)
        lines.append((*change, _with_limits(effect.row(), "ratio"), agreement, effect.verdict))
    return table(("factor", "change", "within", "prompts", "of", "ratio (95 %)", "pairs agree", "verdict"), lines)


def _short(factors: Any) -> list[str]:
    from ..study.settings import short_name

    return [short_name(factor) for factor in factors]


def _with_limits(row: dict[str, Any], name: str) -> str:
    from ..evaluation.statistics import Interval

    value, low, high = (row.get(key) for key in (name, f"{name}_low", f"{name}_high"))
    return "-" if value is None else f"{Interval(value, low, high):.4g}"


# --- compare ------------------------------------------------------------------------------------------------


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs of dflash train.")],
    prompts: Annotated[
        str | None,
        typer.Option(metavar="FILE.jsonl|HUB", help="Prompts to decode. Default: the first run's held-out ones."),
    ] = None,
    limit: Annotated[int, typer.Option(metavar="N", min=1, help="Take only the first N prompts.")] = 32,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of each answer.")] = 128,
    decode: Annotated[
        bool | None,
        typer.Option(
            "--decode/--no-decode",
            help="Decode, or read the logs alone. Default: decode if every run has weights.",
            show_default=False,
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.svg", help="Draw the learning curves.", callback=a_picture)
    ] = None,
    as_json: AsJson = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Compare runs: settings that differ, acceptance, loss, speed, memory, learning curves, drafts on equal prompts.

    Each run's best drafter is scored on the target's answers to the same prompts.
    Intervals (95 %) say what other prompts would give. Runs are compared on the
    same prompts, so what is hard about one does not blur the difference; another
    seed may differ by more. --no-decode is quick: it reads recipes and logs alone.

    Examples:

    dflash compare runs/* --no-decode
    dflash compare runs/one runs/two
    dflash compare runs/* --prompts mine.jsonl --limit 50 --plot curves.svg
    """
    from ..study.compare import compare as run
    from ..study.settings import PromptSet

    show_progress()
    chosen = None if prompts is None else PromptSet(file=prompts, limit=limit)
    found = run(runs, chosen, limit, max_tokens, decode, trust_remote_code=trust_remote_code)
    if plot is not None:
        _draw_curves(plot, found)
    if as_json:
        print(json.dumps([one.results() for one in found]))
        return
    print_rich(_runs_table(found))
    print_rich(_curves_table(found))
    if found[0].prompts:
        print_rich(_acceptance_table(found))
        print(_prompts_line(found[0].prompts, all_heldout=prompts is None and found[0].prompts < limit))


@app.command(hidden=True)
def runs(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN...")],
    as_json: AsJson = False,
) -> None:
    """``dflash compare --no-decode`` by its older name."""
    compare(folders, decode=False, as_json=as_json)


def _draw_curves(path: Path, found: list["ComparedRun"]) -> None:
    try:
        from ..study.plots import draw_curves
    except ImportError as error:
        raise DFlashError(f"--plot needs matplotlib; {install_extra('study')}.") from error
    draw_curves(path, {one.folder: one.curves for one in found}, {one.folder: one.objective for one in found})


def _runs_table(found: list["ComparedRun"]) -> Any:
    """One row a run; a column for each setting in which the recipes differ."""
    from ..core.progress import duration

    star = _loss_mark(found)
    losses = (f"held-out loss{star}", f"loss{star}")
    columns = ("run", *found[0].settings, "steps", "acceptance", "at step", *losses, "tokens/s", "time", "GB")
    rows = []
    for run in found:
        steps = f"{run.step}/{run.steps}" if run.steps else str(run.step)
        numbers = (run.best_acceptance, run.best_step, run.heldout_loss, run.loss, run.tokens_per_second)
        formats = ("{:.2f}", "{}", "{:.3f}", "{:.3f}", "{:.0f}")
        shown = ["-" if n is None else form.format(n) for n, form in zip(numbers, formats, strict=True)]
        time = "-" if run.seconds is None else duration(run.seconds)
        memory = "-" if run.peak_memory_gb is None else f"{run.peak_memory_gb:.1f}"
        rows.append((run.folder, *map(str, run.settings.values()), steps, *shown, time, memory))
    made = table(columns, rows)
    if star:
        made.caption = (
            f"{star} Objective, data, blocks, vocabulary or kind of drafter differ: no run's loss can be compared with "
            "another's."
        )
        made.caption_justify = "left"
    return made


def _curves_table(found: list["ComparedRun"]) -> Any:
    """Acceptance and held-out loss at every step at which some run was evaluated."""
    names = ("acceptance_length", "heldout_loss")
    steps = sorted({step for one in found for name in names for step, _ in one.curves[name]})
    shown = ("acceptance", f"held-out loss{_loss_mark(found)}")
    rows = []
    for step in steps:
        values = [dict(one.curves[name]).get(step) for name in names for one in found]
        rows.append((str(step), *("-" if value is None else f"{value:.3f}" for value in values)))
    return table(("step", *(f"{Path(one.folder).name} {name}" for name in shown for one in found)), rows)


def _acceptance_table(found: list["ComparedRun"]) -> Any:
    def shown(interval: "Interval | None") -> str:
        return "-" if interval is None else f"{interval:.4g}"

    rows = [(one.folder, str(one.blocks), shown(one.acceptance), shown(one.ratio)) for one in found]
    return table(("run", "blocks", "acceptance length (95 %)", "over the first run"), rows)


def _loss_mark(found: list["ComparedRun"]) -> str:
    """What marks losses that cannot be compared, since the runs differ in what these are."""
    return "*" if found[0].objective else ""


def _prompts_line(count: int, all_heldout: bool) -> str:
    """How many prompts were decoded, and whether they are too few."""
    from ..evaluation.statistics import FEWEST_PROMPTS

    line = f"{count} prompt{'' if count == 1 else 's'} decoded{', all that the dataset holds out' * all_heldout}."
    if count >= FEWEST_PROMPTS:
        return line
    few = (
        "One says nothing about others, so there is no 95 % interval." if count == 1 else "So few say little of others."
    )
    return f"{line} {few} Give more with --prompts."
