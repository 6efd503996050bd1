"""Families find their adapter, other packages add theirs, and what cannot work is refused in one line."""

import os
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from dflash.adapters import (
    adapter_for_model_type,
    detect_model_architecture,
    find_adapter,
    registered_adapters,
    registry,
)
from dflash.adapters.conformance import small_models as small
from dflash.adapters.generic import GenericAdapter
from dflash.errors import IncompatibleModelsError
from dflash.target import LoadedTargetModel, load_target_model

EXTERNAL = Path(__file__).parent / "external_adapter"
USE_EXTERNAL = """
import dflash, mlx.nn as nn
from mlx_lm.models import qwen3
from dflash.adapters import adapter_for_model_type
from dflash.adapters.conformance import small_models as small
from dflash.adapters.conformance import check

class Decoder(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.words, self.layers, self.norm = inner.embed_tokens, inner.layers, inner.norm
    def __call__(self, tokens, cache=None):
        h = self.words(tokens)
        for layer, c in zip(self.layers, cache):
            h = layer(h, "causal" if tokens.shape[1] > 1 else None, c)
        return self.norm(h)

class External(nn.Module):
    model_type, temper = "external_family", 0.5
    def __init__(self):
        super().__init__()
        model = small.build("qwen3", tie_word_embeddings=True)
        self.args, self.decoder = model.args, Decoder(model.model)
    @property
    def layers(self):
        return self.decoder.layers
    def __call__(self, tokens, cache=None):
        return self.decoder.words.as_linear(self.decoder(tokens, cache)) / self.temper

report = check(External(), rounds=5)
print(report.adapter, report.failure or "passed")
"""


@pytest.fixture
def fresh_entry_points():
    registry._load_entry_points.cache_clear()
    yield
    registry._load_entry_points.cache_clear()


def install(package: Path, site: Path) -> None:
    """What an installer leaves of a package of one module, without needing a network for its build tools."""
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = [
        "\n".join([f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())])
        for group, entries in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(groups) + "\n")
    for module in package.glob("*.py"):
        (site / module.name).write_text(module.read_text())


def test_an_installed_package_adds_a_family(tmp_path):
    install(EXTERNAL, tmp_path)
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    ran = subprocess.run(
        [sys.executable, "-c", USE_EXTERNAL],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.stdout.strip() == "ExternalAdapter passed", ran.stderr


def test_a_broken_package_is_named(monkeypatch, fresh_entry_points):
    broken = EntryPoint("odd_family", "no_such_module:Adapter", registry.ENTRY_POINTS)
    monkeypatch.setattr(registry, "entry_points", lambda group: [broken])
    with pytest.raises(IncompatibleModelsError, match=r"'odd_family' \(no_such_module:Adapter\).*No module named"):
        registered_adapters()


def test_the_families_of_the_package_have_adapters_of_their_own():
    named = (
        "qwen2 qwen3 qwen3_moe qwen3_next qwen3_5 qwen3_5_moe llama mistral mixtral ministral3 mistral3 gemma gemma2 "
    )
    named += "gemma3 gemma3_text gemma3n gemma4 gpt_oss"
    assert set(named.split()) <= set(registered_adapters())
    with pytest.raises(IncompatibleModelsError, match="No adapter for model_type 'unheard_of'"):
        adapter_for_model_type("unheard_of")


def test_other_architectures_get_the_generic_adapter_if_it_fits():
    model = small.build("olmo2")
    assert detect_model_architecture(model) == "olmo2"
    assert isinstance(find_adapter(model), GenericAdapter)
    assert isinstance(load_target_model(model), LoadedTargetModel)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("deepseek_v41", "Layer 0 keeps a LayerCache, for which no exact rewind is known"),
        ("iquestloopcoder", "does not call its layer 0"),
        ("longcat_flash_ngram", "has no token embedding"),
    ],
)
def test_an_architecture_that_does_not_fit_is_refused_in_one_line(name, reason):
    with pytest.raises(IncompatibleModelsError, match=reason) as error:
        find_adapter(small.build(name))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["gemma", "gemma3n", "gemma4"])
def test_the_embedding_scale_is_what_the_backbone_multiplies_by(name):
    """Told to drafters as ``input_embedding_scale``."""
    adapter = find_adapter(small.build(name))
    assert adapter.embedding_scale == pytest.approx(small.HIDDEN**0.5)
