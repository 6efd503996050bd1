"""A recorded pass holds every call as it was, in order, and leaves the model's classes as they were."""

from threading import Thread

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import KVCache

from dflash.adapters.calls import Pass, embedding_factors, streams


class Plain(nn.Module):
    def __call__(self, x):
        return x + 1


class Inherits(Plain):
    """Has no ``__call__`` of its own."""


class CallsSuper(Plain):
    def __call__(self, x):
        return 2 * super().__call__(x)


class Changes(nn.Module):
    def __call__(self, x):
        x *= 0.0  # in place: the caller's array changes too
        return x


class Small(nn.Module):
    def __init__(self, fails=False):
        super().__init__()
        self.table, self.layers = nn.Embedding(8, 4), [Plain(), Inherits(), CallsSuper(), Changes()]
        self.fails = fails

    def __call__(self, tokens, cache=None):
        h = self.table(tokens)
        for layer in self.layers:
            h = layer(h)
        if self.fails:
            raise RuntimeError("after its layers")
        return h


TOKENS = mx.array([[1, 2, 3]])


def test_calls_come_in_order_each_once_with_its_caller():
    model = Small()
    recorded = Pass(model, TOKENS)
    assert [call.module for call in recorded.calls] == [model, model.table, *model.layers]
    assert all(call.callers == [recorded.calls[0]] for call in recorded.calls[1:])
    assert recorded.first_call(model.layers[2:]).module is model.layers[2]
    assert isinstance(recorded.caches[0], KVCache)


def test_arrays_are_kept_as_they_were_when_the_model_changes_them_in_place():
    recorded = Pass(Small(), TOKENS)
    assert mx.array_equal(recorded.logits, mx.zeros((1, 3, 4)))
    doubled = recorded.calls[-2].output
    assert mx.array_equal(doubled, recorded.calls[-1].hidden)
    assert mx.allclose(doubled, 2 * (recorded.calls[1].output + 3))


@pytest.mark.parametrize("fails", [False, True])
def test_the_classes_are_put_back(fails):
    classes = (Small, Plain, Inherits, CallsSuper, Changes, nn.Embedding)
    before = [dict(vars(cls)) for cls in classes]
    if fails:
        with pytest.raises(RuntimeError, match="after its layers"):
            Pass(Small(fails), TOKENS)
    else:
        Pass(Small(), TOKENS)
    assert [dict(vars(cls)) for cls in classes] == before


def test_streams_are_the_hidden_states_in_tuples_and_stacks():
    one, stack, other = mx.zeros((2, 3, 4)), mx.ones((5, 2, 3, 4)), mx.zeros((2, 3, 5))
    found = streams((one, (stack, other), None), (2, 3, 4))
    assert [float(s.sum()) for s in found] == [0.0] + [24.0] * 5


def test_what_is_added_by_position_alone_does_not_hide_the_factor():
    class Positions(Small):
        def __call__(self, tokens, cache=None):
            return self.layers[0](self.table(tokens) * 7 + mx.arange(3)[None, :, None])

    model = Positions()
    passes = Pass(model, TOKENS), Pass(model, TOKENS + 3)
    assert embedding_factors(model.table, model.layers, *passes) == [pytest.approx(7)]


def test_calls_of_other_threads_are_not_recorded():
    class Threaded(Small):
        def __call__(self, tokens, cache=None):
            thread = Thread(target=lambda: self.layers[0](mx.zeros(3)))
            thread.start()
            thread.join()
            return self.layers[1](self.table(tokens))

    model = Threaded()
    assert [call.module for call in Pass(model, TOKENS).calls] == [model, model.table, model.layers[1]]
