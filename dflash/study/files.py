"""A study's results in its folder: tables, plots, and the commands that make each cell again.

These files are written:

    answers.csv     one row for each cell and prompt
    results.csv     one row for each cell and set of prompts, with 95 % intervals over prompts
    effects.csv     one row for each change of a factor: ratio, interval, verdict; also within what it depends on
    commands.sh     the command that makes each cell again
    study.yaml      the study
    *.svg           acceptance and speed by the levels of each factor, where matplotlib is installed
"""

import csv
import io
import logging
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from ..core.errors import install_extra
from ..core.files import atomic_write, remove_unfinished
from ..core.registry import PLUGINS
from ..core.settings import to_dict
from .effects import effects
from .plan import Plan
from .results import CellAnswers, collect, sessions_of

logger = logging.getLogger(__name__)


def write_results(plan: Plan, study_file: str | Path | None = None) -> list[Path]:
    """Write everything that the answers so far say into the study's folder; returns the files.

    The commands name ``study_file``, or without it the copy of the study that is written too, as ``study.yaml``.
    """
    cells = collect(plan)
    copy = _write(plan.folder / "study.yaml", yaml.safe_dump(to_dict(plan.study), sort_keys=False))
    found = effects(plan, cells)
    files = [
        _write(plan.folder / "answers.csv", as_csv(answer_rows(plan, cells))),
        _write(plan.folder / "results.csv", as_csv([cell.row() for cell in cells])),
        _write(plan.folder / "effects.csv", as_csv([effect.row() for effect in found])),
        _write(plan.folder / "commands.sh", commands(plan, study_file or copy)),
    ]
    if (sessions := len(sessions_of(cells))) > 1:
        logger.warning(
            "%d processes timed the answers: speeds are compared on prompts that one of them timed for both sides. "
            "A new folder times all again.",
            sessions,
        )
    try:
        from .plots import draw
    except ImportError:
        logger.warning("No plots without matplotlib; %s.", install_extra("study"))
        return files
    return files + draw(plan.folder, list(plan.study.factors), cells)


def answer_rows(plan: Plan, cells: Sequence[CellAnswers]) -> list[dict[str, Any]]:
    """One row for each cell and prompt."""
    rows = []
    for cell in cells:
        same = {"cell": cell.planned.name, **cell.planned.cell.levels, "seed": cell.planned.cell.seed}
        for number, answer in enumerate(cell.answers):
            row = same | {"prompts": cell.prompts, "prompt": number, "tokens": len(answer.tokens)}
            row |= {"passes": len(answer.committed), "committed": sum(answer.committed)}
            row |= {"drafted": sum(answer.drafted), "accepted": sum(answer.accepted), "seconds": answer.seconds}
            if cell.plain:
                row |= {"plain_tokens": len(cell.plain[number].tokens), "plain_seconds": cell.plain[number].seconds}
            rows.append(row)
    return rows


def as_csv(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as CSV; a column that a row lacks is empty there."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def commands(plan: Plan, study_file: str | Path) -> str:
    """A shell script with one command a cell, into another folder than the study's."""
    folder = plan.folder.with_name(f"{plan.folder.name}-again")
    lines = ["# Each makes one cell again, from nothing: its drafter where one is trained, and its answers."]
    for planned in plan.cells:
        parts = ["dflash", *(part for name in PLUGINS for part in ("--plugin", name)), "ablate", str(study_file)]
        parts += ["--only", planned.name, "--set", f"folder={folder}"]
        lines.append(f"{shlex.join(parts)}  # {str(planned).partition(' ')[2]}")
    return "\n".join(lines) + "\n"


def _write(path: Path, text: str) -> Path:
    remove_unfinished(path)
    atomic_write(path, lambda file: file.write_text(text, encoding="utf-8"))
    return path
