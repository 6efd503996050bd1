"""The check passes what decodes exactly, and finds what does not."""

import copy

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from rich.console import Console

from dflash import LoadedTargetModel
from dflash.adapters.conformance import check
from dflash.adapters.conformance import small_models as small
from dflash.adapters.gemma import GemmaAdapter
from dflash.adapters.llama import LlamaAdapter
from dflash.target import rewind

ROUNDS = 8  # of the quick look here; `make architectures` takes more, on every architecture


@pytest.mark.parametrize(
    "name", ["qwen3_5", "ministral3", "gemma3n", "gpt_oss", "mamba2", "falcon_h1", "recurrent_gemma"]
)
def test_families_and_hybrids_pass(name):
    assert check(small.build(name), ROUNDS).failure == ""


@pytest.mark.parametrize(
    ("name", "bits"), [("qwen3", 4), ("llama", 8), ("ministral3", 4), ("gemma3_text", 8), ("gpt_oss", 4)]
)
def test_quantised_targets_pass(name, bits):
    model = small.build(name)
    nn.quantize(model, group_size=32, bits=bits)
    assert any(array.dtype == mx.uint32 for _, array in tree_flatten(model.parameters()))
    assert check(model, ROUNDS).failure == ""


@pytest.mark.parametrize(
    ("name", "options"),
    [("qwen3", {"max_kv_size": 13}), ("qwen3", {"kv_bits": 8, "kv_group_size": 32}), ("llama4", {})],
)
def test_bounded_quantised_and_chunked_caches_pass(name, options):
    model = small.build(name, head_dim=32) if options else small.build(name)
    assert check(model, rounds=20, **options).failure == ""


def failure_of(model, adapter_class) -> str:
    return check(LoadedTargetModel(model, adapter=adapter_class(model)), ROUNDS).failure


def test_features_of_the_wrong_layer_are_found():
    class Shifted(LlamaAdapter):
        def forward(self, tokens_BL, cache, layer_ids, recorder=None):
            return super().forward(tokens_BL, cache, [max(0, i - 1) for i in layer_ids], recorder)

    assert failure_of(small.build("llama"), Shifted).startswith("features are the layers' outputs: layer 1 differs")


def test_a_head_without_its_cap_is_found():
    class Uncapped(GemmaAdapter):
        def head(self, hidden_BLE):
            return self.embedding.as_linear(hidden_BLE)

    assert "head(backbone(x)) equals model(x): logits differs" in failure_of(small.build("gemma2"), Uncapped)


def test_a_rewind_that_only_moves_counters_is_found(monkeypatch):
    def counters_only(cache, rejected):
        cache.offset -= rejected
        cache._idx -= rejected

    monkeypatch.setitem(rewind.RULES, rewind.RotatingKVCache, counters_only)
    assert "rejected tokens leave no trace" in check(small.build("llama"), rounds=40).failure


def test_a_state_that_is_not_put_back_is_found(monkeypatch):
    monkeypatch.setattr("dflash.target.replay.restore", lambda cache, before: None)
    assert "rejected tokens leave no trace" in check(small.build("mamba2"), ROUNDS).failure


def test_a_prompt_is_fed_in_chunks_beyond_the_longest_window():
    """mlx-lm's mask of PLaMo 3 sees a token more than its cache keeps."""
    found = check(small.build("plamo3", sliding_window=48), rounds=1)
    assert found.failure.startswith("prefill in chunks equals prefill at once: last hidden state differs")


@pytest.mark.parametrize("name", ["qwen3_5", "mamba2"])  # which draw vectors
def test_a_small_model_is_the_same_whatever_was_random_before(name):
    mx.random.seed(1)
    one = dict(tree_flatten(small.build(name).parameters()))
    mx.random.seed(2)
    other = dict(tree_flatten(small.build(name).parameters()))
    assert all(mx.array_equal(one[weight], other[weight]) for weight in one)


def test_an_adapter_that_leaves_its_mark_on_the_model_is_found():
    class Careless(LlamaAdapter):
        def head(self, hidden_BLE):
            self.model.model.norm = copy.copy(self.model.model.norm)
            return super().head(hidden_BLE)

    assert "the model's own objects are unchanged: model.norm changed" in failure_of(small.build("llama"), Careless)


def test_the_report_is_a_table_with_the_first_difference():
    report = check(small.build("deepseek_v41"))
    assert not report.passed
    assert report.cache_kinds == "LayerCache"
    console = Console(width=300)
    with console.capture() as shown:
        console.print(report.table())
    assert "Layer 0 keeps a LayerCache" in shown.get()
