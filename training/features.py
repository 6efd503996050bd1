"""A cache on disk of the frozen target's features for a dataset: computed once, read in every epoch.

    manifest.json         what is cached, written before the first file
    000000.safetensors    one file per shard of the dataset, complete or absent: `{number}.features [L, F]` of every
                          sequence that can be trained on and, for KL, `{number}.hidden [L, E]`

Neither writing nor reading ever holds more than one batch. A sequence's features are concatenated by layer, each
``[L, E]``, so a cache serves every recipe whose layers are among the cached ones.

Shapes: N sequences, S longest of them, L length of one, F feature size, E hidden size.
"""

import json
import logging
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np

from dflash import LoadedTargetModel
from dflash.core.errors import CheckpointError, DataError, one_line
from dflash.core.files import atomic_write, read_json, remove_unfinished, write_json
from dflash.core.progress import progress

from .batches import Batches, Blocks, trainable
from .cpu import forward_hidden
from .data.dataset import MANIFEST, dataset_fingerprint, read_manifest, shard_sizes
from .data.sequences import Ints, Sequences, pad_batch, plan_batches
from .drafters.loss import Batch
from .recipe import DataSettings

logger = logging.getLogger(__name__)

FORMAT, VERSION = "dflash-features", 1

_DTYPES = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}
"""By their names in the safetensors format."""


def describe(
    data: DataSettings, sequences: Sequences, target: LoadedTargetModel, layer_ids: Sequence[int], with_hidden: bool
) -> dict[str, Any]:
    """What a cache must hold to serve this dataset, opened for this target, and these layers."""
    hidden, features = target.forward_hidden(mx.zeros((1, 1), mx.int32), None, layer_ids)  # never computed
    arrays = {"features": features, "hidden": hidden} if with_hidden else {"features": features}
    names = {dtype: name for name, dtype in _DTYPES.items()}
    return {
        "format": FORMAT,
        "version": VERSION,
        "dataset": dataset_fingerprint(sequences),
        "target": read_manifest(data.folder)["target"],
        "layer_ids": list(layer_ids),
        "max_length": data.max_length,
        "arrays": {name: {"width": a.shape[-1], "dtype": names[a.dtype]} for name, a in arrays.items()},
    }


# --- writing ------------------------------------------------------------------------------------------------


def write_features(
    folder: Path, data: DataSettings, sequences: Sequences, target: LoadedTargetModel, wanted: dict[str, Any]
) -> None:
    """Write the features that ``wanted`` (of :func:`describe`) describes to ``folder``, or the files that are missing.

    If the folder was started with more (further layers, hidden states, longer sequences), it is finished that way.
    The size is logged first. Raises ``DataError`` if ``folder`` holds other features or the disk lacks room, and
    ``OSError`` if it cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    manifest = _begun(folder, data, wanted)
    kept, numbers = trainable(sequences, manifest["max_length"])
    missing = _missing(folder, manifest, numbers)
    for path in (folder / MANIFEST, *(path for path, _ in missing)):
        remove_unfinished(path)

    arrays, tokens = manifest["arrays"], int(sum(kept.lengths[rows].sum() for _, rows in missing))
    _require_room(folder, int(kept.lengths.sum()), tokens, arrays)
    write_json(folder / MANIFEST, manifest)
    begin = time.perf_counter()
    plans = [[rows[b] for b in plan_batches(kept.lengths[rows], data.batch_tokens, seed=0)] for _, rows in missing]
    batches = progress(chain.from_iterable(plans), f"features in {folder.name}", sum(map(len, plans)))
    for (path, _), plan in zip(missing, plans, strict=True):
        header = {
            f"{numbers[row]}.{name}": (array["dtype"], (int(kept.lengths[row]), array["width"]))
            for batch in plan
            for row in batch
            for name, array in arrays.items()
        }
        stream_safetensors(path, header, _computed(target, kept, islice(batches, len(plan)), manifest))
    if tokens:
        rate = tokens / (time.perf_counter() - begin)
        speed = rate * _bytes_per_token(arrays) / 1e6
        logger.info("%.0f tokens/s: training gains where the disk reads more than %.0f MB/s.", rate, speed)


def _begun(folder: Path, data: DataSettings, wanted: dict[str, Any]) -> dict[str, Any]:
    """The manifest of ``folder``, or a new one for ``wanted``."""
    if (folder / MANIFEST).exists():
        return _read_manifest(folder, wanted)
    if any(folder.glob("*.safetensors")):
        raise DataError(f"{folder} holds files but no {MANIFEST}. Set data.cached_features to an empty folder.")
    return wanted | {"shards": shard_sizes(data.folder, "train")}


def _missing(folder: Path, manifest: dict[str, Any], numbers: Ints) -> list[tuple[Path, Ints]]:
    """The missing files with the rows of each; ``numbers [N]`` are the rows' positions in the dataset."""
    ends = np.searchsorted(numbers, np.cumsum([0, *manifest["shards"]]))
    files = ((_path(folder, i), rows) for i, rows in enumerate(map(np.arange, ends[:-1], ends[1:])))
    return [(path, rows) for path, rows in files if not path.exists()]


