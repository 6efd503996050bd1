"""Features cached on disk are those of the target: a run ends with the same weights, and bad caches are one line."""

import json
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from support.cli import invoke
from support.conversations import save_dataset
from support.runs import write_dataset, write_recipe, write_target

from dflash import LoadedTargetModel
from dflash.adapters.conformance import small_models as small
from dflash.core.errors import DataError
from dflash.core.files import write_json
from dflash.training import features as fc
from dflash.training.batches import Batches
from dflash.training.data import dataset as shards
from dflash.training.data.sequences import Sequences
from dflash.training.drafters.init import new_drafter
from dflash.training.drafters.loss import drafter_loss
from dflash.training.drafters.objectives import ObjectiveSettings
from dflash.training.loop.fit import FitSettings, fit
from dflash.training.recipe import DataSettings, DrafterShape

LAYERS = (0, 2)
SHAPE = DrafterShape(
    num_hidden_layers=1, block_size=4, target_layer_ids=LAYERS, mask_token=30, intermediate_size=24,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8,
)  # fmt: skip


def dataset(folder: Path, seed: int = 0, sizes: tuple[int, ...] = (5, 1, 6)) -> Sequences:
    """Shards of sequences of 10 to 39 tokens, one of 60 in the first; the middle shard offers no anchor."""
    rng, parts = np.random.default_rng(seed), []
    for number, size in enumerate(sizes):
        prompts = [rng.integers(1, 30, rng.integers(2, 9)).tolist() for _ in range(size)]
        answers = [rng.integers(1, 30, rng.integers(8, 31)).tolist() if size > 1 else [7] for _ in range(size)]
        if number == 0:
            answers[1] = [3] * (60 - len(prompts[1]))
        parts.append(Sequences.from_lists(prompts, answers))
    save_dataset(folder, parts, target=f"t{seed}")
    return Sequences.concatenate(parts)


def made(
    tmp_path: Path, name: str = "llama", with_hidden: bool = True, dtype=mx.float32, layers: tuple[int, ...] = LAYERS
) -> SimpleNamespace:
    """A dataset, a target, and the target's features in ``tmp_path / "features"``."""
    model = small.build(name)
    model.set_dtype(dtype)
    target = LoadedTargetModel(model)
    sequences = dataset(tmp_path / "data")
    data = DataSettings(tmp_path / "data", max_length=48, batch_tokens=96, anchors=3)
    it = SimpleNamespace(target=target, data=data, sequences=sequences, folder=tmp_path / "features")
    it.wanted = fc.describe(data, sequences, target, layers, with_hidden)
    it.write = lambda: fc.write_features(it.folder, data, sequences, target, it.wanted)
    it.write()
    it.batches = Batches(sequences, data, epochs=2)
    return it


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# --- the arrays -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"), [("llama", "mix"), ("qwen3_next", "cross_entropy"), ("gemma3_text", "cross_entropy")]
)
def test_a_run_ends_with_the_same_weights_with_and_without_the_cache(name, kind, tmp_path):
    objective = ObjectiveSettings(kind)
    with_hidden = objective.needs_target_logits
    it, results = made(tmp_path, name, with_hidden), []
    computed = fc.with_target_pass(it.batches, it.target, LAYERS, with_hidden)
    cached = fc.with_cached_features(it.batches, fc.CachedFeatures(it.folder, it.wanted))
    for number, batch in enumerate((computed, cached)):
        drafter = new_drafter(SHAPE, it.target)
        loss = partial(drafter_loss, objective=objective, head=it.target.head, dtype=mx.float32)
        fit(drafter, batch, loss, FitSettings(steps=2), tmp_path / str(number))
        results.append(dict(tree_flatten(drafter.parameters())))
    for key, weight in results[0].items():
        np.testing.assert_allclose(weight, results[1][key], rtol=1e-4, atol=2e-6, err_msg=key)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_cached_arrays_are_bit_for_bit_what_the_target_computed_in_its_dtype(dtype, tmp_path, monkeypatch):
    passes, real = [], fc.forward_hidden

    def recorded(target, tokens, *others):
        hidden, features = real(target, tokens, *others)
        passes.append((tokens, (features, hidden)))
        return hidden, features

    monkeypatch.setattr(fc, "forward_hidden", recorded)
    it = made(tmp_path, dtype=dtype)
    computed = {tuple(t.tolist()): [a[i] for a in p] for tokens, p in passes for i, t in enumerate(tokens)}
    cached = fc.CachedFeatures(it.folder, it.wanted)
    for number in it.batches.numbers.tolist():
        start, length = it.sequences.starts[number], it.sequences.lengths[number]
        tokens = it.sequences.tokens[start : start + length].tolist()
        arrays = next(arrays for row, arrays in computed.items() if list(row[:length]) == tokens)
        for found, expected in zip(cached.read(np.array([number])), arrays, strict=True):
            assert found.dtype == expected.dtype == dtype
            assert mx.array_equal(found[0], expected[: len(tokens)])


