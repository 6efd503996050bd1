"""Training: blocks, anchors, weights, quick maths, interruption, and recipe files."""

import math
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten

import dflash  # noqa: F401  (loads a fast BLAS before MLX)
from dflash import DFlashConfig, DFlashDraftModel, load_target
from dflash import cpu_math as fastmath
from dflash.adapters import find_adapter
from dflash.files import write_arrays
from dflash.training.data.sequences import Sequences, pad_batch, plan_batches
from dflash.training.drafters.forward import draft_hidden
from dflash.training.drafters.targets import block_targets, position_weights, select_anchors
from dflash.training.loop.fit import FitSettings, fit
from dflash.training.loop.optimizer import MuonSettings
from dflash.training.recipe import Recipe
from dflash.training.settings import SettingsError, from_dict, load_settings
from dflash.training.toy.quick_forward import FAMILIES, hidden_states
from dflash.training.toy.small_target import SmallTargetSettings
from dflash.training.toy.target import (
    TargetSettings,
    answer_loss,
    answer_positions,
    build_target,
    model_config,
    rounded_to_bfloat16,
    save_target,
)
from dflash.training.toy.tokenizer import encode_answer, save_tokenizer, train_tokenizer


class FakeTarget:
    """An embedding and a head: all that a drafter borrows."""

    hidden_size, vocab_size, num_layers = 32, 50, 4

    def __init__(self):
        self.table = mx.random.normal((50, 32))

    def embed(self, tokens):
        return self.table[tokens]

    def head(self, hidden):
        return hidden @ self.table.T


@pytest.mark.parametrize("layer_types", [(), ("sliding_attention", "full_attention")])
def test_blocks_trained_together_are_the_blocks_drafted_one_by_one(layer_types):
    mx.random.seed(1)
    config = DFlashConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, num_target_layers=4, vocab_size=50, mask_token_id=49, block_size=5, target_layer_ids=(1, 3),
        layer_types=layer_types, sliding_window=6 if layer_types else None,
    )  # fmt: skip
    model, target = DFlashDraftModel(config), FakeTarget()
    model.bind(target)  # type: ignore[arg-type]
    tokens, features = mx.random.randint(0, 49, (2, 20)), mx.random.normal((2, 20, 64))
    anchors = mx.array([[3, 9, 15], [4, 4, 18]])
    logits = target.head(draft_hidden(model, features, tokens, anchors)[:, :, 1:])
    for n in range(2):
        for a in range(3):
            anchor, cache = int(anchors[n, a]), model.make_cache()
            model.extend_context(features[n : n + 1, :anchor], cache, tokens[n : n + 1, :anchor])
            proposal = model.propose(tokens[n : n + 1, anchor : anchor + 1], 4, cache)
            assert mx.abs(proposal.logits[0] - logits[n, a]).max() < 1e-3


def mask(length, *spans):
    """A response mask ``[1, length]`` that is true on the half-open ``spans``."""
    return np.array([[any(a <= i < b for a, b in spans) for i in range(length)]])


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(1, 50), st.integers(0, 99))
def test_anchors_stay_in_the_response(response, count, seed):
    response = np.array([[False, *response, True, True]])
    anchors = select_anchors(response, count, np.random.default_rng(seed))
    assert anchors.shape == (1, count)
    assert response[0, anchors].all()
    assert response[0, anchors + 1].all()
    valid = (response[0, :-1] & response[0, 1:]).sum()
    assert len(set(anchors[0].tolist())) == min(count, valid)
    _, counts = block_targets(mx.zeros(response.shape, mx.int32), mx.array(response), mx.array(anchors), 2)
    assert counts.sum().item() == min(count, valid)


def test_a_response_without_an_anchor_is_refused():
    with pytest.raises(ValueError, match="no anchor"):
        select_anchors(mask(6, (4, 5)), 1, np.random.default_rng(0))


