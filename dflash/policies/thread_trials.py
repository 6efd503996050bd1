"""Whether blocks would be quicker with another thread count: now and then one of them is decoded with it.

Knows counts, and the seconds of blocks by their number of drafts. Must not know the BLAS, passes or tokens.

A trial costs what its block takes longer than usual, so an expensive count is tried seldom. One block's time says
little, as noise moves it by a third; so a count is taken only after several quick blocks in a row.
"""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

GAIN = 0.87  # of the present time: what is not clearly quicker is not worth a change, nor noise a flapping

_QUICK = 3  # trials in a row that were clearly quicker: the count is taken
_PERIOD = 40  # decode this many times as long as a count's last trial cost before its next: 2.5 % of the time
_PERIOD_IF_CHANGED = 10  # the same where blocks have become slow
_BLOCKS = 64  # from trial to trial at least, as a trial can cost nothing
_SLOW, _SLOW_PASSES = 1.5, 4  # so many blocks in a row, each so many times the usual time, are a change
_KNOWN = 4  # blocks from which the usual time of their number of drafts is known
_WEIGHT = 0.1  # of the last block in the usual time of its number of drafts, and in how all numbers stand to it


@dataclass
class _Average:
    """The mean of a few seconds, and then the last ones count most."""

    seconds: float
    blocks: int

    def add(self, seconds: float) -> None:
        self.blocks += 1
        self.seconds += max(1 / self.blocks, _WEIGHT) * (seconds - self.seconds)


@dataclass
class UsualSeconds:
    """What a block takes with the present count, by its number of drafts.

    The last blocks tell for all numbers of drafts whether they take longer or shorter than they did: the context of
    another text may be shorter.
    """

    _averages: dict[int, _Average] = field(default_factory=dict)
    _level: float = 1.0  # the last blocks' seconds to the averages
    _slow: list[tuple[int, float, float]] = field(default_factory=list)  # drafts, seconds, and these to the usual ones

    def expected(self, drafted: int) -> float | None:
        """Seconds of a block of ``drafted`` tokens; ``None`` where too few were seen."""
        average = self._averages.get(drafted)
        return None if average is None or average.blocks < _KNOWN else self._level * average.seconds

    def learn(self, drafted: int, seconds: float) -> bool:
        """Learn from a block, and tell whether blocks have become slow.

        Slow blocks in a row are kept apart until it is known whether they are noise or a change.
        """
        usual = self.expected(drafted)
        if usual is None:
            self._add(drafted, seconds)
        elif seconds <= _SLOW * usual:
            for slow_drafted, slow_seconds, _ in self._slow:
                self._add(slow_drafted, slow_seconds)
            self._add(drafted, seconds)
            self._slow = []
        else:
            self._slow.append((drafted, seconds, seconds / usual))
        if len(self._slow) < _SLOW_PASSES:
            return False
        self.scale(statistics.median(ratio for _, _, ratio in self._slow))
        return True

    def scale(self, ratio: float) -> None:
        """All blocks take ``ratio`` times as long from now on; how long exactly is soon learned anew."""
        known = {drafted: average for drafted, average in self._averages.items() if average.blocks >= _KNOWN}
        self._averages = {drafted: _Average(ratio * self._level * a.seconds, _KNOWN) for drafted, a in known.items()}
        self._level, self._slow = 1.0, []

    def _add(self, drafted: int, seconds: float) -> None:
        average = self._averages.setdefault(drafted, _Average(seconds / self._level, 0))
        if average.blocks >= _KNOWN:
            self._level += _WEIGHT * (seconds / average.seconds - self._level)
        average.add(seconds / self._level)  # or what the level follows would count twice


@dataclass
class _Other:
    """A count that is not the present one."""

    cost: float  # seconds that its last trial took longer than usual
    credit: float = 0.0  # seconds of decoding that its trials were not charged for yet; an early one leaves a debt

    def charge(self, period: float) -> None:
        self.credit = min(self.credit - period * self.cost, 0.0)


class Trials:
    """Which of the usable counts the next block is decoded with.

    Args:
        seconds: Of a pass with each usable count.
        count: The present one.
    """

    def __init__(self, seconds: Mapping[int, float], count: int):
        self.count = count
        """The present count."""
        costs = {other: max(s - seconds[count], 0.0) for other, s in seconds.items() if other != count}
        self._others = {other: _Other(cost) for other, cost in costs.items()}  # the longest untried first
        self._usual = UsualSeconds()
        self._last: int | None = None  # drafts of the last block: the next probably has as many
        self._blocks = 0  # since the last trial
        self._early = 0  # trials that come early, as blocks have become slow
        self._trying: int | None = None  # the count of the present series of trials
        self._ratios: list[float] = []  # of that series: seconds to the usual ones

    def due(self) -> int | None:
        """The count to try with the next block; ``None`` where that runs with the present one."""
        if self._last is None or self._usual.expected(self._last) is None:
            return None
        if self._trying is not None:
            return self._trying
        if self._blocks < _BLOCKS and not self._early:
            return None
        period = self._share(_PERIOD_IF_CHANGED if self._early else _PERIOD)
        return next((count for count, other in self._others.items() if other.credit >= period * other.cost), None)

    def observe(self, drafted: int, seconds: float) -> None:
        """Learn from a block of ``drafted`` tokens that was decoded with the present count."""
        self._last = drafted
        self._blocks += 1
        for other in self._others.values():
            other.credit += seconds
        if self._usual.learn(drafted, seconds):
            self._early = len(self._others)
            self._others = dict(sorted(self._others.items(), key=lambda item: item[1].cost))

    def judge(self, count: int, drafted: int, seconds: float) -> None:
        """Learn from a block that was decoded with a ``count`` that was :meth:`due`; it may become the present one."""
        self._last, self._blocks = drafted, 0
        usual, other = self._usual.expected(drafted), self._others[count]
        if self._trying is None:
            other.charge(self._share(_PERIOD))
        if usual is None:
            return
        other.cost = max(seconds - usual, 0.0)
        self._ratios.append(seconds / usual)
        self._trying = count if self._ratios[-1] < GAIN else None
        if self._trying is None:
            self._others[count] = self._others.pop(count)
            self._early, self._ratios = max(self._early - 1, 0), []
        elif len(self._ratios) == _QUICK:
            self._take(count, usual - seconds)

    def _share(self, period: float) -> float:
        """The period of one count, so that all of them together keep to ``period``."""
        return period * len(self._others)

    def _take(self, count: int, gained: float) -> None:
        del self._others[count]
        for other in self._others.values():
            other.cost += gained
        self._others[self.count] = _Other(gained)
        self._usual.scale(statistics.median(self._ratios))
        self.count, self._early, self._trying, self._ratios = count, 0, None, []
