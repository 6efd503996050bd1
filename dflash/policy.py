"""How many drafts a block verifies: all, a fixed number, or the number that commits most tokens per second.

Knows seconds and chances. Must not know tokens, text or models: a policy decides how long a block takes, never what
it writes. Times and chances are learned from the blocks that are decoded anyway.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .registry import Registry

PLAIN = 0
"""Key of a plain step in a :class:`CostCurve`: one token, the next pass under way before it is read."""


@dataclass(frozen=True)
class Drafts:
    """What a policy is told of the drafts before they are verified.

    Args:
        count: How many there are.
        confidence: The drafter's probability of each; ``None`` where it has none, or may not be asked.
        source: Which of several drafters made them.
    """

    count: int
    confidence: Sequence[float] | None = None
    source: str = ""


@dataclass(frozen=True)
class BlockRecord:
    """What a block cost and brought.

    Args:
        drafted: Tokens that the drafter proposed.
        verified: Drafts that the target's pass checked.
        accepted: Drafts that it committed, beside a token of the target's own.
        confidence: The drafter's probability of each draft; ``None`` where it was not read.
        seconds: Time of the whole block, or of the plain step.
        source: Which of several drafters made the drafts.
        asleep: Whether this was a plain step, for which no drafter was asked.
    """

    drafted: int
    verified: int
    accepted: int
    confidence: Sequence[float] | None
    seconds: float
    source: str = ""
    asleep: bool = False


class Policy:
    """Drafts always and verifies every draft. A policy of one's own overrides what it wants otherwise."""

    reads_confidence = False
    """Whether :meth:`verify_length` needs the drafter's probabilities: one more wait for the device in each block."""

    def begin(self) -> None:
        """A new text begins."""

    def sleep(self) -> int:
        """How many tokens to decode plainly before the next draft; 0 to draft now."""
        return 0

    def verify_length(self, drafts: Drafts) -> int:
        """How many of the drafts to verify, counted from the first."""
        return drafts.count

    def observe(self, block: BlockRecord) -> None:
        """Learn from a finished block or plain step."""


PolicyFactory = Callable[[], Policy]

POLICIES: Registry[PolicyFactory] = Registry("policy", "dflash.policies")


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


class CostCurve:
    """Seconds of a target pass by its number of tokens, learned from passes of some lengths.

    The curve is a staircase on every device (matrix tiles), so each length has a time of its own; between two known
    lengths it is interpolated. What slows every pass alike (a longer context, a busy machine) moves the level of the
    whole curve, so that a length that was not used for a while does not keep an old time.
    """

    def __init__(self, level_rate: float = 0.3):
        self._shape: dict[int, float] = {}
        self._level, self._level_rate = 1.0, level_rate

    @property
    def known(self) -> bool:
        """Whether anything was observed."""
        return bool(self._shape)

    def observe(self, tokens: int, seconds: float) -> None:
        """Learn from one pass."""
        if tokens not in self._shape:
            self._shape[tokens] = seconds / self._level
            return
        change = _change(seconds / self[tokens])
        self._level *= change**self._level_rate
        self._shape[tokens] *= change ** (1 - self._level_rate)

    def __getitem__(self, tokens: int) -> float:
        """Expected seconds of a pass of ``tokens``. Raises ``KeyError`` before anything was observed.

        Never more than what a longer pass is known to take: a time that was long by chance would not be tried again.
        """
        above = min((n for n in self._shape if n >= tokens), default=None)
        below = max((n for n in self._shape if n <= tokens), default=None)
        if above is None:
            if below is None:
                raise KeyError(tokens)
            return self._shape[below] * self._level
        at_most = min(seconds for n, seconds in self._shape.items() if n >= tokens)
        if below is None:  # as if half of a pass were a fixed cost: hopeful, so that short ones are tried
            return at_most * self._level * (1 + tokens / above) / 2
        part = (tokens - below) / (above - below) if above > below else 0.0
        between = self._shape[below] * (1 - part) + self._shape[above] * part
        return min(between, at_most) * self._level


