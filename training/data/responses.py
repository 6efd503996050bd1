"""Responses written by the target, many at a time.

A draft of a response saves decoding: one pass over it shows which prefix is the target's own greedy choice, and only
the rest is decoded.

Shapes: R rows of a batch, L length, S draft tokens, E hidden size.
"""

import copy
import hashlib
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import takewhile
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache

from dflash import LoadedTargetModel
from dflash.core.errors import DataError

from ..cpu import forward_hidden, model_to_write_with
from .chat import Row
from .plan import PrepareSettings, longest_sequence
from .sequences import Ints, Sequences, pad_batch, plan_batches

_SHORTEST_PREFIX = 8
"""The fewest common tokens (of a system prompt, say) that are worth a pass of their own."""

_PROMPTS_PER_PASS = 32
_ENDED_PART = 8
"""Rows leave a batch once one in this many has ended."""

_TRIAL_TOKENS = 8
_POSITIONS_PER_PASS = 512
"""Positions whose logits are computed at a time; a whole response's may not fit in memory."""


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


def tokens_per_second(target: LoadedTargetModel, batch: int) -> float:
    """The target's speed in writing ``batch`` responses at a time, measured briefly."""
    prompts = [[token] for token in range(batch)]
    begin = time.perf_counter()
    for _ in generate_responses(model_to_write_with(target), prompts, (), [_TRIAL_TOKENS] * batch, batch):
        pass
    return batch * _TRIAL_TOKENS / (time.perf_counter() - begin)


def _read_prefix(model: nn.Module, tokens: Sequence[int]) -> list[Any]:
    """A cache that contains ``tokens``."""
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array([list(tokens)]), cache=cache), [layer.state for layer in cache])
    return cache


def accepted_prefixes(
    target: LoadedTargetModel,
    prompts: Sequence[list[int]],
    drafts: Sequence[list[int]],
    batch_tokens: int = 2048,
) -> Iterator[tuple[int, list[int]]]:
    """The number of each draft with its longest prefix that the target would write greedily; no draft may be empty.

    The passes are of another shape than decoding's, so near ties can fall the other way.
    """
    if not drafts:
        return
    sequences = Sequences.from_lists(list(prompts), list(drafts))
    starts = sequences.starts
    for rows in plan_batches(sequences.lengths, batch_tokens, seed=0):
        tokens_RL, _ = pad_batch(sequences, rows, starts)
        hidden_RLE, _ = forward_hidden(target, mx.array(tokens_RL), ())
        for row, hidden_LE in zip(rows, hidden_RLE, strict=True):
            draft, begin = drafts[row], len(prompts[row]) - 1
            hidden_1SE = hidden_LE[None, begin : begin + len(draft)]
            parts = mx.split(hidden_1SE, range(_POSITIONS_PER_PASS, len(draft), _POSITIONS_PER_PASS), axis=1)
            greedy_S = np.concatenate([np.array(mx.argmax(target.head(part), axis=-1))[0] for part in parts])
            yield int(row), draft[: int(np.cumprod(greedy_S == draft).sum())]


def answer_rows(
    rows: Sequence[Row], target: LoadedTargetModel, settings: PrepareSettings, name: str
) -> Iterator[tuple[int, Ints, Ints]]:
    """Number, tokens ``[L]`` and loss mask ``[L]`` of every row, as soon as its response is complete.

    The target writes missing responses; random numbers depend on ``settings.seed`` and ``name`` only.
    """
    mx.random.seed(int.from_bytes(hashlib.sha256(f"{settings.seed} {name}".encode()).digest()[:8], "big"))
    unanswered = []
    for number, row in enumerate(rows):
        if row.loss_mask is None:
            unanswered.append(number)
        else:
            yield number, row.tokens, row.loss_mask
    for i, response in _write_responses([rows[number] for number in unanswered], target, settings):
        prompt = rows[unanswered[i]].tokens
        tokens = np.concatenate([prompt, np.asarray(response, np.int32)])
        yield unanswered[i], tokens, np.arange(len(tokens)) >= len(prompt)


def _write_responses(
    rows: Sequence[Row], target: LoadedTargetModel, settings: PrepareSettings
) -> Iterator[tuple[int, list[int]]]:
    """Number and response of every row; after a draft's accepted prefix only the rest is decoded."""
    longest, stops = longest_sequence(target, settings), target.stop_token_ids()
    prompts = [row.tokens.tolist() for row in rows]
    most = [min(settings.max_tokens, longest - len(prompt)) for prompt in prompts]
    drafts = {i: _through_stop(stops, row.draft[: most[i]]) for i, row in enumerate(rows) if row.draft is not None}
    begun: dict[int, list[int]] = {i: [] for i in range(len(rows))}
    numbers = list(drafts)
    for k, prefix in accepted_prefixes(target, [prompts[i] for i in numbers], list(drafts.values())):
        i = numbers[k]
        if len(prefix) == most[i] or (prefix and prefix[-1] in stops):
            del begun[i]
            yield i, prefix
        else:
            begun[i] = prefix
    if not begun:
        return
    unfinished = list(begun)
    texts = [prompts[i] + begun[i] for i in unfinished]
    continued = generate_responses(
        model_to_write_with(target),
        texts,
        stops,
        [most[i] - len(begun[i]) for i in unfinished],
        settings.batch_size,
        settings.decoding.build_sampler(),
        _shared_prefix(texts),
    )
    for k, rest in continued:
        yield unfinished[k], begun[unfinished[k]] + rest


def _shared_prefix(texts: Sequence[list[int]]) -> int:
    """The length of the prefix that all texts share, short of any last token; 0 if it is not worth a pass."""
    same = takewhile(lambda column: len(set(column)) == 1, zip(*texts, strict=False))
    length = min(sum(1 for _ in same), min(map(len, texts)) - 1)
    return length if length >= _SHORTEST_PREFIX and len(texts) > 1 else 0


def _through_stop(stops: Collection[int], tokens: Ints) -> list[int]:
    """Tokens up to and including the first stop token."""
    ends = np.flatnonzero(np.isin(tokens, list(stops)))
    return tokens[: ends[0] + 1 if len(ends) else None].tolist()


def require_batches(target: LoadedTargetModel) -> None:
    """Raise ``DataError`` unless mlx-lm can batch sequences of this target."""
    for i, cache in enumerate(make_prompt_cache(target.model)):
        if not hasattr(cache, "merge"):
            raise DataError(
                f"mlx-lm cannot write in batches with this target: layer {i} keeps a {type(cache).__name__}. "
                "Give conversations that already hold the target's responses."
            )
