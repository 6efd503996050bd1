"""First-mismatch verification: which drafted tokens the target itself would have written.

Pure functions on arrays. Must not know models, caches or text.
"""

from collections.abc import Callable, Sequence

import mlx.core as mx
from mlx_lm.sample_utils import greedy_sampler

Sampler = Callable[[mx.array], mx.array]
"""Log-probabilities ``[N, V]`` to tokens ``[N]``, as made by ``mlx_lm.sample_utils.make_sampler``."""


def sample_target(logits_LV: mx.array, sampler: Sampler) -> mx.array:
    """The target's own choice at each position, ``[L]``: what plain ``mlx_lm`` decoding would take there."""
    # Normalising costs a pass over the vocabulary and moves no maximum, but in half precision it can round
    # two logits to a tie, which plain decoding breaks by index.
    if sampler is greedy_sampler and logits_LV.dtype == mx.float32:
        return mx.argmax(logits_LV, axis=-1)
    return sampler(logits_LV - mx.logsumexp(logits_LV, axis=-1, keepdims=True))


def accepted_length(drafted: Sequence[int], target_tokens: Sequence[int]) -> int:
    """Number of leading drafts equal to the target's choices; ``target_tokens`` has one entry more.

    Every committed token is the target's choice, so the output is distributed exactly as the sampler's,
    for any sampler (design of speculative decoding by first mismatch).
    """
    n = 0
    while n < len(drafted) and drafted[n] == target_tokens[n]:
        n += 1
    return n
