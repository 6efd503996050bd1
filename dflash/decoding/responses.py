"""Responses of the target alone, many at a time, by mlx-lm's batches."""

import copy
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache

from ..core.backend import machine_memory
from ..core.files import flat
from ..target.rewind import members

_PROMPTS_PER_PASS = 32
_ENDED_PART = 8
"""Rows leave a batch once one in this many has ended."""


def generate_responses(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    stops: Iterable[int],
    max_tokens: Sequence[int],
    batch: int = 64,
    sampler: Callable[[mx.array], mx.array] | None = None,
    shared_prefix: int = 0,
) -> Iterator[tuple[int, list[int]]]:
    """The number of each prompt with the target's response, as soon as it is complete.

    A response ends with its stop token, unless it was cut at its ``max_tokens``. Decoding is greedy without a
    ``sampler``. The same prompts in the same batches give the same responses, with a sampler if MLX's random state is
    the same. All prompts must begin with the same ``shared_prefix`` tokens, which are read only once.
    """
    stops = frozenset(stops)
    written: list[list[int]] = [[] for _ in prompts]
    cache = _read_prefix(model, prompts[0][:shared_prefix]) if shared_prefix else None
    waiting = deque(sorted(range(len(prompts)), key=lambda i: len(prompts[i])))  # a group is padded to its longest
    numbers: dict[int, int] = {}  # of the prompts that are being answered, by mlx-lm's own number of the row
    ended: list[int] = []
    generator = BatchGenerator(
        model, sampler=sampler, completion_batch_size=batch, prefill_batch_size=min(batch, _PROMPTS_PER_PASS)
    )
    try:
        while waiting or numbers:
            # Changing the rows copies all caches, so rows that have ended stay until there are enough of them.
            if len(ended) * _ENDED_PART >= len(numbers) + len(ended):
                generator.remove(ended)
                ended = []
                new = [waiting.popleft() for _ in range(min(batch - len(numbers), len(waiting)))]
                uids = generator.insert(
                    [list(prompts[i][shared_prefix:]) for i in new],
                    [sys.maxsize] * len(new),
                    None if cache is None else [copy.deepcopy(cache) for _ in new],
                )
                numbers |= zip(uids, new, strict=True)
            for response in generator.next_generated():
                if (number := numbers.get(response.uid)) is None:
                    continue
                text = written[number]
                text.append(int(response.token))
                if text[-1] in stops or len(text) == max_tokens[number]:
                    ended.append(response.uid)
                    del numbers[response.uid]
                    yield number, text
    finally:
        generator.close()


def _read_prefix(model: nn.Module, tokens: Sequence[int]) -> list[Any]:
    """A cache that contains ``tokens``."""
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array([list(tokens)]), cache=cache), [layer.state for layer in cache])
    return cache


def rows_that_fit(model: nn.Module, tokens: int) -> int:
    """How many texts of so many tokens have caches that take a quarter of the memory beside the weights; at least one.

    A batch that grows is copied, and prompts are read beside it.
    """
    caches, weights = make_prompt_cache(model), sum(weight.nbytes for weight in flat(model.parameters()).values())
    model(mx.zeros((1, 1), mx.int32), cache=caches)  # never computed: only the shapes count
    each = sum(_bytes(member, tokens) for cache in caches for member in members(cache))
    return max(1, (machine_memory() - weights) // 4 // max(each, 1))


def _bytes(cache: Any, tokens: int) -> int:
    """The bytes that a cache of one token will have after ``tokens``: keys and values grow by steps, states do not."""
    held = min(tokens, getattr(cache, "max_size", tokens))
    return cache.nbytes * (-(-held // cache.step) if hasattr(cache, "step") else 1)


def unbatched_layer(model: nn.Module) -> tuple[int, str] | None:
    """The first layer whose cache mlx-lm cannot batch, and the cache's class; ``None`` if it can batch all."""
    caches = enumerate(make_prompt_cache(model))
    return next(((i, type(cache).__name__) for i, cache in caches if not hasattr(cache, "merge")), None)
