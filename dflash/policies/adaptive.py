"""The default policy: the number of drafts with most tokens per second, and plain decoding where none pays.

A block of ``k`` drafts commits ``1 + a_1 + a_1 a_2 + .. + a_1 .. a_k`` tokens on average, where ``a_i`` is the
acceptance rate of draft ``i`` if those before it are accepted. Every block updates these rates and its length's time,
whatever was decided, and the policy chooses the ``k`` with most tokens per second. If even that loses against plain
decoding, drafting pauses until an attempt costs little. ``dflash/docs/policies.md`` explains rules and guarantees.
"""

import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from .base import BlockRecord, Drafts, Policy, register_policy

# Candidate numbers of drafts, besides all there are. With the anchor they fill the tiles of common kernels.
LENGTHS = (1, 2, 3, 4, 5, 7, 11, 15, 23, 31, 47, 63)

# Times. The second shortest of the newest few counts: noise only adds time, and any single time may be an outlier.
NEWEST, ENOUGH = 6, 3  # times kept per length, and how many make a length known
AGE = 200  # tokens after which a time is old; without two newer ones the length is unknown again
SLOPE = 0.05  # plain steps that each draft beyond the longest known pass is assumed to add to a block
REFERENCE, REFERENCE_STEPS = 192, ENOUGH + 2  # blocks after which plain steps are timed again, and how many
SUSPECT = 1.25  # a plain step that takes this many times a block's time is timed again

# Acceptance.
MEMORY = 32  # blocks after which an outcome counts 1/e
PRIOR, WEIGHT = 0.7, 2.0  # rate of a new drafter; blocks that it, or the rate of the draft before, counts for
EVIDENCE = 6.0  # blocks that earlier outcomes count for at most in a new request and after a pause

# Pauses.
SHARE = 0.02  # share of the time that new attempts may cost while drafting does not pay
SHORTEST, LONGEST = 4, 96  # tokens of a pause
RECENT = 8  # recent blocks whose drafters decide whether drafting pays


class Times:
    """Seconds of the newest blocks of one length, or of plain steps."""

    def __init__(self) -> None:
        self._newest: deque[tuple[int, float]] = deque(maxlen=NEWEST)
        self.typical = self.hint = math.inf
        """The second shortest of enough times, and the same or the shorter of only two; infinite before."""

    def add(self, now: int, seconds: float) -> None:
        """Add the time of a block that ended after ``now`` tokens."""
        self._newest.append((now, max(seconds, 1e-9)))
        if len(self._newest) > 1:
            self.hint = sorted(seconds for _, seconds in self._newest)[min(1, len(self._newest) - 2)]
        if len(self._newest) >= ENOUGH:
            self.typical = self.hint

    def known(self, now: int) -> bool:
        """Whether there are enough times, at least two of them recent."""
        return len(self._newest) >= ENOUGH and now - self._newest[-2][0] <= AGE


