"""Weights of a published drafter under z-lab's names, whatever packaging they come in, and the checks on them."""

import logging
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...core.errors import CheckpointError
from ...core.files import flat
from .quantized import PREFIXES, quantize_like
from .unsupported import explain_tensors

logger = logging.getLogger(__name__)

Weights = dict[str, mx.array]

_RENAMED = (
    (re.compile(r"^midlayer\."), "layers.0."),
    (re.compile(r"^encoder\.fc\."), "fc."),
    (re.compile(r"^(logit_head|logits_correction)\.(prefix_gru|embed_proj)\."), r"\2."),
    (re.compile(r"^logit_head\."), "markov_head."),
    (re.compile(r"^encoder\.output_norm_enc\."), "hidden_norm."),
    (re.compile(r"^(candidate_selector\.(predecessor|successor)_codebook)\.weight$"), r"\1"),
    (re.compile(r"^draft_id_to_target_id$"), "d2t"),
    (re.compile(r"^target_id_to_draft_id$"), "t2d"),
)
# Computed or borrowed from the target by every loader: rotary tables, embeddings, the target's last norm and head.
_BORROWED = re.compile(r"(.*\.)?rotary_emb\..*|embed_tokens\..*|verifier_(lm_head|norm)\..*")
HEAD = "lm_head."


def published_weights(weights: Weights, path: Path, own_tables: Collection[str] = ()) -> Weights:
    """``weights`` under z-lab's names, without those that a drafter computes or borrows from its target.

    Tables whose first name is in ``own_tables`` are kept, and so is a head: :func:`reduced_vocabulary` decides whether
    it is the drafter's own. Raises ``CheckpointError`` if two tensors get the same name.
    """
    named: Weights = {}
    origin: dict[str, str] = {}
    for stored, value in weights.items():
        name = PREFIXES.sub("", stored)
        for pattern, new in _RENAMED:
            name = pattern.sub(new, name)
        if name in named:
            raise CheckpointError(f"{path} holds {name} twice, as {origin[name]} and as {stored}.")
        named[name], origin[name] = value, stored
    dropped = [name for name in named if _BORROWED.fullmatch(name) and name.partition(".")[0] not in own_tables]
    if dropped:
        logger.debug("%s: not read, since they are computed or the target's: %s.", path, ", ".join(sorted(dropped)))
    return {name: value for name, value in named.items() if name not in dropped}


def reduced_vocabulary(
    weights: Weights, size: int | None, vocab_size: int, path: Path, own_tables: Collection[str] = ()
) -> mx.array | None:
    """Take the tables of a reduced vocabulary out of ``weights``; returns the target's ids ``[size]`` of its tokens.

    ``d2t [size]`` is the target's id minus the drafter's; ``t2d [vocab_size]`` marks the target's ids that are known.
    Without a reduced vocabulary (``size`` is ``None``) the result is ``None``, and a head, being a copy of the
    target's, is taken out too unless it is one of ``own_tables``. Raises ``CheckpointError`` if the tables are missing
    or do not fit ``size``.
    """
    d2t, t2d = weights.pop("d2t", None), weights.pop("t2d", None)
    if size is None:
        if d2t is not None and (d2t.size != vocab_size or mx.any(d2t != 0).item()):
            raise CheckpointError(f"{path} holds d2t, a reduced vocabulary; config.json lacks draft_vocab_size.")
        for name in [name for name in weights if name.startswith(HEAD) and "lm_head" not in own_tables]:
            weights.pop(name)
        return None
    if d2t is None and t2d is None:
        raise CheckpointError(f"{path} lacks d2t, the target's ids of its {size} tokens (draft_vocab_size).")
    ids = mx.arange(size) + d2t if d2t is not None and d2t.shape == (size,) else None
    if d2t is not None and (ids is None or not mx.issubdtype(d2t.dtype, mx.integer)):
        raise CheckpointError(f"{path}: d2t has shape {d2t.shape} and type {d2t.dtype}; expected {size} whole numbers.")
    known = None
    if t2d is not None:
        if t2d.shape != (vocab_size,):
            raise CheckpointError(f"{path}: t2d has shape {t2d.shape}, vocab_size is {vocab_size}.")
        known = mx.array([i for i, is_known in enumerate((t2d != 0).tolist()) if is_known], mx.int64)  # type: ignore
    if ids is None:
        ids = known
    assert ids is not None
    fits = ids.size == size and mx.all((ids >= 0) & (ids < vocab_size)).item() and _distinct(ids)
    if not fits or (known is not None and (known.size != size or mx.any(mx.sort(ids) != known).item())):
        raise CheckpointError(
            f"{path}: d2t and t2d must name {size} different ids below {vocab_size}, the same in both tables."
        )
    return ids.astype(mx.int32)


def _distinct(ids: mx.array) -> bool:
    return len(set(ids.tolist())) == ids.size  # type: ignore[arg-type]


def vocabulary_tables(ids: mx.array, vocab_size: int) -> Weights:
    """The tables ``d2t`` and ``t2d`` of the target's ``ids``: the inverse of :func:`reduced_vocabulary`."""
    known = mx.zeros(vocab_size, mx.bool_)
    known[ids] = True
    return {"d2t": ids.astype(mx.int64) - mx.arange(ids.size), "t2d": known}


def load_weights(model: nn.Module, weights: Weights, config: Mapping[str, Any], path: Path) -> None:
    """Put ``weights``, read from ``path``, into ``model``, its layers quantised as ``config`` describes.

    Raises ``CheckpointError`` as :func:`check_weights` and :func:`~.quantized.quantize_like`.
    """
    quantize_like(model, config, weights)
    check_weights(flat(model.parameters()), weights, path)
    model.load_weights(list(weights.items()))


def check_weights(expected: Weights, weights: Weights, path: Path) -> None:
    """Raise ``CheckpointError`` unless ``weights`` have the names, shapes and types of ``expected``, and are finite.

    Types are packed whole numbers or floating-point numbers; their widths may differ.
    """
    missing, extra = sorted(expected.keys() - weights.keys()), sorted(weights.keys() - expected.keys())
    if missing:
        left = f" It holds {_some(extra)}{explain_tensors(extra)}." if extra else ""
        raise CheckpointError(f"{path} lacks {_some(missing)}; the file does not match its config.json.{left}")
    if extra:
        raise CheckpointError(
            f"{path} holds {_some(extra)}{explain_tensors(extra)}, unknown to a DFlash drafter of its config.json."
        )
    for name, value in expected.items():
        stored = weights[name]
        if stored.shape != value.shape:
            raise CheckpointError(f"{path}: {name} has shape {stored.shape}, config.json asks for {value.shape}.")
        if _is_floating(stored) != _is_floating(value):
            kind = "floating-point numbers" if _is_floating(value) else "packed whole numbers"
            raise CheckpointError(f"{path}: {name} holds {_type(stored)}; expected {kind}.")
    bad = {name: mx.isfinite(weights[name]).all() for name in weights if _is_floating(weights[name])}
    mx.eval(bad)
    names = sorted(name for name, finite in bad.items() if not finite.item())
    if names:
        raise CheckpointError(f"{path}: {_some(names)} hold NaN or infinity; the checkpoint is damaged.")


def _is_floating(value: mx.array) -> bool:
    return mx.issubdtype(value.dtype, mx.floating)


def _type(value: mx.array) -> str:
    return str(value.dtype).removeprefix("mlx.core.")


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