def _computed(
    target: LoadedTargetModel, sequences: Sequences, plan: Iterable[Ints], manifest: dict[str, Any]
) -> Iterator[mx.array]:
    """The target's arrays for each sequence of ``plan`` in order, each ``[L, ..]``."""
    starts = sequences.starts
    for rows in plan:
        tokens_NS = mx.array(pad_batch(sequences, rows, starts)[0])
        hidden, features = forward_hidden(target, tokens_NS, manifest["layer_ids"])
        arrays = [features, hidden] if "hidden" in manifest["arrays"] else [features]
        finite = mx.stack([mx.isfinite(array).all() for array in arrays]).all()
        mx.eval(arrays, finite)
        if not finite.item():
            raise DataError(
                "The target's hidden states are not finite numbers, so no drafter can learn from them. Its weights are "
                "damaged, or overflow its dtype."
            )
        for i, length in enumerate(sequences.lengths[rows].tolist()):
            yield from (array[i, :length] for array in arrays)


def _require_room(folder: Path, tokens: int, missing: int, arrays: dict[str, Any]) -> None:
    """Log the size, and raise ``DataError`` if the disk lacks room for the ``missing`` tokens."""
    each, free = _bytes_per_token(arrays), shutil.disk_usage(folder).free
    values = " and ".join(f"{array['width']} {array['dtype']} {name}" for name, array in arrays.items())
    logger.info(
        "%d tokens x %s = %.3f GB in %s, %.3f GB of it to be written; %.3f GB are free.",
        *(tokens, values, tokens * each / 1e9, folder, missing * each / 1e9, free / 1e9),
    )
    if missing * each > free:
        raise DataError(
            f"The features need {missing * each / 1e9:.3f} GB more in {folder}, where {free / 1e9:.3f} GB are free. "
            "Free that much, set data.cached_features to another disk, or train without it."
        )


def _bytes_per_token(arrays: dict[str, Any]) -> int:
    return sum(array["width"] * _DTYPES[array["dtype"]].size for array in arrays.values())


def stream_safetensors(path: Path, header: dict[str, tuple[str, tuple[int, int]]], arrays: Iterable[mx.array]) -> None:
    """Write ``arrays`` one at a time, atomically; ``header`` has their names, dtypes and shapes.

    https://github.com/huggingface/safetensors#format
    """
    entries, end = {}, 0
    for name, (dtype, shape) in header.items():
        start, end = end, end + shape[0] * shape[1] * _DTYPES[dtype].size
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)

    def write(file: Path) -> None:
        with file.open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for array in arrays:
                out.write(np.array(array.view(mx.uint8)).tobytes())

    atomic_write(path, write)


# --- reading ------------------------------------------------------------------------------------------------


def require_features(folder: Path) -> None:
    """Raise ``DataError`` if ``folder`` holds no cache, finished or not."""
    if not (folder / MANIFEST).exists():
        raise DataError(f"{folder} holds no features. Run 'dflash cache-features' with this recipe first.")


