"""A disk that takes no more ends each command that writes in one line, and leaves no half of a file."""

import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx
import pytest
from support.cli import invoke
from support.runs import write_dataset


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file may become larger, as if the disk were full: a write beyond fails, as with any error of a disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


COMMANDS = {
    "generate --trace": "generate Hi {pair} --max-tokens 9 --trace {out}/t.jsonl",
    "eval --trace": "eval {place}/drafter --target {place}/target --prompts {place}/prompts.jsonl --max-tokens 4 "
    "--trace {out}/t.jsonl",
    "cache-prompt": "cache-prompt Hello {pair} --prompt-cache-file {out}/c.safetensors",
    "import": "import {place}/model.gguf {out}/imported",
    "prompts": "prompts --target {place}/target --count 2 --max-tokens 4 --round-size 16 --output {out}/p.jsonl",
    "prepare": "prepare {place}/prompts.jsonl {out}/made --target {place}/target --max-tokens 4",
    "data split": "data split {out}/data --heldout-percent 20",
    "data export": "data export {place}/data {out}/exported",
    "cache-features": "cache-features {place}/recipe.yaml --set data.cached_features={out}/features",
    "train": "train {place}/recipe.yaml --set run.folder={out}/run",
    "export": "export {place}/finished {out}/exported",
    "quantize": "quantize {place}/drafter {out}/packed --bits 4 --group-size 32",
    "ablate": "ablate {place}/study.yaml --set folder={out}/study",
    "report": "report {place}/trace.jsonl -o {out}/page.html",
}


@pytest.mark.parametrize("size", [1, 400, 30_000])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_says_that_it_cannot_write_and_leaves_whole_files_only(place, tmp_path, name, size):
    if name == "data split":
        write_dataset(tmp_path / "data", place / "target")
    pair = f"--target {place}/target --drafter {place}/drafter"
    command = COMMANDS[name].format(place=place, out=tmp_path, pair=pair).split()
    with largest_file(size):
        result = invoke(*command)
    if result.exit_code == 0:
        assert size > 1, "each of them writes more than a byte"
        return
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == 1, result.output
    *_, last = result.stderr.splitlines()
    assert last.startswith("error: "), result.stderr
    assert size > 1 or re.search("Cannot write .*(File too large|[Uu]nable to write)", last), last
    for path in tmp_path.rglob("*"):
        assert path.name[0] != ".", path
        if path.is_dir():
            assert any(path.iterdir()), path
        elif path.suffix == ".safetensors":
            mx.eval(mx.load(str(path)))
        elif path.suffix in (".json", ".html"):
            assert path.read_text().rstrip().endswith(("}", "</html>")), path