def test_block_targets_are_the_tokens_behind_the_anchor_and_end_with_the_response():
    tokens = mx.arange(100, 110)[None]
    targets, counts = block_targets(tokens, mx.array(mask(10, (2, 8))), mx.array([[5, 2]]), 4)
    assert counts.tolist() == [[[True, True, False], [True, True, True]]]
    assert targets[0, 0, :2].tolist() == [106, 107]
    assert targets[0, 1].tolist() == [103, 104, 105]


def test_a_block_counts_neither_the_next_turn_nor_what_follows_it():
    response = mx.array(mask(10, (2, 5), (6, 10)))
    _, counts = block_targets(mx.arange(10)[None], response, mx.array([[3, 7]]), 6)
    assert counts.tolist() == [[[True, False, False, False, False], [True, True, False, False, False]]]


def test_position_weights_decay_from_one():
    weights = position_weights(16, 7.0)
    assert weights.shape == (15,)
    assert weights[0] == 1
    assert weights[7].item() == pytest.approx(math.exp(-1))


def test_quick_maths_equals_mlx_in_values_and_gradients():
    mx.random.seed(2)
    x, y, t = mx.random.normal((40, 30)) * 6, mx.random.normal((40, 30)), mx.random.randint(0, 30, (40,))
    cases = [
        (lambda x: fastmath._softmax(x) * y, lambda x: mx.softmax(x, axis=-1) * y),
        (lambda x: fastmath._swiglu(x, y), lambda x: nn.silu(x) * y),
        (lambda x: fastmath._swiglu(y, x), lambda x: nn.silu(y) * x),
        (lambda x: fastmath._geglu(x, y), lambda x: nn.gelu_approx(x) * y),
        (lambda x: fastmath._geglu(y, x), lambda x: nn.gelu_approx(y) * x),
        (lambda x: fastmath._logsumexp(x), lambda x: mx.logsumexp(x, axis=-1)),
        (lambda x: fastmath.cross_entropy(x, t), lambda x: nn.losses.cross_entropy(x, t)),
    ]
    for quick, plain in cases:
        results = [mx.value_and_grad(lambda x, f=f: (f(x) ** 2).sum())(x) for f in (quick, plain)]
        (mine, my_gradient), (theirs, gradient) = results
        assert mine.item() == pytest.approx(theirs.item(), rel=1e-5)
        assert mx.abs(my_gradient - gradient).max() < 1e-4 * max(1.0, mx.abs(gradient).max().item())


SIZES = {
    "hidden_size": 16, "num_hidden_layers": 4, "intermediate_size": 24, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4, "rope_theta": 10000.0, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
}  # fmt: skip
CONFIGS = {
    "qwen3": SIZES | {"model_type": "qwen3"},
    "gemma3_text": SIZES
    | {"model_type": "gemma3_text", "query_pre_attn_scalar": 4, "sliding_window": 6, "sliding_window_pattern": 2},
}


def tiny_target(family: str = "qwen3") -> nn.Module:
    return build_target(TargetSettings(CONFIGS[family], FitSettings(1), 1), 40, 3)


@pytest.mark.parametrize("family", FAMILIES)
def test_training_forward_equals_mlx_lm(family):
    model = tiny_target(family)
    tokens = mx.random.randint(0, 40, (3, 17))
    assert mx.abs(hidden_states(find_adapter(model), tokens) - model.model(tokens)).max() < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_target_loads_as_the_same_model(family, tmp_path):
    model, settings = tiny_target(family), TargetSettings(CONFIGS[family], FitSettings(1), 1)
    save_tokenizer(train_tokenizer(TEXTS, 300), tmp_path / "tokenizer", 64)
    rounded_to_bfloat16(model)
    save_target(model, model_config(settings, 40, 3), tmp_path / "tokenizer", tmp_path / "target")
    tokens = mx.random.randint(0, 40, (2, 11))
    assert mx.array_equal(load_target(tmp_path / "target").model(tokens), model(tokens))