class Calibration:
    """The chance that a draft is accepted when all before it were, from the drafter's probability of it.

    Drafters rank their own drafts well everywhere, and outside of what they learned they are far too sure. So two
    numbers are fitted online, ``chance = sigmoid(slope * logit(probability) + offset)``, by an extended Kalman filter;
    its forgetting lets it follow a text that changes. Without probabilities only the offset is fitted.
    """

    def __init__(self, forgetting: float = 0.99):
        self._slope, self._offset = 1.0, 0.0
        self._covariance = 0.05, 0.0, 0.5  # of the slope, between both, of the offset
        self._forgetting = forgetting

    def chance(self, probability: float | None) -> float:
        """Between 0 and 1."""
        return _sigmoid(self._slope * _logit(probability) + self._offset)

    def observe(self, probability: float | None, accepted: bool) -> None:
        """Learn from a draft that was reached: every one before it was accepted."""
        x, chance = _logit(probability), self.chance(probability)
        # The curvature of a very sure prediction is so small that one surprise would throw the fit about.
        curvature = max(chance * (1 - chance), 0.02)
        a, b, c = self._covariance
        to_slope, to_offset = a * x + b, b * x + c  # covariance times input, the input being (x, 1)
        gain = 1 / (1 / curvature + to_slope * x + to_offset)
        error = (accepted - chance) / curvature
        self._slope += to_slope * gain * error
        self._offset += to_offset * gain * error
        a, b, c = a - to_slope**2 * gain, b - to_slope * to_offset * gain, c - to_offset**2 * gain
        grow = min(1 / self._forgetting, 2.0 / max(a, c))  # or forgetting would make it believe the last draft only
        self._covariance = a * grow, b * grow, c * grow


def _change(ratio: float) -> float:
    """What to multiply a known time by, after a time of ``ratio`` times it.

    Noise only adds: a core that was taken away once, or arrays that had to be made first. So what is shorter is
    believed sooner than what is longer, and more than twice the known time counts as twice.
    """
    return ratio**0.5 if ratio < 1 else float(min(ratio, 2.0) ** 0.25)


def _logit(probability: float | None) -> float:
    if probability is None:
        return 0.0
    p = min(max(probability, 1e-3), 1 - 1e-3)
    return math.log(p / (1 - p))


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-max(min(x, 30.0), -30.0)))


@register_policy("adaptive")
class Adaptive(Policy):
    """Verifies as many drafts as pay, and lets the drafter sleep where none do.

    ``k`` drafts are expected to commit ``1 + survival(1) + .. + survival(k)`` tokens in the time of a block that
    verifies ``k``; the best ``k`` is the greatest quotient over all ``k``, since the cost of a pass is a staircase.
    Where the last blocks are expected to be slower than plain steps, the drafter sleeps for ``first_nap`` tokens, and
    each time that it wakes in vain for twice as many, up to ``longest_nap``. The next text finds it awake.
    """

    reads_confidence = True

    def __init__(self, first_nap: int = 8, longest_nap: int = 128, memory: float = 0.8):
        self.costs, self.calibration = CostCurve(), Calibration()
        self._first_nap, self._longest_nap, self._memory = first_nap, longest_nap, memory
        self._expected = 0.0  # tokens that the block that was chosen last should commit
        self.begin()

    def begin(self) -> None:
        """A new text begins: the drafter is awake, and what the last blocks brought is forgotten."""
        self._tokens = self._seconds = 0.0  # expected of the last drafted blocks; older ones count less
        self._nap, self._asleep = self._first_nap, 0

    def sleep(self) -> int:
        """What is left of a nap."""
        return self._asleep

    def verify_length(self, drafts: Drafts) -> int:
        """The length that commits most tokens per second; all of the first block, which tells what that costs."""
        if not self.costs.known:
            return drafts.count
        best, best_rate, expected, survival = 0, 0.0, 1.0, 1.0
        for k in range(drafts.count + 1):
            if k > 0:
                survival *= self.calibration.chance(None if drafts.confidence is None else drafts.confidence[k - 1])
                expected += survival
            rate = expected / self.costs[k + 1]
            if rate > best_rate:
                best, best_rate, self._expected = k, rate, expected
        return best

    def observe(self, block: BlockRecord) -> None:
        """Learn times and chances, and decide whether the drafter stays awake."""
        if block.asleep:
            self.costs.observe(PLAIN, block.seconds)
            self._asleep = max(0, self._asleep - 1)
            return
        self.costs.observe(block.verified + 1, block.seconds)
        for i in range(min(block.accepted + 1, block.verified)):
            self.calibration.observe(None if block.confidence is None else block.confidence[i], i < block.accepted)
        self._tokens = self._memory * self._tokens + self._expected
        self._seconds = self._memory * self._seconds + self.costs[block.verified + 1]
        if self._tokens * self.costs[PLAIN] >= self._seconds:
            self._nap = self._first_nap
        else:
            self._asleep, self._nap = self._nap, min(2 * self._nap, self._longest_nap)
            self._tokens = self._seconds = 0.0
