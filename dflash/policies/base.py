"""The interface of policies, which choose how many tokens each block drafts and verifies, and the two simplest ones.

A policy sees times, counts and probabilities, never tokens: it decides the speed, not the text.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ..core.registry import Registry

PLAIN_TOKENS = 256  # most plain steps in a row of Fixed(0): the drafter's features are kept until the last of them


@dataclass(frozen=True)
class Drafts:
    """What a policy sees of one block's drafts before they are verified.

    Args:
        count: How many there are.
        confidence: The drafter's probability of each one; ``None`` unless the policy reads it and the drafter has it.
        source: Which of several drafters made them.
        parents: For a tree, the draft that each one follows, -1 for the anchor; the likeliest drafts come first.
    """

    count: int
    confidence: Sequence[float] | None = None
    source: str = ""
    parents: Sequence[int] | None = None


@dataclass(frozen=True)
class BlockRecord:
    """The cost and the result of one block or one plain step, of one text or of a batch of them.

    Of a batch, ``accepted`` is that of the row with most accepted drafts, and ``matched`` that of the row with fewest.

    Args:
        drafted: How many tokens the drafter proposed.
        verified: How many drafts the target's pass checked.
        accepted: How many drafts were committed, before one token of the target's own.
        matched: How many leading drafts equal the committed tokens: one more than ``accepted`` if the target's own
            token equals the first draft that was not verified.
        confidence: As in :class:`Drafts`.
        seconds: Time of the whole block, or of the plain step.
        source: As in :class:`Drafts`.
        asleep: Whether this was a plain step, without the drafter.
        outcomes: For each draft that directly follows a committed token, verified or not: whether it is what was
            committed next; in a batch, in which share of the rows that got so far.
        rows: Texts that were decoded at once.
    """

    drafted: int
    verified: int
    accepted: int
    matched: int
    confidence: Sequence[float] | None
    seconds: float
    source: str = ""
    asleep: bool = False
    outcomes: Mapping[int, float] = field(default_factory=dict)
    rows: int = 1


class Policy:
    """Drafts in every block and verifies every draft. Subclasses override what they decide differently.

    A class with ``reads_confidence = True`` gets the drafter's probabilities before it chooses a length. This makes the
    host wait for them in every block.
    """

    reads_confidence = False

    def begin(self) -> None:
        """A new request begins."""

    def sleep(self) -> int:
        """How many tokens to decode plainly before the next block; 0 to draft now. Called at least once a step."""
        return 0

    def wake(self) -> None:
        """The drafter has found something to propose during plain decoding; :meth:`sleep` is called next."""

    def draft_length(self, most: int) -> int:
        """How many tokens to ask the drafter for: 0 (a plain step) to ``most``."""
        return most

    def verify_length(self, drafts: Drafts) -> int:
        """How many of the drafts to verify, from the first one on."""
        return drafts.count

    def observe(self, block: BlockRecord) -> None:
        """Learn from a finished block or plain step."""

    def why(self) -> dict[str, float]:
        """The reasons of the last decision as numbers by name, for traces and profiles."""
        return {}


PolicyFactory = Callable[..., Policy]
"""``factory(**options)``: a policy, or its class."""

POLICIES: Registry[PolicyFactory] = Registry(
    "policy", "dflash.policies", "A number of drafts works too.", ["dflash.policies.adaptive"]
)


def register_policy(name: str) -> Callable[[PolicyFactory], PolicyFactory]:
    """Decorator: make a :class:`Policy` class known as ``name``, for ``decoder.generate(..., policy=name)``."""
    return POLICIES.register(name)


POLICIES.register("full")(Policy)


class Fixed(Policy):
    """Drafts and verifies ``length`` tokens in each block; 0 is plain decoding without the drafter."""

    def __init__(self, length: int):
        self.length = length

    def sleep(self) -> int:
        """Always, if nothing would be verified."""
        return 0 if self.length else PLAIN_TOKENS

    def draft_length(self, most: int) -> int:
        """As many as are verified: a drafter that fills short blocks quicker is not asked for whole ones."""
        return min(self.length, most)

    def verify_length(self, drafts: Drafts) -> int:
        """The same number in every block, or all drafts if there are fewer."""
        return min(self.length, drafts.count)