@pytest.mark.parametrize("layers", [(2,), (3, 0, 2)])
def test_a_cache_of_more_layers_in_any_order_and_more_arrays_holds_those_of_fewer_bit_for_bit(layers, tmp_path):
    more, exact = made(tmp_path / "more", layers=(2, 0, 3)), made(tmp_path / "exact", with_hidden=False, layers=layers)
    numbers = exact.batches.numbers[:4]
    wanted = exact.wanted | {"max_length": 30}
    arrays = [fc.CachedFeatures(it.folder, wanted).read(numbers) for it in (more, exact)]
    assert [array.shape[-1] for array in arrays[0]] == [len(layers) * 64]
    for found, expected in zip(*arrays, strict=True):
        assert mx.array_equal(found, expected)


def test_shorter_sequences_of_a_batch_are_followed_by_zeros(tmp_path):
    it = made(tmp_path)
    numbers = it.batches.numbers[:3]
    lengths = it.sequences.lengths[numbers]
    for array in fc.CachedFeatures(it.folder, it.wanted).read(numbers):
        assert array.shape[:2] == (3, lengths.max())
        for row, length in zip(array, lengths.tolist(), strict=True):
            assert mx.abs(row[:length]).min(axis=0).sum() > 0
            assert not row[length:].any()


def test_reading_a_batch_holds_that_batch_alone(tmp_path):
    header = {f"{i}.features": ("F32", (100, 64)) for i in range(50)}
    fc.stream_safetensors(tmp_path / "000000.safetensors", header, (mx.full((100, 64), i) * 1.0 for i in range(50)))
    wanted = {"max_length": 100, "layer_ids": [0], "arrays": {"features": {"width": 64, "dtype": "F32"}}}
    write_json(tmp_path / shards.MANIFEST, wanted | {"shards": [50]})
    cached, size = fc.CachedFeatures(tmp_path, wanted), 100 * 64 * 4
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for number in range(50):
        assert mx.array_equal(cached.read(np.array([number]))[0][0], mx.full((100, 64), number))
    assert mx.get_active_memory() - before < size
    assert mx.get_peak_memory() - before < 8 * size


# --- writing --------------------------------------------------------------------------------------------


def test_a_killed_run_goes_on_with_the_missing_files_to_the_same_bytes(tmp_path, monkeypatch):
    it = made(tmp_path)
    whole = files(it.folder)
    shutil.rmtree(it.folder)
    calls, real = [], fc.forward_hidden

    def killed(target, tokens, *others):
        if tokens.shape != (1, 1):  # that one finds out widths and dtypes
            calls.append(tokens)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return real(target, tokens, *others)

    monkeypatch.setattr(fc, "forward_hidden", killed)
    with pytest.raises(KeyboardInterrupt):
        it.write()
    there = set(files(it.folder))
    assert {"manifest.json", "000000.safetensors"} <= there < set(whole)
    with pytest.raises(DataError, match="not finished"):
        fc.CachedFeatures(it.folder, it.wanted)
    (it.folder / ".000002-12345678.safetensors").write_bytes(b"half")  # by a kill that no one catches
    done = (it.folder / "000000.safetensors").stat().st_mtime_ns
    it.write()
    assert files(it.folder) == whole
    assert (it.folder / "000000.safetensors").stat().st_mtime_ns == done
    calls.clear()
    it.write()
    assert not calls


def test_a_folder_of_more_layers_is_finished_as_it_was_begun_and_then_left_alone(tmp_path, monkeypatch):
    it = made(tmp_path, layers=(0, 2, 3))
    whole, fewer = files(it.folder), fc.describe(it.data, it.sequences, it.target, (3,), False)
    (it.folder / "000002.safetensors").unlink()
    fc.write_features(it.folder, it.data, it.sequences, it.target, fewer)
    assert files(it.folder) == whole
    monkeypatch.setattr(fc, "forward_hidden", None)
    fc.write_features(it.folder, it.data, it.sequences, it.target, fewer)
    assert files(it.folder) == whole


