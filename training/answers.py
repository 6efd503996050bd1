"""Answers that a target writes itself, many at a time.

Knows mlx-lm's batched generation and token ids. Must not know what the requests are about.

Whoever can guess an answer saves its decoding: one pass over a guess shows how far each of its tokens is the
target's own greedy choice, and only what follows the first other choice is decoded.
"""

import logging
import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import BatchGenerator
from tqdm import tqdm

from dflash import LoadedTargetModel, load_target

from .cpu import keep_freed_memory, set_blas_threads
from .data import Ints, Sequences, padded, plan_batches
from .fastmath import on_cpu

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AnswersSettings:
    """Training requests, unlike those that the target learned from, which it answers for the drafter."""

    samples: int
    seed: int
    max_tokens: int = 320
    shard: int = 1000
    batch: int = 128
    processes: int = 2


def write_responses(
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


def answer_greedily(
    model: nn.Module, prompts: list[list[int]], end: int, max_tokens: int, batch: int = 64
) -> list[list[int]]:
    """The target's greedy answer to each prompt, with the ``end`` token unless it was cut at ``max_tokens``."""
    return write_responses(model, prompts, [end], [max_tokens] * len(prompts), batch)


def agreed_lengths(model: nn.Module, guesses: Sequences, batch_tokens: int = 2048) -> Ints:
    """How many tokens of each guessed answer, counted from its first, are the target's greedy choices."""
    starts, agreed = guesses.starts, np.zeros(len(guesses), dtype=np.int64)
    for rows in plan_batches(guesses.lengths, batch_tokens, seed=0):
        tokens, response = padded(guesses, rows, starts)
        same = np.array(mx.argmax(model(mx.array(tokens[:, :-1])), axis=-1)) == tokens[:, 1:]
        for row, right, guessed in zip(rows, same, response[:, 1:], strict=True):
            agreed[row] = np.cumprod(right[guessed]).sum()
    return agreed


def answer_from_guesses(
    model: nn.Module, prompts: list[list[int]], guesses: list[list[int]], end: int, max_tokens: int, batch: int = 64
) -> list[list[int]]:
    """What :func:`answer_greedily` gives, sooner where the guesses, which end with ``end``, are right.

    Computed in passes of another shape, so that a near tie between two tokens may fall the other way.
    Answers may be longer than ``max_tokens`` by what was agreed.
    """
    agreed = agreed_lengths(model, Sequences.from_lists(prompts, guesses))
    answers = [guess[:length] for guess, length in zip(guesses, agreed, strict=True)]
    open_ended = [row for row, guess in enumerate(guesses) if agreed[row] < len(guess)]
    rests = answer_greedily(model, [prompts[row] + answers[row] for row in open_ended], end, max_tokens, batch)
    for row, rest in zip(open_ended, rests, strict=True):
        answers[row] = answers[row] + rest
    return answers


def write_answers(
    target: Path, prompts: list[list[int]], guesses: list[list[int]], settings: AnswersSettings, folder: Path
) -> Sequences:
    """Let the target saved at ``target`` answer ``prompts`` in shards; shards in ``folder`` are not written again.

    On a CPU, processes share the shards. Answers cut at ``max_tokens`` are kept: they are what the target says.
    """
    folder.mkdir(parents=True, exist_ok=True)
    starts = range(0, len(prompts), settings.shard)
    paths = [folder / f"{start:06d}.safetensors" for start in starts]
    work = [
        (prompts[start : start + settings.shard], guesses[start : start + settings.shard], path)
        for start, path in zip(starts, paths, strict=True)
        if not path.exists()
    ]
    if work:
        processes = settings.processes if on_cpu() else 1
        context = multiprocessing.get_context("spawn")  # a forked MLX hangs
        with context.Pool(processes, _load, (str(target), settings)) as pool:
            for _ in tqdm(pool.imap_unordered(_answer_shard, work), total=len(work), disable=None, desc=folder.name):
                logger.info("%d of %d shards answered.", sum(path.exists() for path in paths), len(paths))
    return Sequences.load(*paths)


_worker: tuple[LoadedTargetModel, AnswersSettings]


def _load(target: str, settings: AnswersSettings) -> None:
    global _worker
    keep_freed_memory()
    if settings.processes > 1:
        set_blas_threads(1)
    _worker = load_target(target), settings


def _answer_shard(work: tuple[list[list[int]], list[list[int]], Path]) -> None:
    (target, settings), (prompts, guesses, path) = _worker, work
    (end,) = target.stop_token_ids()
    answers = answer_from_guesses(target.model, prompts, guesses, end, settings.max_tokens, settings.batch)
    Sequences.from_lists(prompts, answers).save(path)
