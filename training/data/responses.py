"""Responses that a target writes itself, many at a time.

Knows mlx-lm's batched generation and token ids. Must not know files, or what the requests are about.

Whoever can guess a response saves its decoding: one pass over a guess shows how far each of its tokens is the
target's own greedy choice, and only what follows the first other choice is decoded.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import BatchGenerator

from dflash import LoadedTargetModel

from .sequences import Sequences, pad_batch, plan_batches

_PIECE = 512
"""Positions whose logits are computed at a time."""


def generate_responses(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    stops: Iterable[int],
    max_tokens: Sequence[int],
    batch: int = 64,
    sampler: Callable[[mx.array], mx.array] | None = None,
    finished: Callable[[], object] = lambda: None,
) -> list[list[int]]:
    """The target's response to each prompt, with the stop token unless it was cut at its ``max_tokens``.

    Greedy without a ``sampler``. ``finished`` is called whenever one is complete. The same prompts in the same
    batches give the same responses; with a sampler that draws from MLX's random state, from the same seed.
    """
    generator = BatchGenerator(
        model,
        stop_tokens=[[stop] for stop in sorted(stops)],
        sampler=sampler,
        completion_batch_size=batch,
        prefill_batch_size=min(batch, 32),
    )
    uids = generator.insert([list(prompt) for prompt in prompts], list(max_tokens))
    numbers = {uid: i for i, uid in enumerate(uids)}
    written: list[list[int]] = [[] for _ in prompts]
    while responses := generator.next_generated():
        for response in responses:
            written[numbers[response.uid]].append(int(response.token))
            if response.finish_reason is not None:
                finished()
    generator.close()
    return written


def accepted_prefixes(
    target: LoadedTargetModel,
    prompts: Sequence[list[int]],
    guesses: Sequence[list[int]],
    batch_tokens: int = 2048,
) -> Iterator[tuple[int, list[int]]]:
    """Number and beginning of each guess, as far as it is the target's own greedy response; no guess may be empty.

    Computed in passes of another shape than decoding's, so that a near tie may fall the other way.
    """
    if not guesses:
        return
    together = Sequences.from_lists(list(prompts), list(guesses))
    starts = together.starts
    for rows in plan_batches(together.lengths, batch_tokens, seed=0):
        tokens, _ = pad_batch(together, rows, starts)
        hidden_NSE, _ = target.forward_hidden(mx.array(tokens), None, ())
        for row, hidden_SE in zip(rows, hidden_NSE, strict=True):
            guess, begin = guesses[row], len(prompts[row]) - 1
            pieces = mx.split(hidden_SE[None, begin : begin + len(guess)], range(_PIECE, len(guess), _PIECE), axis=1)
            chosen = np.concatenate([np.array(mx.argmax(target.head(piece), axis=-1)) for piece in pieces], axis=1)
            yield int(row), guess[: int(np.cumprod(chosen[0] == guess).sum())]
