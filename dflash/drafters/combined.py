"""N-gram lookup combined with another drafter (``--drafter ngram+PATH``): copies where the text repeats.

Of the two drafts, the one with more expected accepted tokens is proposed. Acceptance probabilities are learned from
recent blocks: one for the other drafter, and one per length of the match for copies. Copies that were not proposed are
compared with the output too, at no cost. :attr:`~dflash.Proposal.source` tells the policy which drafter was used.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx

from ..core.errors import DFlashError
from .autoregressive import agreeing
from .ngram import NAME as COPY
from .ngram import RESUMING, NgramCache, NgramDrafter
from .protocol import Drafter, Proposal

if TYPE_CHECKING:
    from ..decoding.sampling import DrawingSampler
    from ..target import LoadedTargetModel

MODEL = "model"
PREFIX = COPY + "+"
"""The prefix of a drafter's name that combines it with copying."""

COPY_SIZE = 16  # positions of a block of copied tokens
MEMORY = 0.98  # weight of an observation relative to the next one


def own_name(name: str | Path) -> str:
    """The name of a drafter without :data:`PREFIX`: what is loaded, whether it is combined with copying or not."""
    return str(name).removeprefix(PREFIX)


@dataclass
class Chance:
    """Running acceptance probability of a draft that is reached, with a prior worth 8 observations."""

    chance: float
    weight: float = 8.0

    def learn(self, drafts: Sequence[int], written: Sequence[int]) -> None:
        """Compare ``drafts`` with the tokens ``written`` in their place, as far as these are known."""
        right = agreeing(list(drafts), list(written))
        wrong = right < min(len(drafts), len(written))
        for accepted in [True] * right + [False] * wrong:
            self.weight = MEMORY * self.weight + 1
            self.chance += (accepted - self.chance) / self.weight

    def expected(self, count: int) -> float:
        """Expected number of accepted tokens of ``count`` drafts."""
        return sum(self.chance**i for i in range(1, count + 1))


class CombinedCache:
    """The n-gram index, the model's own context, and the latest drafts (``made``, from position ``made_at`` on)."""

    def __init__(self, model: Any):
        self.copies, self.model = NgramCache(), model
        self.made: list[tuple[Chance, Any]] = []
        self.made_at = 0

    @property
    def offset(self) -> int:
        """Tokens of context held."""
        return cast(int, self.model.offset)

    @property
    def state(self) -> Any:
        """The arrays of the model's context."""
        return getattr(self.model, "state", ())

    def rewind(self, length: int) -> None:
        """Keep the first ``length`` tokens. The model's context must be one that can go back."""
        self.model.rewind(length)
        kept, self.copies, self.made = self.copies.tokens[:length], NgramCache(), []
        self.copies.extend(kept)

    def learn(self, anchor: int) -> None:
        """Learn which of the latest drafts were right, if anything was written since."""
        if len(self.copies.tokens) >= self.made_at:
            written = [*self.copies.tokens[self.made_at :], anchor]
            for chance, drafts in self.made:
                chance.learn(drafts if isinstance(drafts, list) else drafts.tolist()[0], written)
        self.made = []


class CombinedDrafter:
    """Copying where it pays, and another drafter elsewhere.

    Follows :class:`~dflash.drafters.protocol.WakingDrafter`. Acceptance probabilities are kept between requests, which
    are often too short to learn them anew.

    Args:
        model: The drafter for text that does not repeat. If it can sample its drafts
            (:class:`~dflash.drafters.protocol.DrawingDrafter`), so can this one.

    Raises ``DFlashError`` for a drafter that copies itself.
    """

    def __init__(self, model: Drafter):
        if isinstance(model, NgramDrafter | CombinedDrafter):
            raise DFlashError("ngram+ takes a drafter for text that does not repeat; ngram alone copies already.")
        self.model = model
        self.of_model = Chance(0.75)
        # By the bit length of the match's length: 0, 1, 2 to 3, 4 to 7, 8 to 15, 16 to 31, 32 tokens.
        self.of_copies = [Chance(chance) for chance in (0.0, 0.2, 0.4, 0.65, 0.85, 0.93, 0.95)]
        self.block_size = max(model.block_size, COPY_SIZE)
        self.target_layer_ids = model.target_layer_ids
        if hasattr(model, "draw"):
            self.draw = self._draw

    def bind(self, target: "LoadedTargetModel") -> None:
        """Check that the target fits the model; copies fit every target."""
        self.model.bind(target)

    def make_cache(self) -> CombinedCache:
        """An empty index and a new, empty context of the model."""
        return CombinedCache(self.model.make_cache())

    def extend_context(self, features: mx.array, cache: CombinedCache, tokens: mx.array) -> None:
        """Append newly committed ``tokens [1, S]`` to both, with the model's ``features [1, S, F]``."""
        self.model.extend_context(features, cache.model, tokens)
        cache.copies.extend(cast(list[list[int]], tokens.tolist())[0])

    def wakes(self, text: Sequence[int], cache: CombinedCache) -> bool:
        """Whether the match at the end of ``text`` is long enough to resume drafting, and such copies are accepted."""
        cache.copies.read_ahead(text)
        agreement = cache.copies.best_place(text[-1])[1]
        return agreement >= RESUMING and self.of_copies[agreement.bit_length()].chance > 0.5

    def propose(self, anchor: mx.array, length: int, cache: CombinedCache) -> Proposal:
        """Up to ``length`` copied tokens, or the model's drafts."""
        return self._better(anchor, length, cache, lambda count: self.model.propose(anchor, count, cache.model))

    def _draw(self, anchor: mx.array, length: int, cache: CombinedCache, sampler: "DrawingSampler") -> Proposal:
        """As :meth:`propose`; the model's drafts are sampled, a copy is certain."""
        model = cast(Any, self.model)
        return self._better(anchor, length, cache, lambda count: model.draw(anchor, count, cache.model, sampler))

    def _better(self, anchor: mx.array, length: int, cache: CombinedCache, ask: Callable[[int], Proposal]) -> Proposal:
        """The draft with more expected accepted tokens."""
        last, count = cast(int, anchor.item()), min(length, self.model.block_size - 1)
        cache.learn(last)
        end, agreement = cache.copies.best_place(last)
        copied = cache.copies.copy(end, agreement, last, min(length, COPY_SIZE - 1))
        of_copies = self.of_copies[agreement.bit_length()]
        cache.made, cache.made_at = [(of_copies, copied)], cache.offset + 1
        if (copied and of_copies.expected(len(copied)) >= self.of_model.expected(count)) or count < 1:
            return Proposal(mx.array([copied], mx.int32).reshape(1, len(copied)), source=COPY)
        proposal = replace(ask(count), source=MODEL)
        cache.made.append((self.of_model, proposal.tokens))
        return proposal
