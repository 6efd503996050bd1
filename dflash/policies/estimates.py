"""What a policy learns from the blocks that it sees: how long they take, and how likely drafts are accepted.

Knows seconds and chances. Must not know tokens, models, or what is decided from the estimates.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

PLAIN = -1
"""Stands for a plain step in :class:`BlockCosts`: one token, the next pass under way before it is read."""

LONGEST = 64
"""Drafts of the longest block that has a time of its own; longer ones count as this long."""


class BlockCosts:
    """Seconds of a block by the number of drafts that it verifies, learned from blocks of some lengths.

    A Kalman filter over the logarithm of every length's time (Rasmussen and Williams 2006, chapter 2, with a random
    walk in between). A common level lets one observation move all: a longer context, a busy machine. A kernel that
    falls off with the distance of two lengths tells of lengths that were not tried, and leaves room for steps, since
    on every device the curve is a staircase (matrix tiles). Uncertainty grows while a length is not used.

    Some machines time the same block alike to a few per cent, others to a third. So the noise is estimated too, from
    the errors of what was expected. Noise has another sign each time; errors of one sign in a row are a change.
    """

    level, shape, distance, plain = 1.0, 0.4, 6.0, 0.3  # standard deviations of logarithms; lengths
    level_drift, shape_drift = 0.03, 0.02  # the same, a block
    least_noise, noise_rate = 0.1, 0.05  # the same; what a block counts in the mean of its square
    familiar = 0.07  # the same, of a length that is known as well as any

    def __init__(self) -> None:
        position = np.arange(LONGEST + 2)  # plain step, no draft, one draft, ...
        kernel = np.exp(-np.abs(position[:, None] - position) / self.distance)
        self._covariance = self.level**2 + self.shape**2 * kernel
        self._covariance[0, 0] += self.plain**2
        self._drift = self.level_drift**2 + self.shape_drift**2 * kernel
        self._mean: np.ndarray | None = None
        self._tried: set[int] = set()
        self._noise = self.least_noise
        self._error = self._change = 0.0  # the last error in standard deviations; mean product of two in a row

    @property
    def known(self) -> bool:
        """Whether anything was observed."""
        return self._mean is not None

    def tried(self, drafts: int) -> bool:
        """Whether a block that verifies this many was observed."""
        return _position(drafts) in self._tried

    def observe(self, drafts: int, seconds: float) -> None:
        """Learn that a block which verified ``drafts`` drafts took ``seconds``."""
        i, logarithm = _position(drafts), math.log(max(seconds, 1e-9))
        self._tried.add(i)
        if self._mean is None:  # as if half of this block were a fixed cost: hopeful, so that short ones are tried
            share = np.arange(LONGEST + 2) / (i or 1)
            self._mean = np.log((1 + share) / 2) - math.log((1 + share[i]) / 2) + logarithm
        self._covariance += self._drift
        # Noise only adds, such as a core that was taken away once: more than twice the known time counts as twice.
        error = min(max(logarithm - self._mean[i], -math.log(2)), math.log(2))
        self._follow_noise(error, self._covariance[i, i])
        if self._change > 1:  # the machine has changed: what was known is worth less
            self._covariance += 20 * self._change * self._drift
        gain = self._covariance[:, i] / (self._covariance[i, i] + self._noise**2)
        self._mean = self._mean + gain * error
        self._covariance -= np.outer(gain, self._covariance[i])
        self._tell()

    def _follow_noise(self, error: float, variance: float) -> None:
        """Learn of noise and change from the error of an expectation that has this ``variance``, noise aside."""
        both = variance + self._noise**2
        last, self._error = self._error, error / math.sqrt(both)
        self._change += 0.3 * (last * self._error - self._change)
        share = self._noise**2 / both  # of the error that is noise
        self._noise = math.sqrt(max(self._noise**2 + self.noise_rate * share * (error**2 - both), self.least_noise**2))

    def _tell(self) -> None:
        """Seconds of every length, once: they are asked for between two passes, when the device waits."""
        assert self._mean is not None
        deviations = np.sqrt(np.maximum(np.diagonal(self._covariance), 0.0))
        self._seconds = np.exp(self._mean)
        self._hoped = np.exp(self._mean - np.maximum(deviations - self.familiar, 0.0))
        plain = self._seconds if self.tried(PLAIN) else self._hoped
        self._plain_step = min(float(plain[_position(PLAIN)]), float(self._seconds[sorted(self._tried)].min()))

    def expected(self, drafts: int) -> float:
        """Seconds. Raises ``RuntimeError`` before anything was observed."""
        self._require_known()
        return float(self._seconds[_position(drafts)])

    def expected_to(self, most: int) -> np.ndarray:
        """The same of blocks that verify 0, 1, .. ``most`` drafts."""
        self._require_known()
        return self._seconds[_positions(most)]

    def hoped_to(self, most: int) -> np.ndarray:
        """The same if it goes as well as one standard deviation: what is not known well gets tried.

        Where the deviation is ``familiar``, trying the length again would tell little.
        """
        self._require_known()
        return self._hoped[_positions(most)]

    def plain_step(self) -> float:
        """Seconds of a plain step; hopefully, as long as none was observed.

        No more than those of a block, which does more: where one seems quicker, plain steps were observed while the
        machine was slow.
        """
        self._require_known()
        return self._plain_step

    def seconds(self) -> dict[int, float]:
        """Expected seconds of every length, :data:`PLAIN` too; nothing before anything was observed."""
        return {i - 1: float(x) for i, x in enumerate(self._seconds)} if self.known else {}

    @classmethod
    def from_seconds(cls, seconds: Mapping[int, float]) -> "BlockCosts":
        """Costs that were learned before, by :meth:`seconds`: their shape is known, their level less.

        Raises ``KeyError`` if a length is missing, and ``ValueError`` for a time that is not positive and finite.
        """
        costs = cls()
        costs._mean = np.array([math.log(seconds[i - 1]) for i in range(LONGEST + 2)])
        if not np.isfinite(costs._mean).all():
            raise ValueError("A block takes a finite time.")
        costs._covariance = 0.3**2 + 9 * costs._drift
        costs._tried = set(range(LONGEST + 2))
        costs._tell()
        return costs

    def _require_known(self) -> None:
        if self._mean is None:
            raise RuntimeError("No block was observed, so no time is known.")


class DraftCosts:
    """Seconds until some number of drafts are known: a part that is always paid, and one for each draft.

    A Kalman filter over both parts, in proportion to the first time that was observed. As long as fewer than
    ``trials`` blocks had another number of drafts than the first, nothing tells the two parts from each other.
    """

    noise, drift, trials = 0.2, 1e-4, 3

    def __init__(self) -> None:
        self._others = 0
        self._unit: tuple[int, float] | None = None  # drafts and seconds of the first observation
        self._mean = np.array([0.5, 0.5])
        self._covariance = np.eye(2) / 4

    def observe(self, drafts: int, seconds: float) -> None:
        """Learn that ``drafts`` drafts, one at least, were known after ``seconds``."""
        if self._unit is None:
            self._unit = drafts, max(seconds, 1e-9)
        self._others += drafts != self._unit[0] or drafts == 1  # of a single draft there is nothing to tell apart
        inputs = self._inputs(drafts)
        self._covariance = self._covariance + self.drift * np.eye(2)
        expected = float(inputs @ self._mean)
        error = min(seconds / self._unit[1], 2 * max(expected, 0.1)) - expected  # a core taken away is no draft
        gain = self._covariance @ inputs / (inputs @ self._covariance @ inputs + (self.noise * max(expected, 0.1)) ** 2)
        self._mean = np.maximum(self._mean + gain * error, 0.0)
        self._covariance = self._covariance - np.outer(gain, inputs @ self._covariance)

    @property
    def known(self) -> bool:
        """Whether the two parts can be told from each other."""
        return self._others >= self.trials

    def trial(self, most: int) -> int:
        """Of ``most`` drafts and half of those that there were first, a number that tells the two parts apart."""
        return most if self._unit is None or most < self._unit[0] else max(1, self._unit[0] // 2)

    def parts(self) -> tuple[float, float] | None:
        """Seconds that are always paid, and those of each draft; ``None`` as long as they are not known."""
        if self._unit is None or not self.known:
            return None
        drafts, seconds = self._unit
        return float(self._mean[0]) * seconds, float(self._mean[1]) * seconds / drafts

    @classmethod
    def from_parts(cls, always: float, each: float) -> "DraftCosts":
        """Costs that were learned before, by :meth:`parts`: their proportion is known, their level less.

        Raises ``ValueError`` unless both are finite, neither is negative and one is positive.
        """
        if not (min(always, each) >= 0 and 0 < always + each < math.inf):
            raise ValueError("Drafts take a finite time.")
        costs = cls()
        costs._others, costs._unit = cls.trials, (1, always + each)
        costs._mean = np.array([always, each]) / (always + each)
        costs._covariance = 0.3**2 * np.outer(costs._mean, costs._mean) + 9 * cls.drift * np.eye(2)
        return costs

    def expected(self, drafts: int) -> float:
        """Seconds; 0 before anything was observed."""
        return float(self.expected_to(drafts)[drafts])

    def expected_to(self, most: int) -> np.ndarray:
        """The same of 0, 1, .. ``most`` drafts."""
        if self._unit is None:
            return np.zeros(most + 1)
        return (self._mean[0] + self._mean[1] * np.arange(most + 1) / self._unit[0]) * self._unit[1]

    def _inputs(self, drafts: int) -> np.ndarray:
        assert self._unit is not None
        return np.array([1.0, drafts / self._unit[0]])


def _position(drafts: int) -> int:
    return min(drafts, LONGEST) + 1


def _positions(most: int) -> np.ndarray:
    return np.minimum(np.arange(most + 1), LONGEST) + 1


class Calibration:
    """The chance that a draft is accepted when all before it were, from the drafter's probability of it.

    Drafters rank their own drafts well everywhere, and outside of what they learned they are far too sure. So two
    numbers are fitted online, ``chance = sigmoid(slope * logit(probability) + offset)``, by an extended Kalman filter;
    its forgetting lets it follow a text that changes. Without probabilities only the offset is fitted.
    """

    widest = 6.0  # variance of the offset at which nothing of it is known

    def __init__(self, forgetting: float = 0.99):
        self._slope, self._offset = 1.0, 0.0
        self._covariance = 0.05, 0.0, 0.5  # of the slope, between both, of the offset
        self._forgetting = forgetting

    def chance(self, probability: float | None) -> float:
        """Between 0 and 1."""
        return 1 / (1 + math.exp(-max(min(self._slope * _logit(probability) + self._offset, 30.0), -30.0)))

    def chances(self, count: int, probabilities: Sequence[float] | None) -> np.ndarray:
        """The same of ``count`` drafts."""
        if probabilities is None:
            return np.full(count, self.chance(None))
        p = np.minimum(np.maximum(np.array(probabilities[:count]), 1e-3), 1 - 1e-3)
        z = self._slope * np.log(p / (1 - p)) + self._offset
        return 1 / (1 + np.exp(-np.maximum(np.minimum(z, 30.0), -30.0)))

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
        grow = max(1.0, min(1 / self._forgetting, 2.0 / max(a, c)))  # it would else believe the last draft only
        self._covariance = a * grow, b * grow, c * grow

    def forget(self, tokens: int) -> None:
        """The text went on for ``tokens`` tokens that told nothing: it may have changed."""
        a, b, c = self._covariance
        self._covariance = a, b, min(c + 0.2 * tokens, max(c, self.widest))


def _logit(probability: float | None) -> float:
    if probability is None:
        return 0.0
    p = min(max(probability, 1e-3), 1 - 1e-3)
    return math.log(p / (1 - p))