@dataclass
class Record:
    """What is known about one drafter: times by width of the batch and length, acceptance by position.

    The width is the number of rows, rounded up to 1, 2, 4, 8, ... Whether drafts are right does not depend on it.
    """

    times: dict[int, dict[int, Times]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(Times)))
    right: list[float] = field(default_factory=lambda: [PRIOR * WEIGHT])
    tried: list[float] = field(default_factory=lambda: [WEIGHT])
    parents: Sequence[int] | None = None  # the last tree's; of chains there are none
    reach: int = 0
    """Tokens of the longest pass to try: twice the drafts that were right as a whole, or in part at a known time."""

    def learn(self, now: int, block: BlockRecord, width: int) -> Times:
        """Add a block's time and its drafts' outcomes; returns the times of its length."""
        times = self.times[width][block.verified]
        times.add(now, block.seconds)
        # With many rows a draft may cost as much as a step, so a batch tries a longer block once the time is known.
        whole = block.accepted == block.verified and block.rows == 1
        if whole or (block.accepted and times.typical < math.inf):
            self.reach = max(self.reach, width * (2 * block.verified + 1))
        keep, new = 1 - 1 / MEMORY, [0.0] * (max(block.outcomes, default=-1) + 1 - len(self.tried))
        self.right, self.tried = [keep * n for n in self.right] + new, [keep * n for n in self.tried] + new
        for position, right in block.outcomes.items():
            self.right[position] += right
            self.tried[position] += 1
        return times

    def limit_evidence(self) -> None:
        """Let earlier outcomes count for :data:`EVIDENCE` blocks at most."""
        for position, tried in enumerate(self.tried):
            self.right[position] *= EVIDENCE / max(tried, EVIDENCE)
            self.tried[position] = min(tried, EVIDENCE)

    def tokens(self, most: int) -> list[float]:
        """Expected tokens that a block commits, by its number of drafts from 0 to ``most``."""
        rate, survival, tokens = PRIOR, [1.0], [1.0]
        parents = range(-1, most - 1) if self.parents is None else self.parents
        for i in range(most):
            if i < len(self.tried):  # beyond, the last rate applies
                weight = WEIGHT if i else 0.0
                rate = (self.right[i] + weight * rate) / (self.tried[i] + weight)
            # A node that no tree had yet is assumed to be as good as the last known one.
            survival.append(rate * survival[parents[i] + 1] if i < len(parents) else survival[i])
            tokens.append(tokens[-1] + survival[-1])
        return tokens

    def seconds(self, most: int, now: int, plain: Mapping[int, Times], width: int) -> list[float]:
        """Seconds of a block with 0 to ``most`` drafts: linear between known lengths, optimistic beyond.

        At a new width, blocks longer than those known take as long as passes of as many tokens did at other widths. An
        unknown length keeps its old or few times if they are shorter, so none is given up for good or forgotten.
        """
        known: dict[float, float] = {k: t.typical for k, t in self.times[width].items() if t.known(now)}
        least = min([plain[width].typical, *known.values()])  # no block is faster than a plain step
        known[0] = least = least if least < math.inf else 1.0  # if nothing was timed yet, any unit will do
        longest = max(known)
        for other, steps in plain.items() if now <= AGE else ():
            for k, t in ({0: steps} | self.times[other]).items():
                length = other * (k + 1) / width - 1  # of a block here with as many tokens
                if length > longest and t.typical < math.inf:
                    known[length] = min(max(t.typical, least), known.get(length, math.inf))
        lengths = sorted(known)
        seconds: list[float] = np.interp(range(most + 1), lengths, [known[k] for k in lengths]).tolist()
        for k in range(most + 1):
            seconds[k] += SLOPE * least * max(k - lengths[-1], 0)
            if k in self.times[width] and not self.times[width][k].known(now):
                seconds[k] = min(seconds[k], self.times[width][k].hint)
        return seconds


