"""What the tests of the command line share: a tiny pair of models on disk, and a file of prompts."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from support.gguf import gguf_metadata, gguf_tensors, write_gguf
from support.models import TEXT_VOCAB, llama_model, qwen3_model, random_drafter, save_target
from support.runs import recipe, recipe_values, write_dataset

import dflash
from dflash.serving.record import recording
from dflash.training import PrepareSettings, prepare
from dflash.training.train import train


@pytest.fixture(scope="session")
def pair(tmp_path_factory) -> list[str]:
    """Options that name a tiny random pair on disk."""
    folder = tmp_path_factory.mktemp("pair")
    save_target(qwen3_model(1, vocab=TEXT_VOCAB), folder / "target")
    dflash.save_drafter(random_drafter(3, TEXT_VOCAB), folder / "drafter")
    return ["--target", str(folder / "target"), "--drafter", str(folder / "drafter")]


@pytest.fixture(scope="session")
def loud_pair(pair, tmp_path_factory) -> list[str]:
    """The same, with a chat template that has a switch: ``loud`` adds four tokens."""
    folder = tmp_path_factory.mktemp("loud") / "target"
    shutil.copytree(pair[1], folder)
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text() + "{% if loud %}LOUD{% endif %}")
    return ["--target", str(folder), *pair[2:]]


@pytest.fixture(scope="session")
def place(tmp_path_factory) -> Path:
    """What commands read: two models, a GGUF file, prompts, datasets, a run, a trace, a recipe, a study, a record."""
    folder = tmp_path_factory.mktemp("place")
    save_target(qwen3_model(1, vocab=TEXT_VOCAB), folder / "target")
    dflash.save_drafter(random_drafter(3, TEXT_VOCAB), folder / "drafter")
    model = llama_model(2, TEXT_VOCAB)
    write_gguf(folder / "model.gguf", gguf_tensors(model), gguf_metadata(model))
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"Say {n}"}) + "\n" for n in range(4)))
    write_dataset(folder / "data", folder / "target")
    asked = dflash.read_conversations(folder / "prompts.jsonl")
    prepare(asked, dflash.load_target(folder / "target"), PrepareSettings(max_tokens=8), folder / "made")
    train(recipe(folder, "finished", "run.steps=2"))
    decoder = dflash.DFlashSpeculativeDecoder.from_pretrained(folder / "target", folder / "drafter")
    decoder.generate("Hi", max_tokens=9, trace=folder / "trace.jsonl")
    values = recipe_values(folder)
    del values["run"]["folder"]
    study = {"folder": str(folder / "study"), "target": values["target"], "recipe": values}
    study |= {"prompts": {"all": {"file": str(folder / "prompts.jsonl"), "limit": 2}}}
    study |= {"decode": {"max_tokens": 4}, "vary": {"decode.block_size": [4, 2]}}
    (folder / "study.yaml").write_text(yaml.safe_dump(study))
    with recording(folder / "record", 1 << 20, None) as record:
        record.begin(decoder.loaded_target)
        for n in range(60, 70):
            record.add([{"role": "user", "content": chr(n)}], [65, n], [n, n + 1] * 4, greedy=True)
        record.close()
    return folder


@pytest.fixture
def prompts(tmp_path) -> str:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "Hi"}\n{"prompt": "Count"}\n')
    return str(file)
