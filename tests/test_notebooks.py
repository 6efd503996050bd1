"""Every notebook runs from top to bottom, in its folder, against the installed package."""

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from jupyter_client import AsyncKernelManager
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
SHORTER = {
    "01-from-prompt-to-block": {"stream_generate(request, 120,": "stream_generate(request, 20,"},
    "02-where-drafts-die": {
        "splitlines()[:30]": "splitlines()[:4]",
        "max_tokens=256": "max_tokens=48",
        "[::12][:20]": "[::12][:3]",
        "max_tokens=64, chat=False": "max_tokens=24, chat=False",
    },
    "03-how-long-a-block": {
        "REQUESTS = 2": "REQUESTS = 1",
        "{True: 48, False: 32}": "{True: 16, False: 12}",
        "max_tokens=32, chat": "max_tokens=4, chat",
    },
    "04-what-training-buys": {
        '"train", "160"': '"train", "24"',
        '"train.drafter.num_hidden_layers": [1, 2],': "",
        '"train.data.sequences": [140, 10]': '"train.data.sequences": [20, 10]',
        '"anchors": 16': '"anchors": 4',
        '"intermediate_size": 512': '"intermediate_size": 64',
        '"warmup_steps": 5': '"warmup_steps": 1',
        '"decay_steps": 15': '"decay_steps": 1',
        '"steps": 30': '"steps": 2',
        '"evaluate_every": 30': '"evaluate_every": 2',
        '"run.evaluate_prompts": 2': '"run.evaluate_prompts": 1',
        '"limit": 6': '"limit": 2',
        '"max_tokens": 20': '"max_tokens": 8',
    },
    "05-your-own-architecture": {
        "splitlines()[:4]": "splitlines()[:1]",
        "bundled.generate(request, max_tokens=100)": "bundled.generate(request, max_tokens=24)",
        "stream_generate(request, max_tokens=100)": "stream_generate(request, max_tokens=24)",
        "HastyAdapter(odd)), rounds=6": "HastyAdapter(odd)), rounds=1",
        "check(odd, rounds=6)": "check(odd, rounds=1)",
        '"train", "120"': '"train", "12"',
        "min(40, len(batches))": "min(2, len(batches))",
    },
    "06-the-family": {"splitlines()[:6]": "splitlines()[:1]", "max_tokens=96": "max_tokens=24"},
    "07-make-it-yours": {
        "splitlines()[:8]": "splitlines()[:3]",
        "decoder.generate(request, max_tokens=80)": "decoder.generate(request, max_tokens=40)",
        '"steps": 10': '"steps": 3',
        '"evaluate_every": 10': '"evaluate_every": 3',
        "stream_generate(requests[0], max_tokens=60": "stream_generate(requests[0], max_tokens=20",
        "max_tokens=60, **options": "max_tokens=12, **options",
        "max_tokens=40, logits": "max_tokens=12, logits",
        "max_tokens=30, sampler": "max_tokens=8, sampler",
        'fox.", max_tokens=60': 'fox.", max_tokens=12',
        "islice(beginnings(), 3)": "islice(beginnings(), 1)",
        '"max_tokens": 30': '"max_tokens": 8',
    },
    "09-learning-from-what-was-served": {
        "import sys": "import sys, tempfile",
        "../runs/smollm2-135m/target": "../dflash/pair/target",
        "../dflash/real/smollm2-135m-instruct": "../dflash/pair/drafter",
        "../dflash/real/heldout": "../dflash/pair/heldout",
        "380, 70, 150": "6, 3, 1",
        '"../runs/smollm2-135m/sql"': "tempfile.mkdtemp()",
        '"max_tokens": 64': '"max_tokens": 10',
        '"--max-tokens", 128': '"--max-tokens", 8, "--limit", 6',
        "STEPS]": 'STEPS, "--set", "data.max_blocks_per_batch=12", "--set", "run.evaluate_tokens=4"]',
        '(folder / "served", 64), (ELSEWHERE, 96)': '(folder / "served", 10),',
    },
}
"""What a notebook runs with here in place of what its outputs are from: the same cells, on less."""


@pytest.fixture(scope="module")
def kernel() -> Iterator[AsyncKernelManager]:
    """One kernel for all notebooks, in their folder as with Jupyter: each would import the same for seconds."""
    manager = AsyncKernelManager(kernel_name="python3")
    asyncio.run(manager.start_kernel(cwd=str(FOLDER)))
    yield manager
    asyncio.run(manager.shutdown_kernel(now=True))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_and_is_committed_with_outputs(path: Path, kernel: AsyncKernelManager) -> None:
    notebook = nbformat.read(path, as_version=4)
    code_cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    counts = [cell.execution_count for cell in code_cells]
    assert counts == list(range(1, len(counts) + 1)), "commit the notebook as it ran from top to bottom"
    assert any(cell.outputs for cell in code_cells), "commit the notebook with its outputs"
    for long, short in SHORTER.get(path.stem, {}).items():
        [cell] = [cell for cell in code_cells if long in cell.source]
        cell.source = cell.source.replace(long, short)
    notebook.cells.insert(0, nbformat.v4.new_code_cell("%reset -f"))  # the names of the notebook before
    NotebookClient(notebook, km=kernel, timeout=600, startup_timeout=300).execute()
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


def test_questions_are_distinct_and_the_same_in_every_run():
    command = [sys.executable, FOLDER / "sql_prompts.py", "99999"]
    first, second = (subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(2))
    assert first == second
    lines = first.splitlines()
    assert len(set(lines)) == len(lines) >= 380


def test_prompts_of_the_standard_library_are_distinct_beginnings_of_functions():
    command = [sys.executable, FOLDER / "stdlib_prompts.py", "7"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    texts = {json.loads(line)["prompt"] for line in printed.splitlines()}
    assert len(texts) == 7
    assert all("def " in text and text.count("\n") == 4 for text in texts)
