"""Every notebook runs from top to bottom, in its folder, against the installed package."""

import json
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_and_is_committed_with_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    code_cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    counts = [cell.execution_count for cell in code_cells]
    assert counts == list(range(1, len(counts) + 1)), "commit the notebook as it ran from top to bottom"
    assert any(cell.outputs for cell in code_cells), "commit the notebook with its outputs"
    where = {"metadata": {"path": str(FOLDER)}}  # as Jupyter runs it
    NotebookClient(notebook, timeout=600, startup_timeout=300, kernel_name="python3", resources=where).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    told = "".join(output.text for output in outputs if output.get("name") == "stderr")
    assert "%|" not in told, "no progress bars: a notebook keeps every state of one"
    assert "TqdmWarning" not in told


def test_each_plug_in_takes_one_cell_of_at_most_30_lines():
    notebook = nbformat.read(FOLDER / "07-make-it-yours.ipynb", as_version=4)
    cells = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    registered = [f"@register_{what}(" for what in ("drafter", "objective", "callback", "verify", "sampler", "policy")]
    for what in (*registered, "@register_logits_processor(", "optimizer.update("):  # the last is the training loop
        found = [source for source in cells if what in source]
        assert len(found) == (2 if "drafter" in what else 1)  # with weights and without
        for cell in found:
            assert len(cell.splitlines()) <= 30
            assert not re.search(r"(import |\.)_[a-z]", cell)  # public names only


def test_prompts_of_the_standard_library_are_distinct_beginnings_of_functions():
    command = [sys.executable, FOLDER / "stdlib_prompts.py", "7"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    texts = {json.loads(line)["prompt"] for line in printed.splitlines()}
    assert len(texts) == 7
    assert all("def " in text and text.count("\n") == 4 for text in texts)
