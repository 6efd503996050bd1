"""What a policy is told and asked: how many tokens each block drafts and verifies. The two simplest policies.

It sees times, counts and probabilities, never tokens: it decides how fast the text is written, not what is written.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..core.registry import Registry


@dataclass(frozen=True)
class Drafts:
    """What a policy is told of the drafts of one block before they are verified.

    Args:
        count: How many there are.
        confidence: The drafter's probability of each; ``None`` unless the policy reads it and the drafter has it.
        source: Which of several drafters made them.
        parents: Of a tree, the draft that each one follows, -1 for the anchor; the likeliest drafts stand first.
    """

    count: int
    confidence: Sequence[float] | None = None
    source: str = ""
    parents: Sequence[int] | None = None


@dataclass(frozen=True)
class BlockRecord:
    """What one block, or one plain step, cost and brought.

    Args:
        drafted: Tokens that the drafter proposed.
        verified: Drafts that the target's pass checked.
        accepted: Drafts that were committed, before one token of the target's own.
        matched: Leading drafts equal to what was committed: one more than ``accepted`` where the target's own token
            is the first draft that was not verified.
        confidence: As in :class:`Drafts`.
        seconds: Time of the whole block, or of the plain step.
        source: As in :class:`Drafts`.
        asleep: Whether this was a plain step, without the drafter.
        outcomes: For each draft that directly follows a committed token, whether it is what was committed next,
            verified or not; ``None``: as ``matched`` says of a chain.
    """

    drafted: int
    verified: int
    accepted: int
    matched: int
    confidence: Sequence[float] | None
    seconds: float
    source: str = ""
    asleep: bool = False
    outcomes: Mapping[int, bool] | None = None

    @property
    def known_outcomes(self) -> Mapping[int, bool]:
        """:attr:`outcomes`, or what ``matched`` says of a chain."""
        if self.outcomes is not None:
            return self.outcomes
        compared = min(self.verified + (self.accepted == self.verified), self.drafted)
        return {i: i < self.matched for i in range(min(self.matched + 1, compared))}


class Policy:
    """Drafts in every block and verifies every draft. Subclasses override what they decide otherwise.

    A class with ``reads_confidence = True`` is told the drafter's probabilities before it chooses a length, for which
    the host waits in every block.
    """

    reads_confidence = False

    def begin(self) -> None:
        """A new request begins."""

    def sleep(self) -> int:
        """How many tokens to decode plainly before the next block; 0 to draft now. Asked after every step."""
        return 0

    def wake(self) -> None:
        """The drafter has found something to propose during plain decoding; :meth:`sleep` is asked next."""

    def draft_length(self, most: int) -> int:
        """How many tokens the drafter is asked for: 0, for a plain step, to ``most``."""
        return most

    def verify_length(self, drafts: Drafts) -> int:
        """How many of the drafts to verify, counted from the first."""
        return drafts.count

    def observe(self, block: BlockRecord) -> None:
        """Learn from a finished block or plain step."""

    def why(self) -> dict[str, float]:
        """The reasons of the last decision as numbers by name, for traces and profiles."""
        return {}


PolicyFactory = Callable[[], Policy]

POLICIES: Registry[PolicyFactory] = Registry("policy", "dflash.policies", "A number of drafts works too.")


def register_policy(name: str) -> Callable[[PolicyFactory], PolicyFactory]:
    """Decorator: make a :class:`Policy` class known as ``name``, for ``decoder.generate(..., policy=name)``."""
    return POLICIES.register(name)


POLICIES.register("full")(Policy)


class Fixed(Policy):
    """Verifies the first ``length`` drafts of every block, which is drafted whole."""

    def __init__(self, length: int):
        self.length = length

    def verify_length(self, drafts: Drafts) -> int:
        """The same number in every block, as far as there are drafts."""
        return min(self.length, drafts.count)