def test_answer_loss_is_the_mean_over_answer_tokens():
    model = tiny_target()
    tokens, response = mx.random.randint(0, 40, (2, 9)), np.concatenate([mask(9, (3, 9)), mask(9, (5, 7))])
    losses = nn.losses.cross_entropy(model(tokens)[:, :-1], tokens[:, 1:])
    expected = mx.concatenate([losses[0, 2:8], losses[1, 4:6]]).mean()
    places = mx.array(answer_positions(response))
    assert answer_loss(model, tokens, places).item() == pytest.approx(expected.item(), rel=1e-4)


class Interrupted(Exception):
    """Stands for the machine being switched off."""


def test_an_interrupted_run_ends_with_the_same_weights(tmp_path):
    settings = FitSettings(steps=7, checkpoint_every=2, optimizer=MuonSettings(warmup_steps=2, decay_steps=3))

    def batch(number, stop_at=None):
        if number == stop_at:
            raise Interrupted
        rng = np.random.default_rng(number)
        return mx.array(rng.integers(0, 40, (2, 9))), mx.array(answer_positions(mask(9, (3, 9)).repeat(2, axis=0)))

    def run(folder, *stops):
        for stop_at in (*stops, None):
            model = tiny_target()
            try:
                fit(
                    model,
                    lambda number, stop=stop_at: batch(number, stop),
                    lambda m, b: answer_loss(m, *b),
                    settings,
                    tmp_path / folder,
                )
            except Interrupted:
                continue
        return dict(tree_flatten(model.parameters()))

    straight, broken = run("straight"), run("broken", 6, 11)
    assert all(mx.array_equal(straight[name], broken[name]) for name in straight)


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "state.safetensors"
    write_arrays(path, {"a": mx.array([1.0])})

    def half(name, *args, **kwargs):
        Path(name).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(mx, "save_safetensors", half)
    with pytest.raises(OSError, match="disk full"):
        write_arrays(path, {"a": mx.array([2.0])})
    assert mx.load(str(path))["a"].item() == 1.0


def test_schedule_warms_up_stays_flat_and_decays_whatever_the_length():
    settings = MuonSettings(warmup_steps=4, decay_steps=5)
    short, long = ([settings.lr_scale(i, n) for i in range(n)] for n in (20, 40))
    assert short[:4] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert max(short) == 1
    for shares in (short, long):
        assert shares[-5:] == pytest.approx([5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6])


@given(st.lists(st.integers(2, 60), min_size=1, max_size=80), st.integers(0, 5))
@settings(max_examples=30)
def test_every_sequence_is_in_one_batch_of_a_pass(lengths, seed):
    plan = plan_batches(np.array(lengths), 120, seed, pool=16)
    assert sorted(row for rows in plan for row in rows) == list(range(len(lengths)))
    assert all(len(rows) * max(lengths[row] for row in rows) <= 120 for rows in plan)


def test_sequences_survive_saving(tmp_path):
    sequences = Sequences.from_lists([[1, 2], [3]], [[4], [5, 6, 7]])
    sequences.save(tmp_path / "a.safetensors")
    both = Sequences.load(tmp_path / "a.safetensors", tmp_path / "a.safetensors")
    tokens, response = pad_batch(both, np.array([2, 3]), both.starts)
    assert tokens.tolist() == [[1, 2, 4, 0], [3, 5, 6, 7]]
    assert response.tolist() == [[False, False, True, False], [False, True, True, True]]


TEXTS = ["def f(x):\n    return [x, 12, 345]\n", "How many? Answer: 27", "  naïve — 東京\t!"]


@given(st.text(max_size=40))
@settings(max_examples=50)
def test_tokenizer_round_trips_any_text(text):
    tokenizer = train_tokenizer(TEXTS, 300)
    if "<|" not in text:
        assert tokenizer.decode(encode_answer(tokenizer, text), skip_special_tokens=True) == text


def test_mlx_lm_loads_the_tokenizer(tmp_path):
    from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer
    from mlx_lm.tokenizer_utils import load as load_tokenizer

    save_tokenizer(train_tokenizer(TEXTS, 300), tmp_path, 64)
    tokenizer = load_tokenizer(tmp_path)
    assert isinstance(tokenizer.detokenizer, BPEStreamingDetokenizer)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "x 1"}], add_generation_prompt=True)
    assert tokenizer.decode(ids) == "<|user|>x 1<|end|><|assistant|>"
    assert tokenizer.eos_token_ids == {tokenizer.convert_tokens_to_ids("<|end|>")}


