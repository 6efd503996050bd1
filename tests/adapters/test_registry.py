"""Families find their adapter, other packages add theirs, and what cannot work is refused in one line."""

import re
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest

from dflash.adapters import (
    TargetAdapter,
    adapter_for_model_type,
    detect_model_architecture,
    find_adapter,
    register_adapter,
    registered_adapters,
    registry,
)
from dflash.adapters.conformance import check
from dflash.adapters.conformance import small_models as small
from dflash.adapters.generic import GenericAdapter
from dflash.core.errors import DFlashError, IncompatibleModelsError
from dflash.core.registry import Registry
from dflash.target import LoadedTargetModel, load_target_model


@pytest.fixture(autouse=True)
def fresh_registry(monkeypatch):
    """The families of this package, in a registry that still has to load its entry points."""
    adapters: Registry = Registry("adapter", "dflash.adapters")
    for name, adapter in registered_adapters().items():
        adapters.register(name)(adapter)
    monkeypatch.setattr(registry, "ADAPTERS", adapters)


class Decoder(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.words, self.layers, self.norm = inner.embed_tokens, inner.layers, inner.norm

    def __call__(self, tokens, cache=None):
        h = self.words(tokens)
        for layer, c in zip(self.layers, cache, strict=True):
            h = layer(h, "causal" if tokens.shape[1] > 1 else None, c)
        return self.norm(h)


class External(nn.Module):
    """A model of the family that ``external_adapter`` adds."""

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


def test_an_installed_package_adds_a_family(tmp_path, monkeypatch):
    install(Path(__file__).parent / "external_adapter", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    report = check(External(), rounds=1)
    assert (report.adapter, report.failure) == ("ExternalAdapter", "")


@pytest.fixture
def broken_package(monkeypatch):
    """One that is installed, and cannot be imported."""
    broken = EntryPoint("odd_family", "no_such_module:Adapter", "dflash.adapters")
    monkeypatch.setattr("dflash.core.registry.entry_points", lambda group: [broken])


def test_a_broken_package_is_a_warning_that_spoils_only_its_own_model_type(broken_package, caplog):
    assert "llama" in registered_adapters()
    assert re.search(r"'odd_family' \(no_such_module:Adapter\).*No module named", caplog.text)
    assert find_adapter(small.build("llama"))
    with pytest.raises(DFlashError, match=r"'odd_family'.*cannot be loaded.*Repair or uninstall"):
        adapter_for_model_type("odd_family")


def test_an_architecture_without_adapter_names_the_packages_that_could_not_be_loaded(broken_package):
    with pytest.raises(IncompatibleModelsError, match=r"has no token embedding.*'odd_family'.*cannot be loaded"):
        find_adapter(small.build("longcat_flash_ngram"))


def test_register_adapter_without_brackets_is_an_error():
    with pytest.raises(TypeError, match="with brackets"):

        @register_adapter
        class Mine(TargetAdapter):
            pass


def test_the_families_of_the_package_have_adapters_of_their_own():
    named = (
        "qwen2 qwen3 qwen3_moe qwen3_next qwen3_5 qwen3_5_moe llama mistral mixtral ministral3 mistral3 gemma gemma2 "
    )
    named += "gemma3 gemma3_text gemma3n gemma4 gpt_oss"
    assert set(named.split()) <= set(registered_adapters())
    with pytest.raises(IncompatibleModelsError, match="No adapter for model_type 'unheard_of'"):
        adapter_for_model_type("unheard_of")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("deepseek_v41", "Layer 0 keeps a LayerCache, for which no exact rewind is known"),
        ("iquestloopcoder", "layer 0 of the adapter is not called by the model"),
        ("longcat_flash_ngram", r"has no token embedding: an nn\.Embedding is looked for.*, and it has \w+ \(\w+\)"),
    ],
)
def test_an_architecture_that_does_not_fit_is_refused_in_one_line(name, reason):
    with pytest.raises(IncompatibleModelsError, match=reason) as error:
        LoadedTargetModel(small.build(name))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "changes", "scale"),
    [
        ("recurrent_gemma", {}, 8.0),
        ("granite", {"embedding_multiplier": 3.0}, 3.0),
        ("gpt2", {}, 1.0),
        ("rwkv7", {}, 1.0),
    ],
)
def test_the_generic_adapter_measures_the_embedding_scale(name, changes, scale):
    """``gpt2`` adds position embeddings; in ``rwkv7`` a norm lies before the layers, so that there is no factor."""
    adapter = find_adapter(small.build(name, **changes))
    assert isinstance(adapter, GenericAdapter)
    assert adapter.embedding_scale == pytest.approx(scale, rel=1e-4)


def test_other_architectures_get_the_generic_adapter_after_a_trial_that_is_logged(caplog):
    model = small.build("olmo2")
    assert detect_model_architecture(model) == "olmo2"
    with caplog.at_level("INFO", logger="dflash.target"):
        assert isinstance(load_target_model(model).adapter, GenericAdapter)
        LoadedTargetModel(small.build("qwen3"))
    assert caplog.messages == ["olmo2 has no adapter of its own: 17 short passes try the generic one."]


@pytest.mark.parametrize("name", ["gpt_neox", "lille-130m"])
def test_a_backbone_that_goes_on_to_the_logits_is_refused_without_an_adapter_of_its_own(name, monkeypatch):
    """Decoding would be exact with it, but a drafter's hidden states would not fit its head."""
    model = small.build(name)
    target = LoadedTargetModel(model)
    assert target.head(mx.zeros((1, 2, target.hidden_size))).shape == (1, 2, target.vocab_size)
    monkeypatch.setattr(registry.ADAPTERS, "find", lambda name: None)
    with pytest.raises(IncompatibleModelsError, match="hidden states after the last norm"):
        LoadedTargetModel(model)