def test_the_size_is_stated_before_it_starts_and_a_disk_without_room_is_refused(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    it = made(tmp_path)
    tokens = int(it.batches.sequences.lengths.sum())
    stated = tokens * (2 * 64 + 64) * 4
    data = [a.nbytes for path in it.folder.glob("*.safetensors") for a in mx.load(str(path)).values()]
    assert sum(data) == stated
    assert f"{tokens} tokens x 128 F32 features and 64 F32 hidden = {stated / 1e9:.3f} GB" in caplog.text
    shutil.rmtree(it.folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=stated - 1))
    with pytest.raises(DataError, match=r"need .* GB more in .* Free that much"):
        it.write()
    assert not files(it.folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=stated))
    it.write()


def test_hidden_states_that_are_no_numbers_are_not_cached(tmp_path):
    it = made(tmp_path)
    shutil.rmtree(it.folder)
    weight = it.target.model.model.layers[1].mlp.down_proj.weight
    it.target.model.model.layers[1].mlp.down_proj.weight = weight * float("nan")
    with pytest.raises(DataError, match="hidden states are not finite numbers"):
        it.write()
    assert not list(it.folder.glob("*.safetensors"))


# --- what does not fit ----------------------------------------------------------------------------------


def test_a_cache_of_something_else_is_refused_for_reading_and_writing(tmp_path):
    it = made(tmp_path, with_hidden=False)
    others = {
        "layer_ids": fc.describe(it.data, it.sequences, it.target, (2, 3), False),
        "arrays": fc.describe(it.data, it.sequences, it.target, LAYERS, True),
        "max_length": it.wanted | {"max_length": 49},
        "dataset": it.wanted | {"dataset": shards.dataset_fingerprint(dataset(tmp_path / "other", seed=1))},
        "target": it.wanted | {"target": "another"},
    }
    before = files(it.folder)
    for key, wanted in others.items():
        with pytest.raises(DataError, match=f"^[^\n]*have {key} [^\n]* this recipe needs[^\n]*$"):
            fc.CachedFeatures(it.folder, wanted)
        with pytest.raises(DataError, match=f"have {key} "):
            fc.write_features(it.folder, it.data, it.sequences, it.target, wanted)
    assert files(it.folder) == before
    for folder, message in (("data", "have format 'dflash-dataset'"), ("data/shards", "to an empty folder")):
        with pytest.raises(DataError, match=message):
            fc.write_features(tmp_path / folder, it.data, it.sequences, it.target, it.wanted)


def test_a_damaged_or_missing_cache_is_one_line(tmp_path):
    it = made(tmp_path)
    path = it.folder / "000000.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match=r"damaged.*run 'dflash cache-features' again") as error:
        fc.CachedFeatures(it.folder, it.wanted).read(it.batches.numbers[:1])
    assert "\n" not in str(error.value)
    with pytest.raises(DataError, match="Run 'dflash cache-features' with this recipe first"):
        fc.CachedFeatures(tmp_path / "nothing", it.wanted)
    (it.folder / shards.MANIFEST).write_text("{")
    with pytest.raises(DataError, match="not valid JSON"):
        fc.CachedFeatures(it.folder, it.wanted)


# --- the commands ---------------------------------------------------------------------------------------


def test_the_command_makes_features_that_train_reads_without_running_the_target(tmp_path, monkeypatch):
    write_dataset(tmp_path / "data", write_target(tmp_path / "target"))
    recipe = write_recipe(tmp_path, steps=2, evaluate_every=100, evaluate_prompts=1)
    cached = ["--set", f"data.cached_features={tmp_path / 'features'}"]
    answer = invoke("cache-features", recipe)
    assert (answer.exit_code, answer.stderr.count("\n")) == (1, 1)
    assert "set data.cached_features to a folder" in answer.stderr
    answer = invoke("train", recipe, *cached)
    assert answer.exit_code == 1
    assert "Run 'dflash cache-features' with this recipe first" in answer.stderr.splitlines()[-1]

    assert invoke("train", recipe).exit_code == 0
    expected = mx.load(str(tmp_path / "run" / "drafter" / "model.safetensors"))
    answer = invoke("cache-features", recipe, *cached)
    assert answer.exit_code == 0, answer.stderr
    assert answer.stdout.strip() == str(tmp_path / "features")
    monkeypatch.setattr("dflash.training.train.with_target_pass", None)
    answer = invoke("train", recipe, *cached, "--set", f"run.folder={tmp_path / 'again'}")
    assert answer.exit_code == 0, answer.stderr
    for key, weight in mx.load(str(tmp_path / "again" / "drafter" / "model.safetensors")).items():
        assert mx.allclose(weight, expected[key], rtol=1e-2, atol=1e-4), key  # exported in bfloat16
    again = json.loads((tmp_path / "again" / "recipe.json").read_text())
    assert again["recipe"]["data"]["cached_features"] == str(tmp_path / "features")
