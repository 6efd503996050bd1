"""How texts come into a batch: their prompts are read together, and they join its rows.

mlx-lm reads the last token of a prompt in a pass of its own, once all before it were read together. Here the next step
of the running rows reads it too, so that they do not wait.
"""

from functools import lru_cache
from typing import Any, cast

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, GenerationBatch, PromptProcessingBatch, StopSequences

from ..target import LoadedTargetModel
from ..target.rows import as_rows
from .batch import JOINING, Guarded, SpeculativeBatch, Tapped
from .block import check_committed
from .sampling import GREEDY, DrawingSampler, Sampler
from .verify import token_ids

PROMPTS_AT_ONCE = 8  # read in one pass, as in mlx-lm


class Joining(SpeculativeBatch):
    """Rows that join: their next step reads the last tokens of their prompts, which answer nothing."""

    def _step(self) -> Any:
        """Leave the step that mlx-lm makes of new rows alone to the one of all rows."""
        self._num_tokens = [JOINING for _ in self.uids]
        self._next_logprobs = [None for _ in self.uids]
        self._matchers = [StopSequences().matcher() for _ in self.uids]


class Prompts(PromptProcessingBatch):
    """mlx-lm's prompts that are read, which become rows that join."""

    def generate(self, tokens: list[list[int]]) -> GenerationBatch:
        """The rows; ``tokens`` are the last one of each prompt.

        mlx-lm reads them where caches hold nothing: these cannot leave before a pass.
        """
        if not all(self.tokens):
            rows = super().generate(tokens)
            mx.eval(rows._next_tokens)  # an error of this pass belongs to the batch, not to what is evaluated next
            return rows
        return Joining(
            self.model,
            self.uids,
            mx.array([last for (last,) in tokens], mx.uint32),
            self.prompt_cache,
            self.tokens,
            self.samplers,
            self.fallback_sampler,
            self.logits_processors,
            self.stop_sequences,
            self.max_tokens,
        )


class SpeculativeGenerator(BatchGenerator):
    """mlx-lm's ``BatchGenerator`` over a :class:`Tapped` model; its generation responses are :class:`RowBlock`.

    It decodes at most ``rows`` texts at once, and reads prompts in steps of ``step_size`` tokens.
    """

    def __init__(self, model: Tapped, rows: int, step_size: int):
        super().__init__(
            cast(Any, model),
            completion_batch_size=rows,
            prefill_batch_size=min(rows, PROMPTS_AT_ONCE),
            prefill_step_size=step_size,
            stream=mx.default_stream(mx.default_device()),
        )
        self._prompt_batch = Prompts.empty(cast(Any, model), self.sampler, step_size)
        self._generation_batch = SpeculativeBatch.empty(cast(Any, model), self.sampler)

    def insert_segments(
        self, segments: Any, max_tokens: Any = None, caches: Any = None, *options: Any, **named: Any
    ) -> Any:
        """As mlx-lm's; ``caches`` are those of texts alone, such as a row's that has left a batch."""
        rows = caches and [held and as_rows(held) for held in caches]
        return super().insert_segments(segments, max_tokens, rows, *options, **named)

    def _next(self) -> Any:
        """mlx-lm's: a step of the rows, then the next part of the prompts."""
        self.model.reads_prompts = bool(self._currently_processing)
        return super()._next()

    def _make_batch(self, n: int) -> Any:
        """The next prompts, each with samplers and logits processors that can fail alone."""
        batch = super()._make_batch(n)
        batch.samplers = [_of_row(sampler, self.model.target) for sampler in batch.samplers]
        batch.logits_processors = [
            [Guarded(process, lambda _, logits: logits) for process in processors or ()]
            for processors in batch.logits_processors
        ]
        return batch


def _of_row(sampler: Sampler, target: LoadedTargetModel) -> Sampler:
    """The sampler as a row has it: mlx-lm samples rows that share one in one call, which not every one allows.

    A sampler of the caller's is waited for: the next pass reads what it chose, which must be ids of the target's.
    """
    if isinstance(sampler, DrawingSampler):
        return _first_equal(sampler)
    if sampler is GREEDY:
        return sampler

    def checked(logprobs: mx.array) -> mx.array:
        chosen = mx.array(sampler(logprobs)).astype(mx.int32)
        check_committed(target, token_ids(chosen.reshape(-1)))
        return chosen

    return Guarded(checked, GREEDY)


@lru_cache
def _first_equal(sampler: DrawingSampler) -> DrawingSampler:
    return sampler
