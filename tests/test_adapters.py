"""Adapters: found by name, and reading a target's layers without leaving a trace in it."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from models import HIDDEN, LAYERS, llama_model, qwen3_model, target

from dflash import DFlashError, LoadedTargetModel, TargetAdapter, register_adapter
from dflash.adapters import adapter_for_model_type, detect_model_architecture, registered_adapters, registry
from dflash.errors import IncompatibleModelsError

KINDS = ["qwen3", "llama", "sliding"]


@pytest.fixture
def clean_registry(monkeypatch):
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(registry, "_ADAPTERS", dict(registry._ADAPTERS))


def test_qwen3_and_llama_have_adapters_sorted_by_name():
    names = list(registered_adapters())
    assert {"qwen3", "llama"} <= set(names)
    assert names == sorted(names)
    assert all(issubclass(adapter, TargetAdapter) for adapter in registered_adapters().values())


def test_an_unknown_type_is_one_line_that_says_what_is_known_and_what_to_do():
    with pytest.raises(IncompatibleModelsError) as error:
        adapter_for_model_type("abacus")
    message = str(error.value)
    assert isinstance(error.value, DFlashError)
    assert "\n" not in message
    for word in ("'abacus'", "qwen3", "llama", "register_adapter"):
        assert word in message


def test_a_target_of_unknown_type_is_refused():
    model = qwen3_model(0)
    model.model_type = "abacus"
    with pytest.raises(IncompatibleModelsError, match="abacus"):
        LoadedTargetModel(model)


def test_a_model_without_a_type_is_refused_by_its_class_name():
    assert detect_model_architecture(llama_model(0)) == "llama"
    with pytest.raises(IncompatibleModelsError, match="Linear has no model_type"):
        detect_model_architecture(nn.Linear(2, 2))


def test_a_registered_adapter_serves_its_types(clean_registry):
    @register_adapter("abacus", "slide-rule")
    class AbacusAdapter(TargetAdapter):
        """A model of the usual layout under another name."""

    assert adapter_for_model_type("abacus") is AbacusAdapter
    assert adapter_for_model_type("slide-rule") is AbacusAdapter
    model = qwen3_model(0)
    model.model_type = "abacus"
    assert type(LoadedTargetModel(model).adapter) is AbacusAdapter


def test_registering_in_one_test_does_not_reach_the_next():
    assert "abacus" not in registered_adapters()


def test_an_adapter_given_by_hand_is_used():
    class Mine(TargetAdapter):
        """For a model that nobody registered."""

    model = qwen3_model(0)
    model.model_type = "abacus"
    assert isinstance(LoadedTargetModel(model, adapter=Mine(model)).adapter, Mine)


def layer_outputs(model, tokens: mx.array) -> list[mx.array]:
    """What every decoder layer returns in the stock forward pass, seen by patching the layers' class."""
    kind, outputs = type(model.layers[0]), []
    stock = kind.__call__

    def spy(self, *args, **kwargs):
        outputs.append(stock(self, *args, **kwargs))
        return outputs[-1]

    kind.__call__ = spy
    try:
        model(tokens)
    finally:
        kind.__call__ = stock
    return outputs


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ids", [(0,), (3, 1), tuple(range(LAYERS)), (2, 2)])
def test_features_are_the_outputs_of_the_stock_layers_in_the_order_asked_for(kind, ids):
    loaded, tokens = target(kind, 1), mx.array([[3, 1, 4, 1, 5, 9, 2, 6]])
    outputs = layer_outputs(loaded.model, tokens)
    assert len(outputs) == LAYERS
    logits, features = loaded.forward_with_hidden_states(tokens, None, ids)
    assert features.shape == (1, 8, len(ids) * HIDDEN)
    assert mx.array_equal(features, mx.concatenate([outputs[i] for i in ids], axis=-1))
    assert mx.array_equal(logits, loaded.model(tokens))


@pytest.mark.parametrize("kind", KINDS)
def test_no_features_are_an_empty_last_axis(kind):
    loaded, tokens = target(kind, 1), mx.array([[3, 1, 4]])
    logits, features = loaded.forward_with_hidden_states(tokens, loaded.make_cache(), ())
    assert features.shape == (1, 3, 0)
    np.testing.assert_allclose(np.array(logits), np.array(loaded.model(tokens)), atol=1e-4)


def tree(model) -> tuple[list[int], dict[str, int]]:
    """Identity of every module and every parameter array, by name."""
    modules = {name: id(module) for name, module in model.named_modules()}
    return sorted(modules.values()), modules | {name: id(w) for name, w in tree_flatten(model.parameters())}


@pytest.mark.parametrize("kind", KINDS)
def test_a_forward_pass_leaves_modules_and_parameters_the_same_objects(kind):
    loaded = target(kind, 1)
    layers = loaded.model.model.layers
    before = tree(loaded.model)
    loaded.forward_with_hidden_states(mx.array([[1, 2]]), loaded.make_cache(), (0, 3))
    assert tree(loaded.model) == before
    assert loaded.model.model.layers is layers


@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_inside_the_forward_pass_restores_the_layers(kind, monkeypatch):
    loaded = target(kind, 1)
    layers, before = loaded.model.model.layers, tree(loaded.model)

    def fail(*_, **__):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(type(layers[2].mlp), "__call__", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            loaded.forward_with_hidden_states(mx.array([[1, 2]]), None, (0, 3))
    assert loaded.model.model.layers is layers
    assert tree(loaded.model) == before


def test_an_adapter_answers_for_sizes_and_limits():
    loaded = target("llama", 1)
    assert (loaded.hidden_size, loaded.vocab_size, loaded.num_layers, loaded.max_length) == (HIDDEN, 32, LAYERS, 512)
    assert loaded.embed(mx.array([[1, 2]])).shape == (1, 2, HIDDEN)


@pytest.mark.parametrize("seed", [0, 1], ids=["own head", "tied head"])
def test_head_of_the_hidden_states_is_the_stock_logits(seed):
    loaded, tokens = target("qwen3", seed), mx.array([[1, 2, 3]])
    hidden, _ = loaded.forward_hidden(tokens, None, ())
    assert mx.array_equal(loaded.head(hidden), loaded.model(tokens))