class CachedFeatures:
    """The finished cache in ``folder``, limited to the arrays and layers of ``wanted`` (of :func:`describe`).

    Raises ``DataError`` if it holds other features, is unfinished or does not exist.
    """

    def __init__(self, folder: Path, wanted: dict[str, Any]):
        require_features(folder)
        manifest = _read_manifest(folder, wanted)
        self.folder, self.names = folder, list(wanted["arrays"])
        self._cached, self._wanted = manifest["layer_ids"], wanted["layer_ids"]
        self._ends = np.cumsum(manifest["shards"])
        if not all(_path(folder, i).exists() for i in range(len(self._ends))):
            raise DataError(f"The features in {folder} are not finished. Run 'dflash cache-features' again.")

    def read(self, numbers: Ints) -> list[mx.array]:
        """Each array ``[N, S, ..]`` of the sequences ``numbers``, with zeros after the shorter ones.

        Files are opened again for every batch, because an open file keeps every array that was read from it.
        Raises ``DataError`` for a damaged file.
        """
        shards = np.searchsorted(self._ends, numbers, side="right").tolist()
        try:
            files = {i: cast("dict[str, mx.array]", mx.load(str(_path(self.folder, i)))) for i in set(shards)}
            batch = []
            for name in self.names:
                rows = [files[i][f"{number}.{name}"] for i, number in zip(shards, numbers, strict=True)]
                if name == "features" and self._wanted != self._cached:
                    rows = list(map(self._select, rows))
                longest = max(len(row) for row in rows)
                batch.append(mx.stack([mx.pad(row, [(0, longest - len(row)), (0, 0)]) for row in rows]))
            mx.eval(batch)
        except (RuntimeError, KeyError) as error:
            reason = one_line(error, 200)
            raise DataError(
                f"A file of features in {self.folder} is damaged: {reason}. "
                "Remove it and run 'dflash cache-features' again."
            ) from error
        return batch

    def _select(self, features_LF: mx.array) -> mx.array:
        """The columns of the wanted layers, in their order."""
        layers = dict(zip(self._cached, mx.split(features_LF, len(self._cached), axis=-1), strict=True))
        return mx.concatenate([layers[i] for i in self._wanted], axis=-1)


def with_cached_features(batches: Batches, cached: CachedFeatures) -> Callable[[int], Batch]:
    """``batches`` with the cached features and, if wanted, final hidden states of their sequences."""

    def batch(number: int) -> Batch:
        features, *hidden = cached.read(batches.members(number))
        return Batch(*batches(number), features, hidden[0] if hidden else None)

    return batch


# --- without a cache ----------------------------------------------------------------------------------------


def with_target_pass(
    batches: Callable[[int], Blocks], target: LoadedTargetModel, layer_ids: Sequence[int], with_hidden: bool
) -> Callable[[int], Batch]:
    """``batches`` with the features from a pass of the frozen target and, if asked for, its final hidden states.

    The pass runs in the calling thread, before the gradient is taken: few of mlx-lm's models can run in several
    threads.
    """

    def batch(number: int) -> Batch:
        tokens, loss_mask, anchors = batches(number)
        hidden, features = forward_hidden(target, tokens, layer_ids)
        made = Batch(tokens, loss_mask, anchors, features, hidden if with_hidden else None)
        mx.eval(made)
        return made

    return batch


# --- both ---------------------------------------------------------------------------------------------------


def _path(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}.safetensors"


def _read_manifest(folder: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """The manifest of a cache that holds what is ``wanted``, and perhaps more, with layers in any order."""
    try:
        there = read_json(folder / MANIFEST)
    except CheckpointError as error:
        raise DataError(str(error)) from error
    found = there | {
        "max_length": min(there.get("max_length", 0), wanted["max_length"]),
        "arrays": {name: array for name, array in there.get("arrays", {}).items() if name in wanted["arrays"]},
    }
    layer_ids, cached = wanted["layer_ids"], there.get("layer_ids", [])
    expected = wanted
    if set(layer_ids) <= set(cached):
        features = wanted["arrays"]["features"]
        wider = features | {"width": features["width"] // len(layer_ids) * len(cached)}
        expected = wanted | {"layer_ids": cached, "arrays": wanted["arrays"] | {"features": wider}}
    for key, value in expected.items():
        if found.get(key) != value:
            raise DataError(
                f"The features in {folder} have {key} {there.get(key)!r}, this recipe needs {wanted[key]!r}. "
                "Set data.cached_features to another folder, or remove that one."
            )
    return there
