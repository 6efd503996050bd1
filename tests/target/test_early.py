"""A pass that begins early is the same pass, and its first layers are on their way before the last are built."""

import mlx.core as mx
import numpy as np
import pytest
from support.models import bound_drafter, target

from dflash import decode
from dflash.block import Decoding
from dflash.decode import plain_steps, prefill
from dflash.drafters import dflash as block_drafter
from dflash.target import early


@pytest.fixture
def events(monkeypatch) -> list[str]:
    """In their order, the calls of layers and what the device is given."""
    noted: list[str] = []

    class Noting:
        def __getattr__(self, name):
            return getattr(mx, name)

        def async_eval(self, *arrays):
            noted.append("given")
            mx.async_eval(*arrays)

    monkeypatch.setattr(early, "mx", Noting())
    monkeypatch.setattr(block_drafter, "mx", Noting())
    return noted


@pytest.mark.parametrize(
    ("kind", "parents"), [("qwen3", None), ("llama", None), ("sliding", None), ("qwen3", [-1, 0, 0, 1])]
)
def test_a_pass_that_begins_early_is_the_same_pass(kind, parents, events):
    loaded, tokens = target(kind), mx.array([[3, 1, 4, 1, 5]])
    outcomes = []
    for begun in (None, early.EarlyLayers()):
        cache = loaded.make_cache()
        loaded.forward_hidden(mx.array([[7, 2, 9]]), cache, ())
        logits, features = loaded.forward_with_hidden_states(tokens, cache, (0, 1), parents, early=begun)
        cache.keep([0, 1, 4] if parents else [0, 1])  # the last draft of the tree follows the first
        after = loaded.forward_hidden(mx.array([[8]]), cache, ())[0]
        outcomes.append([np.array(x.astype(mx.float32)) for x in (logits, features, after)])
        assert events.count("given") == (0 if begun is None else loaded.num_layers)
    for plainly, earlier in zip(*outcomes, strict=True):
        np.testing.assert_array_equal(plainly, earlier)


def test_each_layer_is_given_to_the_device_before_the_next_is_built(events):
    loaded = target("qwen3")
    begun = early.EarlyLayers()

    class Built:
        def call(self, layer, args, kwargs):
            events.append("built")
            return layer(*args, **kwargs)

    begun.caller = Built()
    loaded.adapter.forward(mx.array([[3, 1, 4]]), loaded.make_cache(), (0,), begun)
    assert events == ["built", "given"] * loaded.num_layers
    assert begun.begun_at is not None


def test_a_drafter_begins_with_each_layer_before_the_next_is_built(events):
    drafter = bound_drafter("qwen3", 0)
    cache = drafter.make_cache()
    features = mx.zeros((1, 3, len(drafter.target_layer_ids) * drafter.config.hidden_size))
    drafter.extend_context(features, cache, mx.array([[1, 2, 3]]))
    drafter.propose(mx.array([[4]]), 3, cache)
    assert events == ["given"] * drafter.config.num_hidden_layers


@pytest.mark.parametrize(("on_a_cpu", "early_steps"), [(True, 3), (False, 1)])
def test_the_steps_of_a_nap_begin_early_where_the_host_cannot_build_ahead(on_a_cpu, early_steps, events, monkeypatch):
    monkeypatch.setattr(decode, "on_cpu", lambda: on_a_cpu)
    run = Decoding(target("qwen3"), bound_drafter("qwen3", 0))
    state = prefill(run, [3, 1, 4])
    events.clear()
    assert len(list(plain_steps(run, state, 3))) == 3
    assert len(events) == early_steps * run.target.num_layers
