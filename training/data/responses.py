"""Responses written by the target, many at a time.

A draft of a response saves decoding: one pass over it shows which prefix is the target's own greedy choice, and only
the rest is decoded.

Shapes: R rows of a batch, L length, S draft tokens, E hidden size.
"""

import hashlib
import time
from collections.abc import Collection, Iterator, Sequence
from itertools import takewhile

import mlx.core as mx
import numpy as np

from dflash import LoadedTargetModel
from dflash.core.errors import DataError
from dflash.decoding.responses import generate_responses, unbatched_layer

from ..cpu import forward_hidden, model_to_write_with
from .chat import Row
from .plan import PrepareSettings, longest_sequence
from .sequences import Ints, Sequences, pad_batch, plan_batches

_SHORTEST_PREFIX = 8
"""The fewest common tokens (of a system prompt, say) that are worth a pass of their own."""

_TRIAL_TOKENS = 8
_POSITIONS_PER_PASS = 512
"""Positions whose logits are computed at a time; a whole response's may not fit in memory."""


def tokens_per_second(target: LoadedTargetModel, batch: int) -> float:
    """The target's speed in writing ``batch`` responses at a time, measured briefly."""
    prompts = [[token] for token in range(batch)]
    begin = time.perf_counter()
    for _ in generate_responses(model_to_write_with(target), prompts, (), [_TRIAL_TOKENS] * batch, batch):
        pass
    return batch * _TRIAL_TOKENS / (time.perf_counter() - begin)


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
    if found := unbatched_layer(target.model):
        layer, cache = found
        raise DataError(
            f"mlx-lm cannot write in batches with this target: layer {layer} keeps a {cache}. "
            "Give conversations that already hold the target's responses."
        )
