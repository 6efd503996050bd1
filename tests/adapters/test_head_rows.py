"""The head of some tokens alone gives the logits that the whole head gives them, whatever table it sits in."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from support.models import qwen3_model

from dflash.adapters import TargetAdapter, find_adapter
from dflash.adapters.base import rows_of_table
from dflash.adapters.conformance import small_models as small
from dflash.adapters.gemma import GemmaAdapter

IDS = mx.array([3, 17, 0, 29, 8])


def with_bias(model: nn.Module) -> nn.Module:
    linear = nn.Linear(model.args.hidden_size, model.args.vocab_size)
    linear.weight, linear.bias = model.lm_head.weight, mx.random.normal((model.args.vocab_size,), key=mx.random.key(1))
    model.lm_head = linear
    return model


def quantized(model: nn.Module, **options) -> nn.Module:
    nn.quantize(model, **options)
    return model


WHOLE_GROUPS = {"intermediate_size": 64, "head_dim": 32}
HEADS = {
    "tied": lambda: qwen3_model(1),
    "own": lambda: qwen3_model(1, tied=False),
    "biased": lambda: with_bias(qwen3_model(1, tied=False)),
    "tied, quantised": lambda: quantized(qwen3_model(1, **WHOLE_GROUPS), group_size=32, bits=4),
    "own, mxfp4": lambda: quantized(qwen3_model(1, tied=False, **WHOLE_GROUPS), group_size=32, bits=4, mode="mxfp4"),
    "biased, quantised": lambda: quantized(
        with_bias(qwen3_model(1, tied=False, **WHOLE_GROUPS)), group_size=32, bits=8
    ),
    "capped": lambda: small.build("gemma2"),
    "found by the generic adapter": lambda: small.build("cohere"),
}


@pytest.mark.parametrize("head", HEADS)
def test_logits_of_some_tokens_are_those_of_the_whole_head(head, monkeypatch):
    adapter = find_adapter(HEADS[head]())
    hidden = mx.random.normal((2, 3, adapter.hidden_size), key=mx.random.key(0))
    whole, some = adapter.head(hidden)[..., IDS], adapter.head_rows(IDS)
    if "generic" not in head:  # it computes all logits, the others do not
        monkeypatch.setattr(type(adapter), "head", None)
        monkeypatch.setattr(TargetAdapter, "head", None)
    np.testing.assert_allclose(np.array(some(hidden)), np.array(whole), atol=2e-5, rtol=1e-5)


def test_the_head_of_an_adapter_that_overrides_it_and_a_table_of_another_class_are_run_whole():
    class Doubled(GemmaAdapter):
        def head(self, hidden_BLE):
            return 2 * super().head(hidden_BLE)

    class Odd(nn.Linear):
        def __call__(self, x):
            return super().__call__(x) ** 2

    adapter = Doubled(small.build("gemma2"))
    hidden = mx.random.normal((1, 4, adapter.hidden_size))
    assert mx.array_equal(adapter.head_rows(IDS)(hidden), adapter.head(hidden)[..., IDS]).item()
    model = qwen3_model(1, tied=False)
    model.lm_head = Odd(model.args.hidden_size, model.args.vocab_size)
    assert rows_of_table(model.lm_head, IDS) is None
    adapter, hidden = find_adapter(model), hidden[..., : model.args.hidden_size]
    assert mx.array_equal(adapter.head_rows(IDS)(hidden), adapter.head(hidden)[..., IDS]).item()
