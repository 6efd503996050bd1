"""The speed of batches: mlx-lm's ``batch_generate`` and DFlash on the same prompts, in turns, by the number of rows."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.generate import batch_generate

from ..generate import DFlashSpeculativeDecoder
from ..options import DecodeOptions

PROMPTS_PER_PASS = 8


@dataclass(frozen=True)
class BatchSpeed:
    """All prompts, ``rows`` of them at a time.

    Args:
        rows: Most prompts that were decoded at once.
        plain_tps: Tokens per second of each run of mlx-lm, prompts included.
        dflash_tps: The same of DFlash; run ``i`` of one side belongs to run ``i`` of the other.
        acceptance: Tokens that a row committed in a block on average; ``None`` without blocks.
        drafting: The share of DFlash's tokens that blocks committed; the others are mlx-lm's own steps.
        plain_memory: Peak memory of MLX's arrays in GB, models included.
        dflash_memory: The same with DFlash.
        different: Prompts with other tokens; ``None`` if they were sampled.
    """

    rows: int
    plain_tps: list[float]
    dflash_tps: list[float]
    acceptance: float | None
    drafting: float
    plain_memory: float
    dflash_memory: float
    different: int | None

    @property
    def ratio(self) -> float:
        """DFlash's speed over plain's: the median of the runs."""
        return statistics.median(d / p for p, d in zip(self.plain_tps, self.dflash_tps, strict=True))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self) | {"ratio": self.ratio}


def batch_speeds(
    decoder: DFlashSpeculativeDecoder,
    prompts: Sequence[list[int]],
    rows: Sequence[int],
    runs: int,
    max_tokens: int,
    options: DecodeOptions,
) -> Iterator[BatchSpeed]:
    """Answer all ``prompts`` ``runs`` times with each side, for each number of ``rows``; both end at mlx-lm's stops."""
    stops, plain = sorted(decoder.tokenizer.eos_token_ids), options.plain(decoder.tokenizer)
    limits = [min(max_tokens, decoder.max_seq_length - len(prompt)) for prompt in prompts]
    given = options.asked("max_tokens", "seed") | {"stop_token_ids": stops}
    each = [{"max_tokens": limit} for limit in limits]
    known = {name: plain[name] for name in ("sampler", "logits_processors", "prefill_step_size")}
    decoder.loaded_target.check_batchable()  # a target's trial comes once, like its loading

    def mlx_lm(count: int) -> list[list[int]]:
        found = batch_generate(
            decoder.target_model,
            decoder.tokenizer,
            [list(prompt) for prompt in prompts],
            max_tokens=limits,
            return_token_ids=True,
            completion_batch_size=count,
            prefill_batch_size=min(count, PROMPTS_PER_PASS),
            **known,
        )
        return found.token_ids or []

    for count in rows:
        speeds: dict[str, list[float]] = {"plain": [], "dflash": []}
        memory: dict[str, float] = {}
        texts: dict[str, list[list[int]]] = {}
        blocks: list[int] = []

        def dflash(count: int, blocks: list[int] = blocks) -> list[list[int]]:
            answers: list[list[int]] = [[] for _ in prompts]
            for number, response in decoder.stream_batch(prompts, count, each, **given):
                if response.error is not None:
                    raise response.error
                answers[number] += [token for token in response.tokens if token not in stops]
                if response.drafted:
                    blocks.append(response.accepted + 1)
            return answers

        sides: dict[str, Callable[[int], list[list[int]]]] = {"plain": mlx_lm, "dflash": dflash}
        for run in range(runs):
            for name in sorted(sides, reverse=run % 2 == 0):  # who begins changes with every run
                mx.clear_cache()
                mx.reset_peak_memory()
                begun = time.perf_counter()
                texts[name] = sides[name](count)
                speeds[name].append(sum(map(len, texts[name])) / (time.perf_counter() - begun))
                memory[name] = max(memory.get(name, 0.0), mx.get_peak_memory() / 1e9)
        written = runs * sum(map(len, texts["dflash"]))
        same = [a == b for a, b in zip(texts["plain"], texts["dflash"], strict=True)]
        yield BatchSpeed(
            rows=count,
            plain_tps=speeds["plain"],
            dflash_tps=speeds["dflash"],
            acceptance=statistics.mean(blocks) if blocks else None,
            drafting=min(sum(blocks) / written, 1.0) if written else 0.0,
            plain_memory=memory["plain"],
            dflash_memory=memory["dflash"],
            different=same.count(False) if options.greedy else None,
        )
