"""Simulated decoding for policies: every cost and chance is known, and the clock can be disturbed."""

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from statistics import fmean

from dflash import BlockRecord, Drafts, Policy
from dflash.core.trees import chain

PLAIN = -1
"""What :func:`run` notes for a plain step, in place of a number of drafts."""

Disturbance = Callable[[int, bool], float]
"""Factor on a measured time, by the number of the measurement and whether it is a plain step's."""


def staircase(*seconds: float) -> Callable[[int], float]:
    """A pass of 1, 2, ... tokens; beyond the last one given it goes on as the last four did."""

    def cost(tokens: int) -> float:
        slope = (seconds[-1] - seconds[max(len(seconds) - 5, 0)]) / 4
        return seconds[tokens - 1] if tokens <= len(seconds) else seconds[-1] + slope * (tokens - len(seconds))

    return cost


def through(points: dict[int, float]) -> Callable[[int], float]:
    """Straight lines between passes of so many tokens; the last one goes on."""

    def cost(tokens: int) -> float:
        segments = list(pairwise(sorted(points)))
        a, b = next((pair for pair in segments if tokens <= pair[1]), segments[-1])
        return points[a] + (points[b] - points[a]) * (tokens - a) / (b - a)

    return cost


def tiles(size: int, base: float, step: float) -> Callable[[int], float]:
    """A fixed cost, and one for every tile of tokens that is begun."""
    return lambda tokens: base + step * -(-tokens // size)


@dataclass(frozen=True)
class World:
    """One drafter on one machine.

    Args:
        plain: Seconds of a plain step.
        passes: Seconds of a target pass, by its number of tokens in all rows.
        chances: That draft 1, 2, ... is right if those before it are; the last one holds for all further drafts.
        draft: Seconds of drafting, whatever the length.
        each: Seconds that each draft of a row adds.
        most: Drafts of the longest block.
        offers: Share of the blocks for which the drafter proposes anything.
        parents: Makes each proposal a tree: the draft that each one follows.
        rows: Texts that are decoded at once.
    """

    plain: float
    passes: Callable[[int], float]
    chances: Sequence[float]
    draft: float = 0.0
    each: float = 0.0
    most: int = 15
    offers: float = 1.0
    parents: Sequence[int] | None = None
    rows: int = 1

    def chance(self, position: int) -> float:
        return self.chances[min(position, len(self.chances) - 1)]

    def seconds(self, drafts: int) -> float:
        """A block that drafts and verifies so many tokens in each row."""
        return self.draft + self.each * self.rows * drafts + self.passes(self.rows * (drafts + 1))

    @cache  # noqa: B019 (worlds are few, and live as long as their tests)
    def tokens(self, drafts: int) -> float:
        """What such a block commits on average."""
        survival, elder = [1.0], {}
        for i, parent in enumerate(self.parents or chain(drafts)):
            first = elder.get(parent, 1.0)  # that no sibling before it is right
            survival.append(self.chance(i) * first * survival[parent + 1])
            elder[parent] = first * (1 - self.chance(i))
        return sum(survival[: drafts + 1])

    def right(self, parents: Sequence[int], clock: "Clock") -> set[int]:
        """Drafts that are what the target would write after those that they follow."""
        if self.parents is None:  # a chain's fates are spread evenly, so that luck does not hide what was decided
            reached = clock.even(0.618034)
            return {i for i in range(len(parents)) if self.tokens(i + 1) - self.tokens(i) > reached}
        right = set[int]()
        for i, parent in enumerate(parents):
            if clock.draw.random() < self.chance(i) and all(parents[j] != parent for j in right):
                right.add(i)
        return right

    def block(self, drafts: int) -> tuple[float, float]:
        """Tokens and seconds, on average, of a block for which so many drafts are asked."""
        silent = 1 - self.offers
        return self.offers * self.tokens(drafts) + silent, self.offers * self.seconds(drafts) + silent * self.seconds(0)

    def speed(self, drafts: int) -> float:
        """Tokens per second of a fixed length; of plain decoding, where that is 0."""
        tokens, seconds = self.block(drafts) if drafts else (1.0, self.plain)
        return tokens / seconds

    @property
    def best(self) -> float:
        """Tokens per second of the best fixed length, plain decoding among them."""
        return max(map(self.speed, range(self.most + 1)))

    def but(self, **changes: object) -> "World":
        return replace(self, **changes)

    def at(self, rows: int) -> "World":
        """The same with so many texts at once."""
        return self.but(rows=rows, plain=self.passes(rows))


@dataclass
class Clock:
    """Draws the fates of drafts, and measures with noise and disturbances."""

    seed: int = 0
    noise: float = 0.0
    disturb: Disturbance = lambda number, plain: 1.0

    def __post_init__(self) -> None:
        self.draw, self._measured, self._even = random.Random(self.seed), 0, defaultdict(float)

    def even(self, step: float) -> float:
        """The next number of an evenly spread sequence from 0 to 1."""
        self._even[step] = (self._even.get(step, 0.37 * self.seed) + step) % 1
        return self._even[step]

    def measure(self, seconds: float, plain: bool) -> float:
        self._measured += 1
        return seconds * self.disturb(self._measured - 1, plain) * self.draw.lognormvariate(0, self.noise)


def decode(world: World, policy: Policy, tokens: float, clock: Clock, decided: list[int] | None = None) -> float:
    """Decode ``tokens`` tokens or a few more; tokens per second, each block counted with its true time and average.

    ``decided`` gets the number of verified drafts of each block, and :data:`PLAIN` for a plain step.
    """
    at = spent = 0.0
    while at < tokens:
        steps = _pause(world, policy, clock) if policy.sleep() > 0 else [_block(world, policy, clock)]
        for length, committed, seconds in steps:
            at, spent = at + committed, spent + seconds
            if decided is not None:
                decided.append(length)
            if at >= tokens:
                break
    return at / spent


def _pause(world: World, policy: Policy, clock: Clock) -> Iterator[tuple[int, float, float]]:
    """As ``plain_steps`` decodes: the first step waits for two passes, the last one finds its own computed."""
    left, begins = policy.sleep(), True
    while left > 0:
        left -= 1
        seen = world.plain * (1 + 0.8 * begins - 0.8 * (left == 0))
        policy.observe(BlockRecord(0, 0, 0, 0, None, clock.measure(seen, True), asleep=True, rows=world.rows))
        yield PLAIN, 1.0, world.plain
        begins = False
        if left > 1:
            left = min(left, max(1, policy.sleep()))


def _block(world: World, policy: Policy, clock: Clock) -> tuple[int, float, float]:
    asked = min(policy.draft_length(world.most), world.most)
    offered = asked if clock.even(0.7549) < world.offers else 0
    parents = chain(offered) if world.parents is None else world.parents[:offered]
    drafts = Drafts(offered, parents=None if world.parents is None else parents)
    verified = min(policy.verify_length(drafts), offered)
    accepted, known = [], []
    for _ in range(world.rows):
        right, on_path = world.right(parents, clock), {-1}
        for i, parent in enumerate(parents[:verified]):
            on_path |= {i} if i in right and parent in on_path else set()
        accepted.append(len(on_path) - 1)
        known.append({i: i in right for i, parent in enumerate(parents) if parent in on_path})
    shares = {i: fmean(row[i] for row in known if i in row) for i in set().union(*known)}
    seen, matched = clock.measure(world.seconds(verified), False), min(sum(row.values()) for row in known)
    policy.observe(BlockRecord(offered, verified, max(accepted), matched, None, seen, outcomes=shares, rows=world.rows))
    return verified, *world.block(verified if offered else asked)
