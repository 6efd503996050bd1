"""Where two answers part, and how close the target's choice was there."""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from ..target import LoadedTargetModel


@dataclass(frozen=True)
class Difference:
    """Where two answers part: tokens at ``position`` (``None`` past an end), and how close the choice was.

    ``margin`` is the target's top logit less that of the other token, from a fresh forward pass over the
    common prefix; ``None`` if one answer merely ends.
    """

    position: int
    plain: int | None
    dflash: int | None
    margin: float | None = None


def first_difference(plain: Sequence[int], dflash: Sequence[int]) -> Difference | None:
    """The first position at which two token lists differ, their ends included; ``None`` if they do not."""
    if list(plain) == list(dflash):
        return None
    shorter = min(len(plain), len(dflash))
    position = next((i for i in range(shorter) if plain[i] != dflash[i]), shorter)
    return Difference(position, *(t[position] if position < len(t) else None for t in (plain, dflash)))


def find_difference(
    target: LoadedTargetModel, prompt: list[int], plain: Sequence[list[int]], dflash: Sequence[list[int]]
) -> Difference | None:
    """The first difference between answers to ``prompt`` that belong together, with its margin."""
    for p, d in zip(plain, dflash, strict=True):
        found = first_difference(p, d)
        if found is not None:
            margin = logit_margin(target, prompt + p[: found.position], found.plain, found.dflash)
            return Difference(found.position, found.plain, found.dflash, margin)
    return None


def logit_margin(target: LoadedTargetModel, prefix: list[int], a: int | None, b: int | None) -> float | None:
    """The top logit after ``prefix`` less that of the less likely of tokens ``a`` and ``b``."""
    if a is None or b is None:
        return None
    hidden, _ = target.forward_hidden(mx.array([prefix]), target.make_cache(), ())
    logits_V = target.head(hidden[:, -1:])[0, 0].astype(mx.float32)
    return float((logits_V.max() - mx.minimum(logits_V[a], logits_V[b])).item())  # type: ignore[arg-type]
