"""Every notebook runs from top to bottom, in its folder, against the installed package."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_and_is_committed_with_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    code_cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs for cell in code_cells), "commit the notebook with its outputs"
    where = {"metadata": {"path": str(path.parent)}}  # as Jupyter runs it
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=where).execute()