@register_policy("adaptive")
class Adaptive(Policy):
    """Drafts as many tokens as pay. Measurements carry over to later requests, which begin with drafting."""

    def __init__(self) -> None:
        self._rows = self._width = 1
        self._plain, self._silent = defaultdict[int, Times](Times), Times()  # steps by width; blocks without proposals
        self._drafters: dict[str, Record] = {}
        self._recent: deque[str | None] = deque(maxlen=RECENT)  # sources of recent blocks; None: nothing was proposed
        self._now, self._blocks = defaultdict[int, int](int), 0  # tokens by width; blocks since the last plain step
        self._steps, self._last_step = 0, 0.0  # plain steps of this pause so far; seconds of the last one
        self._pause, self._losing = 0, False  # plain steps before the next attempt; whether blocks would lose
        self._retrying = False  # after a pause, whether drafts are right again is asked with a length that is known
        self._why: dict[str, float] = {}

    def begin(self) -> None:
        """Draft again."""
        self._steps, self._retrying = 0, self._losing
        self.wake()

    def wake(self) -> None:
        """End a pause; earlier outcomes count little from now on."""
        self._pause = 0
        for drafter in self._drafters.values():
            drafter.limit_evidence()

    def sleep(self) -> int:
        """What is left of a pause, or of the plain steps that have to be timed first: blocks must beat them."""
        unknown = self._plain[self._width].typical == math.inf
        return max(self._pause, REFERENCE_STEPS - self._steps if unknown else 0)

    def draft_length(self, most: int) -> int:
        """The best length; with several drafters the longest, as it is not known yet which one will draft."""
        return max((self._best(source, most)[0] for source in self._drafters), default=min(1, most))

    def verify_length(self, drafts: Drafts) -> int:
        """The best length for the drafter that made them."""
        if not drafts.count:
            return 0
        self._drafters.setdefault(drafts.source, Record()).parents = drafts.parents
        length, tokens, seconds = self._best(drafts.source, drafts.count)
        self._why = {"tokens": tokens, "seconds": seconds, "plain_seconds": self._plain[self._width].typical}
        return length

    def observe(self, block: BlockRecord) -> None:
        """Learn times and outcomes, and decide whether to pause."""
        if block.rows != self._rows:
            self._steps, self._rows, self._width = 0, block.rows, 1 << (block.rows - 1).bit_length()
        plain = self._plain[self._width]
        self._now[self._width] += block.accepted + 1
        if block.asleep:
            # The next pass starts before a token is read: a pause's first step waits for two passes, its last for none.
            if self._steps > 1:
                plain.add(self._now[self._width], self._last_step)
            self._steps, self._last_step = self._steps + 1, block.seconds
            self._blocks, self._pause = 0, max(self._pause - 1, 0)
            self._why = {"next_attempt": self.sleep()}
            if plain.typical == math.inf:
                return
            if self._losing and (self._pause == 0 or not self._loses()):
                self._retrying = True
                self.wake()
            elif self._pause == 0 and self._loses():
                self._pause, self._losing = self._pause_length(), True
            return
        self._blocks, self._steps, self._retrying = self._blocks + 1, 0, False
        self._recent.append(block.source if block.drafted else None)
        if block.drafted:
            times = self._drafters.setdefault(block.source, Record()).learn(self._now[self._width], block, self._width)
        else:
            (times := self._silent).add(self._now[self._width], block.seconds)
        if not block.matched and self._loses():
            self._pause, self._losing = self._pause_length(), True
        # A plain step does less than a block. If it seems to take much longer, the machine was slow then.
        elif self._blocks >= (RECENT if SUSPECT * times.typical <= plain.typical < math.inf else REFERENCE):
            self._pause, self._losing = REFERENCE_STEPS, False

    def why(self) -> dict[str, float]:
        """A block's expected tokens and seconds and a plain step's seconds; in a pause, the tokens left of it."""
        return dict(self._why)

    def _best(self, source: str | None, most: int = LENGTHS[-1]) -> tuple[int, float, float]:
        """The length with most tokens per second for one drafter, and both of these; ``None``: nothing is proposed."""
        plain = self._plain[self._width].typical
        if source is None:
            return 0, 1.0, plain if self._silent.typical == math.inf else self._silent.typical
        drafter, now = self._drafters[source], self._now[self._width]
        known = (k for k, times in drafter.times[self._width].items() if times.known(now))
        most = min(most, max(known, default=1) if self._retrying else max(drafter.reach // self._width - 1, 1))
        tokens, seconds = drafter.tokens(most), drafter.seconds(most, now, self._plain, self._width)
        best = max((k for k in (*LENGTHS, most) if k <= most), key=lambda k: tokens[k] / seconds[k])
        return best, tokens[best], seconds[best]

    def _loses(self) -> bool:
        """Whether plain steps are faster than the best blocks of the recent blocks' drafters."""
        best, plain = {source: self._best(source) for source in {*self._recent}}, self._plain[self._width].typical
        return sum(best[source][1] * plain - best[source][2] for source in self._recent) < 0

    def _pause_length(self) -> int:
        """The tokens after which one failed block of a single draft costs :data:`SHARE` of the time."""
        _, _, seconds = self._best(self._recent[-1], 1)
        return min(max(math.ceil((seconds / self._plain[self._width].typical - 1) / SHARE), SHORTEST), LONGEST)
