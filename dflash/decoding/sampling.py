"""Samplers, logits processors and MLX's random state: how a token is sampled from the target's logits.

Shapes: L positions of a block, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, categorical_sampling, greedy_sampler

from ..core.errors import GenerationError
from ..core.registry import Registry

Sampler = Callable[[mx.array], mx.array]
"""Log-probabilities ``[N, V]`` to tokens ``[N]``, as made by ``mlx_lm.sample_utils.make_sampler``."""

LogitsProcessor = Callable[[mx.array, mx.array], mx.array]
"""``processor(tokens, logits)``: logits ``[1, V]`` after ``tokens [N]`` to logits ``[1, V]``, as in mlx-lm."""

GREEDY: Sampler = greedy_sampler
SAMPLERS: Registry[Sampler] = Registry("sampler", "dflash.samplers")
LOGITS_PROCESSORS: Registry[LogitsProcessor] = Registry("logits processor", "dflash.logits_processors")


def register_sampler(name: str) -> Callable[[Sampler], Sampler]:
    """Decorator: make a :data:`Sampler` known as ``name``, for ``decoder.generate(..., sampler=name)``.

    It is called at most once per position with log-probabilities ``[1, V]``, as plain mlx-lm calls it, and returns
    the token ``[1]``. It must keep no state but MLX's random state, because it also samples at positions that are
    rejected afterwards.
    """
    return SAMPLERS.register(name)


def register_logits_processor(name: str) -> Callable[[LogitsProcessor], LogitsProcessor]:
    """Decorator: make a :data:`LogitsProcessor` known as ``name``, for ``generate(..., logits_processors=[name])``.

    It is called once per position with all tokens before that position, the prompt included, and the logits
    ``[1, V]`` there, as plain mlx-lm calls it. Like a sampler, it must keep no state.
    """
    return LOGITS_PROCESSORS.register(name)


@dataclass(frozen=True)
class DrawingSampler:
    """Samples as ``mlx_lm.sample_utils.make_sampler`` does above temperature 0, and knows its distribution."""

    temp: float
    top_p: float = 0.0
    min_p: float = 0.0
    min_tokens_to_keep: int = 1
    top_k: int = 0

    def __call__(self, logprobs_NV: mx.array) -> mx.array:
        """Tokens ``[N]``, each sampled from its row of log-probabilities."""
        return categorical_sampling(self._filtered(logprobs_NV), self.temp)

    def log_distribution(self, logits_NV: mx.array) -> mx.array:
        """The log-probabilities ``[N, V]``, in float32, from which ``logits_NV`` are sampled."""
        with RandomState.restored_on_error():
            kept_NV = self._filtered(logits_NV - mx.logsumexp(logits_NV, axis=-1, keepdims=True))
        scaled_NV = kept_NV.astype(mx.float32) * (1.0 / self.temp)
        return scaled_NV - mx.logsumexp(scaled_NV, axis=-1, keepdims=True)

    def _filtered(self, logprobs_NV: mx.array) -> mx.array:
        """The log-probabilities with minus infinity for excluded tokens; filters in mlx-lm's order."""
        if 0 < self.top_p < 1:
            logprobs_NV = apply_top_p(logprobs_NV, self.top_p)
        if self.min_p > 0:
            logprobs_NV = apply_min_p(logprobs_NV, self.min_p, self.min_tokens_to_keep)
        return apply_top_k(logprobs_NV, self.top_k) if 0 < self.top_k < logprobs_NV.shape[-1] else logprobs_NV


@dataclass(frozen=True, eq=False)
class RandomState:
    """MLX's global random state at one moment, to return to.

    A pass samples at every position before it is known which tokens are committed. Plain mlx-lm decoding has sampled
    only the committed ones by then, so the state is set back to that after the last of them. This is why the same seed
    gives the text of plain mlx-lm.
    """

    key: mx.array

    @classmethod
    def now(cls) -> "RandomState":
        """The present state; it need not be evaluated yet."""
        return cls(cast(Any, mx.random.state)[0])

    def restore(self) -> None:
        """Make this the global state again."""
        mx.random.seed(self.seed)

    @property
    def seed(self) -> int:
        """The seed that makes this state."""
        high, low = cast(list[int], self.key.tolist())
        return high << 32 | low

    @classmethod
    @contextmanager
    def restored_on_error(cls) -> Iterator[None]:
        """Restore the state if the ``with`` block fails.

        mlx-lm's filters are compiled over the global state. One that raises while it is traced leaves a placeholder
        there, and sampling would fail for the rest of the process.
        """
        before = cls.now()
        try:
            yield
        except BaseException:
            before.restore()
            raise


def sample_rows(sampler: Sampler, logprobs_LV: mx.array) -> tuple[mx.array, list[RandomState]]:
    """The token ``[L]`` of each row, and the random state after each; no states from the greedy sampler.

    The sampler is called once per row, as in plain decoding. Each position gets the random numbers that plain decoding
    would use there, however many positions a pass has. And a sampler may treat its whole input as one position: sample
    one number, take one maximum.

    Raises ``GenerationError`` for a sampler that returns anything but one token per row.
    """
    if sampler is GREEDY:
        return sampler(logprobs_LV), []
    tokens, states = [], []
    with RandomState.restored_on_error():
        for i in range(logprobs_LV.shape[0]):
            token = sampler(logprobs_LV[i : i + 1])
            if not isinstance(token, mx.array) or token.size != 1:
                raise GenerationError(
                    f"The sampler returned {_form(token)}; expected one token, an array of shape (1,)."
                )
            tokens.append(token.reshape(1))
            states.append(RandomState.now())
    return mx.concatenate(tokens), states


def process_logits(processors: Sequence[LogitsProcessor], tokens: mx.array, logits_LV: mx.array) -> mx.array:
    """Logits ``[L, V]`` with every processor applied at each position.

    Row ``i`` holds the logits after the first ``N - L + 1 + i`` of ``tokens [N]``. Its processors see exactly these
    tokens, as they would in plain decoding.
    """
    if not processors:
        return logits_LV
    rows, before = [], tokens.size - logits_LV.shape[0] + 1
    with RandomState.restored_on_error():
        for i in range(logits_LV.shape[0]):
            row = logits_LV[i : i + 1]
            for processor in processors:
                row = processor(tokens[: before + i], row)
                if not isinstance(row, mx.array) or row.shape != (1, logits_LV.shape[1]):
                    raise GenerationError(
                        f"A logits processor returned {_form(row)}; expected logits of shape (1, {logits_LV.shape[1]})."
                    )
            rows.append(row)
    return mx.concatenate(rows)


def _form(value: Any) -> str:
    return f"an array of shape {value.shape}" if isinstance(value, mx.array) else type(value).__name__
