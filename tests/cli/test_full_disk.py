"""A disk that takes no more ends each command that writes in one line, and leaves no half of a file."""

import json
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx
import pytest
import yaml
from support.cli import invoke
from support.gguf import gguf_metadata, gguf_tensors, write_gguf
from support.models import TEXT_VOCAB, llama_model, random_drafter
from support.runs import recipe, recipe_values, write_dataset, write_recipe, write_target

import dflash
from dflash.training.train import train


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file may become larger, as if the disk were full: a write beyond fails, as with any error of a disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """What the commands read: a target, a drafter, a GGUF file, prompts, a dataset, a run, a trace, a study."""
    folder = tmp_path_factory.mktemp("full")
    write_target(folder / "target")
    dflash.save_drafter(random_drafter(3, TEXT_VOCAB), folder / "drafter")
    model = llama_model(2, TEXT_VOCAB)
    write_gguf(folder / "model.gguf", gguf_tensors(model), gguf_metadata(model))
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"Say {n}"}) + "\n" for n in range(4)))
    write_dataset(folder / "data", folder / "target")
    write_recipe(folder)
    train(recipe(folder, "finished", "run.steps=2"))
    pair = ("--target", folder / "target", "--drafter", folder / "drafter")
    assert invoke("generate", "Hi", *pair, "--max-tokens", 9, "--trace", folder / "trace.jsonl").exit_code == 0
    values = recipe_values(folder)
    del values["run"]["folder"]
    study = {"target": values["target"], "prompts": {"all": {"file": str(folder / "prompts.jsonl"), "limit": 2}}}
    study |= {
        "folder": "replaced",
        "recipe": values,
        "decode": {"max_tokens": 4},
        "vary": {"decode.block_size": [4, 2]},
    }
    (folder / "study.yaml").write_text(yaml.safe_dump(study))
    return folder


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
