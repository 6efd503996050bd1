"""On a CPU a pass begins before it is built and stays the same pass; elsewhere nothing is handed over early."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from support.models import bound_drafter, target

from dflash import Policy
from dflash.core import backend
from dflash.decoding.block import Decoding
from dflash.decoding.loop import plain_steps, prefill
from dflash.drafters import dflash
from dflash.target import early


@pytest.fixture
def events(monkeypatch) -> list[str]:
    """In their order, what the device is given, and what :func:`note_calls` adds."""
    noted: list[str] = []
    async_eval = mx.async_eval

    def give(*arrays):
        noted.append("given")
        async_eval(*arrays)

    monkeypatch.setattr(mx, "async_eval", give)
    return noted


def note_calls(layers: list[nn.Module], events: list[str], monkeypatch) -> None:
    """Note each call of ``layers``, all of one class, when it is built."""
    (kind,) = {type(layer) for layer in layers}
    call = kind.__call__

    def noting(self, *args, **kwargs):
        output = call(self, *args, **kwargs)
        events.append("built")
        return output

    monkeypatch.setattr(kind, "__call__", noting)


def compute_on(cpu: bool, monkeypatch) -> None:
    """Let the package take this machine's device for a CPU with a core to spare, or for none."""
    for module in (backend, early, dflash):
        monkeypatch.setattr(module, "begins_early", lambda: cpu)


@pytest.mark.parametrize(
    ("cpu", "threads", "early"), [(True, 1, True), (True, None, True), (True, 2, False), (False, 1, False)]
)
def test_a_cpu_begins_early_where_blas_leaves_the_host_a_core(cpu, threads, early, monkeypatch):
    monkeypatch.setattr(backend, "on_cpu", lambda: cpu)
    monkeypatch.setattr(backend, "blas_threads", lambda: threads)
    monkeypatch.setattr(backend.os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    assert backend.begins_early() == early


@pytest.mark.parametrize(
    ("kind", "parents"), [("qwen3", None), ("llama", None), ("sliding", None), ("qwen3", [-1, 0, 0, 1])]
)
def test_a_pass_that_begins_early_is_the_same_pass(kind, parents, events, monkeypatch):
    """Each layer is given to a CPU before the next is built, whatever calls it."""
    loaded, outcomes = target(kind), []
    note_calls(loaded.model.layers, events, monkeypatch)
    for cpu, a_layer in ((False, ["built"]), (True, ["built", "given"])):
        compute_on(cpu, monkeypatch)
        assert (early.early_layers(None) is None) == (not cpu)
        cache = loaded.make_cache()
        loaded.forward_hidden(mx.array([[7, 2, 9]]), cache, ())
        assert "given" not in events, "a prompt's pass is taken as a whole"
        events.clear()
        logits, features = loaded.forward_with_hidden_states(mx.array([[3, 1, 4, 1, 5]]), cache, (0, 1), parents)
        assert events == a_layer * loaded.num_layers
        events.clear()
        cache.keep([0, 1, 4] if parents else [0, 1])  # the last draft of the tree follows the first
        after = loaded.forward_hidden(mx.array([[8]]), cache, ())[0]
        outcomes.append([np.array(x.astype(mx.float32)) for x in (logits, features, after)])
    for plainly, earlier in zip(*outcomes, strict=True):
        np.testing.assert_array_equal(plainly, earlier)


def drafted(drafter, anchor: mx.array) -> mx.array:
    """Final hidden states of a block after ``anchor`` and three tokens of context."""
    cache = drafter.make_cache()
    features = mx.ones((1, 3, len(drafter.target_layer_ids) * drafter.config.hidden_size))
    drafter.extend_context(features, cache, mx.array([[1, 2, 3]]))
    return drafter.draft_hidden(anchor, 3, cache)


@pytest.mark.parametrize(("cpu", "a_layer"), [(True, ["given", "built"]), (False, ["built"])])
def test_a_cpu_begins_with_each_layer_of_a_drafter_before_the_next_is_built(cpu, a_layer, events, monkeypatch):
    """With its attention: what follows in the layer is small. Whether to do so is asked once a pass."""
    drafter, asked = bound_drafter("qwen3", 0), []
    monkeypatch.setattr(dflash, "begins_early", lambda: asked.append(1) or cpu)
    note_calls(drafter.layers, events, monkeypatch)
    drafted(drafter, mx.array([[4]]))
    assert events == a_layer * drafter.config.num_hidden_layers
    assert len(asked) == 1


TRANSFORMED = {
    "grad": lambda drafter, x: nn.value_and_grad(drafter, lambda a: drafted(drafter, a).sum())(x)[0],
    "vmap": lambda drafter, x: mx.vmap(lambda a: drafted(drafter, a))(x[None]).sum(),
    "compile": lambda drafter, x: mx.compile(lambda a: drafted(drafter, a))(x).sum(),
}


@pytest.mark.parametrize("transformed", TRANSFORMED.values(), ids=TRANSFORMED)
def test_a_drafting_pass_that_begins_early_can_be_transformed(transformed, monkeypatch):
    compute_on(True, monkeypatch)
    anchor, drafter = mx.array([[4]]), bound_drafter("qwen3", 0)
    found = transformed(drafter, anchor)
    # A compiled graph is built, not evaluated: on a CPU that would call a C++ compiler for many seconds.
    assert transformed is TRANSFORMED["compile"] or mx.allclose(found, drafted(drafter, anchor).sum(), rtol=1e-4)


class Sleeper(Policy):
    """Never drafts."""

    def sleep(self) -> int:
        return 1000


@pytest.mark.parametrize("cpu", [True, False])
def test_plain_steps_begin_early_too(cpu, events, monkeypatch):
    run = Decoding(target("qwen3"), bound_drafter("qwen3", 0), policy=Sleeper())
    state = prefill(run, [3, 1, 4])
    compute_on(cpu, monkeypatch)
    events.clear()
    assert len(list(plain_steps(run, state, 1))) == 1
    assert events == ["given"] * (cpu * run.target.num_layers + 1), "each layer, and what the step chooses"
    events.clear()
    assert len(list(plain_steps(run, state, 3))) == 3
    assert len(events) == 3 * (cpu * run.target.num_layers + 1)
