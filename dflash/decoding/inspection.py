"""What a trace records of a block's logits: the few likeliest tokens, and the probability of each draft.

Shapes: N drafts, L = N + 1 rows of a pass, V vocabulary, K likeliest tokens.
"""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from ..core.backend import on_cpu
from ..drafters.protocol import Proposal
from .block import Block

TOP = 4
"""How many of the likeliest tokens are recorded for each position."""


def inspect(proposal: Proposal, logits_LV: mx.array) -> dict[str, mx.array]:
    """What a trace needs of a block, as lazy arrays that are computed with it (:attr:`Decoding.inspect`).

    On a CPU these are the logits themselves, because numpy finds the likeliest tokens much faster than MLX does. On
    other devices the search stays on the device, and only a few numbers per position leave it.
    """
    arrays = {"drafts": proposal.tokens[0]}
    if proposal.confidence is not None:
        arrays["confidence"] = proposal.confidence[0].astype(mx.float32)
    if proposal.parents is not None:
        arrays["parents"] = mx.array(proposal.parents)
    scores = proposal.logits if proposal.log_q is None else proposal.log_q
    if scores is not None and proposal.tokens.size:
        arrays["draft_scores"] = scores[0].astype(mx.float32)
        if proposal.candidates is not None:
            arrays["candidates"] = proposal.candidates[0]
    arrays["target_scores"] = logits_LV.astype(mx.float32)
    if on_cpu():
        return arrays
    for name in ("draft", "target"):
        if f"{name}_scores" in arrays:
            places = _places(mx, arrays, name)
            own, top_NK, probabilities_NK = _likeliest(arrays.pop(f"{name}_scores"), *places)
            arrays |= {f"{name}_own": own, f"{name}_top": top_NK, f"{name}_probabilities": probabilities_NK}
    return arrays


def _places(xp: Any, arrays: Mapping[str, Any], name: str) -> tuple[Any, Any]:
    """Row and column of each draft in the scores of drafter or target; ``xp`` is the module of ``arrays``."""
    drafts_N, scores_NV = arrays["drafts"], arrays[f"{name}_scores"]
    if name == "draft" and "candidates" in arrays:
        return xp.arange(len(drafts_N)), xp.argmax(arrays["candidates"] == drafts_N[:, None], axis=-1)
    checked = len(drafts_N) if name == "draft" else len(scores_NV) - 1
    tree = name == "target" and "parents" in arrays
    rows = arrays["parents"][:checked] + 1 if tree else xp.arange(checked)
    # The decode loop checks ids only once they are known; unsigned, a negative one is large.
    return rows, xp.minimum(drafts_N[:checked].astype(xp.uint32), scores_NV.shape[-1] - 1)


def _likeliest(scores_NV: mx.array, rows: mx.array, columns: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """The probabilities at ``rows`` and ``columns``, and each row's likeliest tokens with their probabilities."""
    log_total_N1 = mx.logsumexp(scores_NV, axis=-1, keepdims=True)
    own = mx.exp(scores_NV[rows, columns] - log_total_N1[rows, 0])
    everywhere_V, top, values, rest_NV = mx.arange(scores_NV.shape[-1]), [], [], scores_NV
    for _ in range(min(TOP, scores_NV.shape[-1])):
        best_N1 = mx.argmax(rest_NV, axis=-1, keepdims=True)
        top.append(best_N1)
        values.append(mx.take_along_axis(rest_NV, best_N1, axis=-1))
        rest_NV = mx.where(everywhere_V == best_N1, -mx.inf, rest_NV)
    return own, mx.concatenate(top, axis=-1), mx.exp(mx.concatenate(values, axis=-1) - log_total_N1)


def _likeliest_on_host(scores_NV: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> tuple[np.ndarray, ...]:
    """As :func:`_likeliest`, with numpy. Overwrites ``scores_NV``, because each pass over new memory costs time."""
    every_N, count, own = np.arange(len(scores_NV)), min(TOP, scores_NV.shape[-1]), scores_NV[rows, columns]
    top_NK, values_NK = np.empty((len(scores_NV), count), np.int64), np.empty((len(scores_NV), count), np.float32)
    for k in range(count):
        top_NK[:, k] = best_N = scores_NV.argmax(axis=-1)
        values_NK[:, k] = scores_NV[every_N, best_N]
        scores_NV[every_N, best_N] = -np.inf
    highest_N1 = values_NK[:, :1]
    scores_NV -= highest_N1
    likeliest_NK = np.exp(values_NK - highest_N1)
    total_N = np.exp(scores_NV, out=scores_NV).sum(axis=-1) + likeliest_NK.sum(axis=-1)
    return np.exp(own - highest_N1[rows, 0]) / total_N[rows], top_NK, likeliest_NK / total_N[:, None]


def inspected_record(block: Block) -> dict[str, Any]:
    """The part of a block's record that :func:`inspect` prepared, with the drafts in the order of ``block.order``."""
    arrays = {name: np.array(array) for name, array in (block.inspected or {}).items()}
    checked = block.order[: len(block.drafted)]
    record: dict[str, Any] = {"drafts": arrays["drafts"][block.order].tolist()}
    target_rows = [*range(len(checked) + 1)]
    if "parents" in arrays:  # the rows at which drafts were checked, then that of the last accepted one
        new = {-1: -1} | {old: new for new, old in enumerate(block.order)}
        record["parents"] = [new[parent] for parent in arrays["parents"][block.order].tolist()]
        last = block.order[block.accepted - 1] + 1 if block.accepted else 0
        target_rows = [*(arrays["parents"][checked] + 1).tolist(), last]
    if "confidence" in arrays:
        record["confidence"] = _rounded(arrays["confidence"][block.order])
    for name, owns, rows in (("draft", block.order, block.order), ("target", checked, target_rows)):
        if f"{name}_scores" in arrays:
            places = _places(np, arrays, name)
            own, top_NK, probabilities_NK = _likeliest_on_host(arrays[f"{name}_scores"], *places)
        elif f"{name}_top" in arrays:
            own, top_NK, probabilities_NK = (arrays[f"{name}_{key}"] for key in ("own", "top", "probabilities"))
        else:
            continue
        if name == "draft" and "candidates" in arrays:
            own = own * (arrays["candidates"] == arrays["drafts"][:, None]).any(axis=-1)
            top_NK = np.take_along_axis(arrays["candidates"], top_NK, axis=-1)
        record[f"{name}_probability"] = _rounded(own[owns])
        record[f"{name}_top"] = {"tokens": top_NK[rows].tolist(), "probabilities": _rounded(probabilities_NK[rows])}
    return record


def _rounded(probabilities: np.ndarray) -> Any:
    return np.round(probabilities.astype(np.float64), 5).tolist()
