"""The check passes what decodes exactly, and finds what does not."""

import copy

import mlx.core as mx
import mlx.nn as nn
import pytest
from rich.console import Console

from dflash import LoadedTargetModel
from dflash.adapters.conformance import check, run_checks
from dflash.adapters.conformance import small_models as small
from dflash.adapters.conformance.checks import CHECKS, RIGHT, FullTrial, decoding_is_plain
from dflash.adapters.llama import LlamaAdapter
from dflash.core.files import flat
from dflash.target import rewind
from dflash.target.compare import Mismatch
from dflash.target.trial import TRIAL, Trial

ROUNDS = 8  # of the quick look here; `make architectures` takes more, on every architecture

# Bits of the weights, and options of the caches: every kind of cache, and what families do apart from it.
TARGETS: list[tuple[str, int | None, dict[str, int]]] = [
    ("qwen3", None, {"max_kv_size": 13}),
    ("qwen3", 4, {"kv_bits": 8, "kv_group_size": 32}),
    ("ministral3", None, {}),
    ("gemma3n", None, {}),
    ("gemma3_text", 8, {}),
    ("gemma4", None, {}),
    ("gpt_oss", 4, {}),
    ("llama4", None, {}),
    ("afm7", None, {}),
    ("deepseek_v32", None, {}),
    ("qwen3_5", 4, {}),
    ("mamba2", None, {}),
    ("falcon_h1", None, {}),
    ("recurrent_gemma", None, {}),
]


@pytest.mark.parametrize(("name", "bits", "options"), TARGETS)
def test_every_kind_of_cache_and_of_weights_passes(name, bits, options):
    model = small.build(name, **({"head_dim": 32} if "kv_bits" in options else {}))
    if bits:
        nn.quantize(model, group_size=32, bits=bits)
        assert any(array.dtype == mx.uint32 for array in flat(model.parameters()).values())
    trial = FullTrial(LoadedTargetModel(model), ROUNDS, cache_options=options, wrap=True, right=RIGHT[::2])
    assert [found for found in run_checks(trial) if not found.passed] == []


def counters_only(cache, rejected):
    cache.offset -= rejected
    cache._idx -= rejected


@pytest.mark.parametrize(
    ("name", "place", "wrong"),
    [
        ("llama", "dflash.target.rewind.RULES", {rewind.RotatingKVCache: counters_only}),
        ("qwen3_5", "dflash.target.replay.restore", lambda cache, before: None),
    ],
)
def test_a_rewind_that_leaves_a_trace_is_found(name, place, wrong, monkeypatch):
    monkeypatch.setattr(place, rewind.RULES | wrong if isinstance(wrong, dict) else wrong)
    trial = Trial(LoadedTargetModel(small.build(name)), rounds=40)
    with pytest.raises(Mismatch, match=r"round \d+, \d+ of \d+ kept"):
        TRIAL["rejected tokens leave no trace"](trial)


def test_a_text_that_differs_from_the_plain_one_is_found():
    trial = FullTrial(LoadedTargetModel(small.build("qwen3")))
    text, leads = trial.plain
    trial.plain = [*text[:40], (text[40] + 1) % small.VOCAB, *text[41:]], leads
    with pytest.raises(Mismatch, match=rf"token 40 is {text[40]}, plain decoding writes"):
        decoding_is_plain(trial)


def test_a_prompt_is_fed_in_chunks_beyond_the_longest_window():
    """mlx-lm's mask of PLaMo 3 sees a token more than its cache keeps."""
    found = check(small.build("plamo3", sliding_window=48), rounds=1)
    assert found.failure.startswith("prefill in chunks equals prefill at once: last hidden state differs")


@pytest.mark.parametrize("name", ["qwen3_5", "mamba2"])  # which draw vectors
def test_a_small_model_is_the_same_whatever_was_random_before(name):
    built = []
    for seed in (1, 2):
        mx.random.seed(seed)
        built.append(flat(small.build(name).parameters()))
    assert all(mx.array_equal(one, other) for one, other in zip(*map(dict.values, built), strict=True))


def test_an_adapter_that_leaves_its_mark_on_the_model_is_found():
    class Careless(LlamaAdapter):
        def head(self, hidden_BLE):
            self.model.model.norm = copy.copy(self.model.model.norm)
            return super().head(hidden_BLE)

    model = small.build("llama")
    report = check(LoadedTargetModel(model, adapter=Careless(model)), rounds=1)
    assert report.failure == "the model's own objects are unchanged: model.norm changed"


@pytest.mark.parametrize("name", ["qwen3", "gpt_neox"])  # which exchange layers, and a norm as well
def test_a_pass_that_fails_leaves_the_model_as_it_was(name):
    trial = FullTrial(LoadedTargetModel(small.build(name)))
    with pytest.raises(ValueError, match="integral"):
        trial.target.forward_hidden(mx.zeros((1, 3)), trial.target.make_cache(), (0,))
    CHECKS["the model's own objects are unchanged"](trial)


def test_a_weight_may_be_replaced_by_an_equal_one_only():
    trial = FullTrial(LoadedTargetModel(small.build("llama")))
    unchanged, norm = CHECKS["the model's own objects are unchanged"], trial.target.model.model.norm
    norm.weight = norm.weight + 0
    unchanged(trial)
    norm.weight = norm.weight + 1
    with pytest.raises(Mismatch, match=r"model\.norm\.weight changed"):
        unchanged(trial)


def test_the_report_is_a_table_with_the_first_difference():
    report = check(small.build("deepseek_v41"))
    assert not report.passed
    assert report.cache_kinds == "LayerCache"
    console = Console(width=300)
    with console.capture() as shown:
        console.print(report.table())
    assert "Layer 0 keeps a LayerCache" in shown.get()
