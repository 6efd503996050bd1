"""The arithmetic limit of block decoding: what its parts cost alone, and the speed-up that they allow."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import mlx.core as mx

from ..decoding.sampling import Sampler
from ..decoding.verify import sample_target, samples_one_by_one
from ..generate import DFlashSpeculativeDecoder
from .runs import PromptResult
from .statistics import acceptance_length

PASSES = 5  # replays of the answer: hundreds of samples of each part for a usual answer
LEAST_BLOCKS = 50  # fewer say little about tau
LEAST_TOKENS = 24  # of the answer that is replayed


@dataclass(frozen=True)
class Limit:
    """Times in seconds of one plain step, one draft and one verification, each measured alone."""

    acceptance_length: float
    plain: float
    draft: float
    verify: float

    @property
    def speedup(self) -> float:
        """The greatest speed-up that these times allow: ``tau * T_plain / (T_draft + T_verify)``."""
        return self.acceptance_length * self.plain / (self.draft + self.verify)


def limit_of(decoder: DFlashSpeculativeDecoder, results: Sequence[PromptResult], sampler: Sampler) -> Limit | None:
    """The limit along the answer of median length among ``results``.

    ``None`` if that answer has fewer than ``LEAST_TOKENS`` tokens, or all of them fewer than ``LEAST_BLOCKS``
    blocks: so few times say nothing, and such a limit is often exceeded. Also ``None`` if the policy verified only some
    of the drafts: the limit is that of whole blocks.
    """
    runs = [run for r in results for run in r.dflash]
    if statistics.median([count for run in runs for count in run.drafted] or [0]) < decoder.block_size - 1:
        return None
    tau = acceptance_length(runs)
    middle = sorted(results, key=lambda r: len(r.prompt.tokens) + len(r.dflash[0].tokens))[len(results) // 2]
    answer = middle.dflash[0].tokens
    if tau is None or len(answer) < LEAST_TOKENS or sum(len(run.committed) for run in runs) < LEAST_BLOCKS:
        return None
    return measure_limit(decoder, middle.prompt.tokens, answer, tau, sampler)


def measure_limit(
    decoder: DFlashSpeculativeDecoder, prompt: list[int], answer: list[int], acceptance_length: float, sampler: Sampler
) -> Limit:
    """Median times of a plain step, a draft and a verification along ``answer`` to ``prompt``.

    Each part is replayed alone from the end of the prompt to the end of the answer, with caches that grow as in
    decoding and one evaluation a step, graph building included. ``acceptance_length`` is tau; rounded, it is the number
    of tokens committed per block in the replay.
    """
    parts = _PartTimer(decoder, prompt, answer, max(1, round(acceptance_length)), sampler)
    passes = [(parts.plain(), parts.draft(), parts.verify()) for _ in range(PASSES + 1)][1:]  # the first: a warm-up
    plain, draft, verify = (statistics.median(chain(*part)) for part in zip(*passes, strict=True))
    return Limit(acceptance_length, plain, draft, verify)


class _PartTimer:
    """The parts of decoding one known answer, each alone, ``stride`` tokens committed per block."""

    def __init__(
        self, decoder: DFlashSpeculativeDecoder, prompt: list[int], answer: list[int], stride: int, sampler: Sampler
    ):
        self.target, self.drafter, self.width = decoder.loaded_target, decoder.draft_model, decoder.block_size
        self.start, self.end, self.stride = len(prompt), len(prompt) + len(answer), min(stride, self.width)
        padding = (answer * 2 * self.width)[: self.width + stride]  # the last blocks reach past the answer
        self.tokens = mx.array([prompt + answer + padding])
        self.sampler = sampler
        self.features = self._features(self.tokens, self.target.make_cache())

    def plain(self) -> list[float]:
        """Seconds of each one-token step with cache, head and sampler, the arithmetic of mlx-lm's own step."""
        cache = self._prompt_cache()
        times = []
        for i in range(self.start, self.end):
            begin = time.perf_counter()
            logits = self.target.model(self.tokens[:, i : i + 1], cache=cache)[:, -1]
            logprobs = logits - mx.logsumexp(logits, keepdims=True)
            mx.eval(self.sampler(logprobs), logprobs)
            times.append(time.perf_counter() - begin)
        return times

    def draft(self) -> list[float]:
        """Seconds of taking in a block's committed tokens and proposing the next block."""
        cache = self.drafter.make_cache()
        self.drafter.extend_context(self.features[:, : self.start], cache, self.tokens[:, : self.start])
        self._propose(self.start, cache)  # computes the prompt's part of the cache
        times = []
        for i in range(self.start, self.end, self.stride):
            begin, anchor = time.perf_counter(), i + self.stride
            self.drafter.extend_context(self.features[:, i:anchor], cache, self.tokens[:, i:anchor])
            self._propose(anchor, cache)
            times.append(time.perf_counter() - begin)
        return times

    def verify(self) -> list[float]:
        """Seconds of one target pass over a whole block, with features and the target's choices that the rule needs."""
        cache = self._prompt_cache()
        needed = self.stride if samples_one_by_one(self.sampler) else self.width
        times = []
        for i in range(self.start, self.end, self.stride):
            begin, block = time.perf_counter(), self.tokens[:, i : i + self.width]
            logits, features = self.target.forward_with_hidden_states(block, cache, self.drafter.target_layer_ids)
            mx.eval(sample_target(logits[0, :needed], self.sampler), features)
            times.append(time.perf_counter() - begin)
            self.target.rewind_kv_caches(cache, i + self.stride)
        return times

    def _propose(self, anchor: int, cache: Any) -> None:
        if self.width > 1:
            mx.eval(self.drafter.propose(self.tokens[:, anchor : anchor + 1], self.width - 1, cache).tokens)

    def _prompt_cache(self) -> list[Any]:
        cache = self.target.make_cache()
        self._features(self.tokens[:, : self.start], cache)
        return cache

    def _features(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        """Features of ``tokens``, evaluated; the parts start from computed caches."""
        _, features = self.target.forward_hidden(tokens, cache, self.drafter.target_layer_ids)
        mx.eval(features, [c.state for c in cache])
        return features
