"""The target's features of finished texts: read in one pass over each, held in memory, and kept beside the texts."""

from collections.abc import Sequence

import mlx.core as mx

from ..decoding.loop import PREFILL_STEP_SIZE
from ..target import LoadedTargetModel
from .texts import Text, Texts


class Features:
    """Features of texts, each read once while there is room.

    Args:
        kept: Keeps them on disk too, for other calls.
        most_bytes: What those that are held in memory may take.
    """

    def __init__(self, kept: Texts | None = None, most_bytes: int = 2**28):
        self._kept, self._left, self._held = kept, most_bytes, dict[tuple[tuple[int, ...], ...], mx.array]()

    def of(self, target: LoadedTargetModel, text: Text, layer_ids: Sequence[int]) -> mx.array:
        """``[1, S, F]`` of all tokens but the last. The target must be the same in each call."""
        tokens = text.tokens[:-1]
        if (found := self._held.get(key := (tuple(tokens), tuple(layer_ids)))) is not None:
            return found
        kept = self._kept if layer_ids else None
        if kept is None or (found := kept.features(tokens, layer_ids)) is None:
            found = read(target, tokens, layer_ids)
            if kept is not None:
                kept.keep_features(tokens, layer_ids, found)
        if found.nbytes <= self._left:
            self._held[key], self._left = found, self._left - found.nbytes
        return found


def read(target: LoadedTargetModel, tokens: list[int], layer_ids: Sequence[int]) -> mx.array:
    """Features ``[1, S, F]`` of a text, read in chunks as prompts are."""
    if not layer_ids:
        return mx.zeros((1, len(tokens), 0))
    tokens_1S, cache, parts = mx.array([tokens]), target.make_cache(), []
    for start in range(0, len(tokens), PREFILL_STEP_SIZE):
        _, features = target.forward_hidden(tokens_1S[:, start : start + PREFILL_STEP_SIZE], cache, layer_ids)
        ends = start + PREFILL_STEP_SIZE >= len(tokens)  # then nothing needs the layers after the last feature
        mx.eval(features, [] if ends else [layer.state for layer in cache])
        parts.append(features)
    return mx.concatenate(parts, axis=1)
