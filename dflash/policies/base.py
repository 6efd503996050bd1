"""How many drafts a block verifies: what a policy is told and asked, and the policies that need not learn.

Knows seconds and chances. Must not know tokens, text or models: a policy decides how long a block takes, never what
it writes. The one that learns is in ``adaptive.py``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..registry import Registry


@dataclass(frozen=True)
class Drafts:
    """What a policy is told of the drafts before they are verified.

    Args:
        count: How many there are.
        confidence: The drafter's probability of each; ``None`` where it has none, or may not be asked.
        source: Which of several drafters made them.
        parents: Where they are a tree, the draft that each follows, -1 for the anchor; the likeliest stand first.
    """

    count: int
    confidence: Sequence[float] | None = None
    source: str = ""
    parents: Sequence[int] | None = None


@dataclass(frozen=True)
class BlockRecord:
    """What a block cost and brought.

    Args:
        drafted: Tokens that the drafter proposed.
        verified: Drafts that the target's pass checked.
        accepted: Drafts that it committed, beside a token of the target's own.
        matched: Leading drafts equal to what was committed: one more than ``accepted`` where the target's own token
            is the first draft that was not verified.
        confidence: The drafter's probability of each draft; ``None`` where it was not read.
        seconds: Time of the whole block, or of the plain step.
        source: Which of several drafters made the drafts.
        asleep: Whether this was a plain step, for which no drafter was asked.
        parents: As in :class:`Drafts`.
        drafting: The part of ``seconds`` until the drafts were known; 0 where nobody waited for them.
        choosing: Seconds from then until the device had the pass that verifies them; 0 where nobody waited.
        outcomes: Of the drafts that follow what was committed, verified or not, whether each is what was committed
            next; ``None``: as ``matched`` says of a chain.
    """

    drafted: int
    verified: int
    accepted: int
    matched: int
    confidence: Sequence[float] | None
    seconds: float
    source: str = ""
    asleep: bool = False
    parents: Sequence[int] | None = None
    outcomes: Mapping[int, bool] | None = None
    drafting: float = 0.0
    choosing: float = 0.0

    @property
    def compared(self) -> int:
        """Drafts of which it is known whether they match, if those before them do."""
        return min(self.verified + (self.accepted == self.verified), self.drafted)


class Policy:
    """Drafts always and verifies every draft. A policy of one's own overrides what it wants otherwise.

    It is told :attr:`Drafts.confidence` only if its class sets ``reads_confidence = True``: to know the drafter's
    probabilities before the pass costs a wait for the device. Even then they may be ``None``.
    """

    reads_confidence = False
    """Whether the policy is told the drafter's probabilities."""

    def begin(self) -> None:
        """A new text begins."""

    def sleep(self) -> int:
        """How many tokens to decode plainly before the next draft; 0 to draft now."""
        return 0

    def wake(self) -> None:
        """The drafter has found something while it sleeps; :meth:`sleep` is asked next."""

    def draft_length(self, most: int) -> int:
        """How many drafts to ask the drafter for: 0, for a plain step, to ``most``."""
        return most

    def waits_for_confidence(self, source: str) -> bool:
        """Of one that reads them: whether :meth:`verify_length` needs the probabilities of drafts from ``source``.

        That is one more wait for the device in this block. Otherwise only :meth:`observe` gets them.
        """
        return True

    def verify_length(self, drafts: Drafts) -> int:
        """How many of the drafts to verify, counted from the first."""
        return drafts.count

    def observe(self, block: BlockRecord) -> None:
        """Learn from a finished block or plain step."""

    def catch_up(self) -> None:
        """Learn what can wait: in each block the device has the target's pass now, and nobody reads its tokens yet.

        A policy that puts something off catches up in :meth:`observe` and :meth:`begin` too: plain steps and the end of
        a text come without such a pass.
        """

    def why(self) -> dict[str, float]:
        """What the last choice was expected to bring, as numbers by name, for traces and profiles."""
        return {}


PolicyFactory = Callable[[], Policy]

POLICIES: Registry[PolicyFactory] = Registry("policy", "dflash.policies", "A number of drafts works too.")


def register_policy(name: str) -> Callable[[PolicyFactory], PolicyFactory]:
    """Decorator: make a :class:`Policy` class known as ``name``, for ``decoder.generate(..., policy=name)``."""
    return POLICIES.register(name)


POLICIES.register("full")(Policy)


class Fixed(Policy):
    """Verifies the first ``length`` drafts of every block.

    Drafts are cut, not made shorter: a block that was filled at its full width is better at its beginning.
    """

    def __init__(self, length: int):
        self.length = length

    def verify_length(self, drafts: Drafts) -> int:
        """The same number in every block, as far as there are drafts."""
        return min(self.length, drafts.count)