def test_an_unknown_key_names_the_nearest(tmp_path):
    with pytest.raises(SettingsError, match=r"fit: unknown key 'stesp'; did you mean 'steps'\?"):
        from_dict(TargetSettings, {"config": {}, "samples": 1, "fit": {"stesp": 3}}, "here")
    with pytest.raises(SettingsError, match="here: fit missing"):
        from_dict(TargetSettings, {"config": {}, "samples": 1}, "here")
    with pytest.raises(SettingsError, match="samples must be of type int, got 'many'"):
        from_dict(TargetSettings, {"config": {}, "samples": "many", "fit": {"steps": 1}}, "here")
    (tmp_path / "broken.yaml").write_text("a: [1")
    with pytest.raises(SettingsError, match="not valid YAML"):
        load_settings(TargetSettings, tmp_path / "broken.yaml")


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[3] / "configs").glob("*.yaml")), ids=lambda p: p.stem)
def test_the_recipes_in_configs_are_valid(path):
    load_settings(SmallTargetSettings if path.stem.endswith("-target") else Recipe, path)


def test_a_key_that_is_there_twice_is_refused(tmp_path):
    (tmp_path / "twice.yaml").write_text("target: a\ndata:\n  folder: x\n  seed: 1\n  seed: 2\n")
    with pytest.raises(SettingsError, match=r"not valid YAML: the key 'seed' is there twice\s.*line 5"):
        load_settings(Recipe, tmp_path / "twice.yaml")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (SIZES | {"model_type": "llama"}, "model_type must be one of qwen3, gemma3_text, got 'llama'"),
        (SIZES | {"model_type": ["qwen3"]}, r"model_type must be one of .*, got \['qwen3'\]"),
        (CONFIGS["qwen3"] | {"hidden_sise": 8}, "config: unknown key 'hidden_sise'; did you mean 'hidden_size'"),
        (CONFIGS["gemma3_text"] | {"vocab_size": 8}, "config: unknown key 'vocab_size'"),
        ({"model_type": "qwen3", "hidden_size": 8}, "config: num_hidden_layers missing"),
    ],
)
def test_a_target_that_cannot_be_made_is_refused(config, message):
    with pytest.raises(SettingsError, match=message):
        TargetSettings(config, FitSettings(1), 1)


WORLD = {
    "tokenizer": {"samples": 200, "seed": 1, "vocab_size": 300},
    "heldout": {"samples": 4, "seed": 1, "max_tokens": 4},
}


def small_recipe(tmp_path: Path, **fit: int) -> Path:
    target = {"config": CONFIGS["gemma3_text"], "samples": 30, "fit": {"steps": 4, "log_every": 2, **fit}}
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(WORLD | {"folder": str(tmp_path / "run"), "target": target}))
    return path


def small_target(recipe: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dflash.training.toy.small_target", str(recipe)]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_small_target_is_trained_saved_and_not_trained_again(tmp_path):
    first = small_target(small_recipe(tmp_path))
    assert first.returncode == 0, first.stderr
    model = tmp_path / "run" / "target" / "model.safetensors"
    loaded, made = load_target(model.parent), model.stat().st_mtime_ns
    assert loaded.adapter.config.model_type == "gemma3_text"
    assert loaded.build_prompt("Hi")
    assert small_target(small_recipe(tmp_path)).returncode == 0
    assert model.stat().st_mtime_ns == made


def test_a_small_target_of_another_recipe_is_not_mixed_in(tmp_path):
    assert small_target(small_recipe(tmp_path)).returncode == 0
    other = small_target(small_recipe(tmp_path, steps=5))
    assert other.returncode == 1
    assert "belongs to a run with target.fit.steps 4, this one has 5" in other.stderr.splitlines()[-1]
    missing = small_target(tmp_path / "nope.yaml")
    assert (missing.returncode, missing.stderr.count("\n")) == (1, 1)
