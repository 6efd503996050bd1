"""The number of drafts that commits most tokens per second, and naps for a drafter that gains nothing.

Knows seconds and chances, learned (``estimates.py``) from the blocks that are decoded anyway. Must not know tokens,
text or models.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..errors import DFlashError
from ..files import read_json, write_json
from .base import BlockRecord, Drafts, Policy, register_policy
from .estimates import PLAIN, BlockCosts, Calibration, DraftCosts


@register_policy("adaptive")
class Adaptive(Policy):
    """Verifies as many drafts as pay, and lets the drafter sleep where none do.

    ``k`` drafts are expected to commit ``1 + survival(1) + .. + survival(k)`` tokens in the time of a block that
    verifies ``k``. The best ``k``, tried over all since costs are a staircase, brings most tokens beyond what the last
    blocks usually made of that time: over texts whose blocks differ, this and not the greatest quotient of each block
    commits most tokens per second (Dinkelbach 1967). Where the very last blocks are expected to be slower than plain
    steps, the drafter sleeps: ``first_nap`` tokens at least (in replays of twelve texts unlike its training the slowest
    ran at 0.91 of plain mlx_lm's speed with two, at 0.98 with four), and each time that it wakes in vain twice as many,
    as long as waking costs more than ``share`` of the time. The next text finds it awake, or nearly.

    Before that is known a text may lose ``loss`` of its time, at its beginning what a block usually gains, and with
    each step a tenth of that: a drafter that has used this up decodes plainly until it may lose another block.

    The drafter is asked for as many drafts as paid in the last blocks, by what each draft costs before it is verified:
    of a block-diffusion model nearly all, of a model that writes them one after another only a few.

    To know the drafter's probabilities before the pass costs a wait for the device. Where the choices that they allow
    gained less in the last blocks, each block verifies the number that was worth most on average.

    Costs and chances are learned for each source of drafts by itself, and kept from text to text.
    """

    reads_confidence = True

    def __init__(self, first_nap: int = 4, longest_nap: int = 128, share: float = 0.01, loss: float = 0.04):
        self._first_nap, self._longest_nap, self._share = first_nap, longest_nap, share
        self._credit = _Credit(loss)
        self._sources: dict[str, _Source] = {}
        self._why: dict[str, float] = {}
        self._last_source = ""
        self._asleep = 0
        self._plain_seconds: list[float] = []
        self._late: BlockRecord | None = None

    def begin(self) -> None:
        """A new text begins: soon the drafter is awake, and what the last blocks brought is forgotten."""
        self.catch_up()
        if self._plain_seconds:
            self._end_nap()
        self._asleep = min(self._asleep, 2 * self._first_nap)
        self._credit.begin()
        for source in self._sources.values():
            source.recent = _Rate(RECENT)
            source.nap, source.matched = max(self._first_nap, source.nap // 2), None
            source.chances.forget(tokens=10)

    def sleep(self) -> int:
        """What is left of a nap."""
        return self._asleep

    def wake(self) -> None:
        """The nap is over."""
        self._asleep = 0

    def draft_length(self, most: int) -> int:
        """The number of drafts that was worth most in the last blocks, by what drafting and verifying them costs."""
        source = self._sources.get(self._last_source)
        return most if source is None else source.draft_length(most)

    def waits_for_confidence(self, source: str) -> bool:
        """As long as choices by the probabilities gain more than the wait for them costs."""
        return self._source(source).waiting_pays()

    def verify_length(self, drafts: Drafts) -> int:
        """The length that commits most tokens per second; all of the first block, which tells what that costs."""
        self._last_source = drafts.source
        source = self._source(drafts.source)
        if not source.costs.known:
            return drafts.count
        if drafts.confidence is None and not source.waiting_pays():
            self._why = {"usual_tokens_per_second": source.usual.tokens_per_second}
            return source.usual_length(drafts.count)
        tokens, seconds, usual = source.hopes(drafts.count, drafts.confidence, drafts.parents)
        best = int(np.argmax(tokens - usual * seconds))
        self._why = {"tokens": float(tokens[best]), "seconds": float(seconds[best]), "usual_tokens_per_second": usual}
        return best

    def observe(self, block: BlockRecord) -> None:
        """Learn times and chances, and decide whether the drafter stays awake.

        After a block that gained it does, and once enough is known, what such a block teaches waits for the next pass.
        """
        self.catch_up()
        if block.asleep:
            self._plain_seconds.append(block.seconds)
            self._credit.add(0.0, block.seconds)
            self._asleep = max(0, self._asleep - 1)
            if self._asleep == 0:
                self._end_nap()
            return
        source = self._source(block.source)
        if source.seen >= ENOUGH and block.seconds < (block.accepted + 1) * source.costs.plain_step():
            self._late = block
        else:
            self._decide(source, block.drafted, self._learn(block))

    def catch_up(self) -> None:
        """Learn from a block that gained."""
        if self._late is not None:
            late, self._late = self._late, None
            self._learn(late)

    def _learn(self, block: BlockRecord) -> float:
        """What the block teaches; the seconds that it was expected to lose."""
        source = self._source(block.source)
        source.learn(block)
        # What the block was worth by all that is known now: less chance is in it than in what it committed.
        tokens_to = source.expected_tokens(block.drafted, block.confidence, block.parents)
        tokens = float(tokens_to[block.verified])
        seconds = source.drafting.expected(block.drafted) + source.costs.expected(block.verified)
        source.usual.add(tokens, seconds)
        plain = source.costs.plain_step()
        plainly = (block.accepted + 1) * plain
        self._credit.add_block(plainly - seconds, plainly)
        source.recent.add(*source.best(tokens_to, plain))
        if source.recent.tokens_per_second * plain >= 1:
            source.nap = self._first_nap
        return max(seconds - tokens * plain, 0.0)

    def _decide(self, source: "_Source", drafted: int, in_vain: float) -> None:
        """Whether, and for how long, the drafter sleeps after a block that lost ``in_vain`` seconds."""
        plain = source.costs.plain_step()
        if source.recent.tokens_per_second * plain < 1:
            enough = min(source.nap, in_vain / (self._share * plain))
            self._asleep, source.nap = max(self._first_nap, int(enough)), 2 * source.nap
            source.recent = _Rate(RECENT)
        saving = self._credit.tokens_until(source.next_block(drafted) - plain, plain)
        self._asleep = min(max(self._asleep, saving), self._longest_nap)

    def _source(self, name: str) -> "_Source":
        if name not in self._sources:
            self._sources[name] = _Source(nap=self._first_nap)
        return self._sources[name]

    def _end_nap(self) -> None:
        for source in self._sources.values():
            source.costs.observe(PLAIN, statistics.median(self._plain_seconds))
            source.chances.forget(tokens=len(self._plain_seconds))
        self._plain_seconds = []

    def why(self) -> dict[str, float]:
        """What the last length was expected to bring and to take, and what that time usually brings."""
        return dict(self._why)

    def save(self, path: str | Path) -> None:
        """Write the costs learned so far to a JSON file, for :meth:`load` on the same machine with the same models.

        They are what blocks take and, where it is known, what drafts do; what texts brought is not among them.
        """
        self.catch_up()
        costs = {
            name: {"blocks": source.costs.seconds(), "drafting": source.drafting.parts()}
            for name, source in self._sources.items()
            if source.costs.known
        }
        write_json(Path(path), costs)

    @classmethod
    def load(cls, path: str | Path) -> "Adaptive":
        """A policy that begins with saved costs. Raises :class:`~dflash.errors.DFlashError` for another file."""
        policy = cls()
        try:
            for name, saved in read_json(Path(path)).items():
                source = policy._source(name)
                source.costs = BlockCosts.from_seconds({int(k): float(time) for k, time in saved["blocks"].items()})
                if saved["drafting"] is not None:
                    source.drafting = DraftCosts.from_parts(*saved["drafting"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise DFlashError(f"{path} holds no costs of blocks; expected a file that Adaptive.save wrote.") from error
        return policy


RECENT, USUAL = 0.87, 0.95
"""What a block counts in proportion to the next one, in the mean that puts a drafter to sleep and in the long one."""

ENOUGH = 8
"""Blocks, the older ones counted less, from which it is known what a wait for the probabilities, or a block, gains."""

REGAINED = 0.1
"""Of what a block usually gains, the part that each plain step or block lets a text lose again."""

PATIENCE = 30
"""Blocks after which a shorter draft is tried even if it costs right drafts."""

FURTHER = 0.7
"""What a draft that was not asked for is expected to be worth, in proportion to the one before it."""


@dataclass
class _Rate:
    """Expected tokens and seconds of the last blocks; older ones count less."""

    memory: float
    tokens: float = 0.0
    seconds: float = 0.0

    def add(self, tokens: float, seconds: float) -> None:
        self.tokens = self.memory * self.tokens + tokens
        self.seconds = self.memory * self.seconds + seconds

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass
class _Mean:
    """Of the last blocks; older ones count less."""

    mean: float = 0.0
    blocks: float = 0.0

    def add(self, value: float) -> None:
        self.blocks = USUAL * self.blocks + 1
        self.mean += (value - self.mean) / self.blocks


@dataclass
class _Credit:
    """Seconds that blocks may still lose in this text, measured against plain steps.

    Where blocks usually gain much, few bad ones say little: so what they may lose grows with it.
    """

    loss: float
    """The share of a text's plain time that it may lose where blocks gain nothing."""
    seconds: float = 0.0
    gained: _Mean = field(default_factory=_Mean)
    """Seconds that a block gains on plain steps."""

    def begin(self) -> None:
        """A new text begins: it may lose what a block usually gains."""
        self.seconds = self._usual

    def add(self, gained: float, plain: float) -> None:
        """Tokens that take ``plain`` seconds without a drafter were committed, and ``gained`` seconds."""
        self.seconds += gained + self._allowed(plain)

    def add_block(self, gained: float, plain: float) -> None:
        """The same, by a block with drafts."""
        self.gained.add(gained)
        self.add(gained, plain)
        if self.gained.blocks < ENOUGH:  # little is known of the drafter, which must be tried
            self.seconds = max(self.seconds, self._usual)

    def tokens_until(self, at_risk: float, plain: float) -> int:
        """Plain steps, of ``plain`` seconds each, until a block may lose the seconds ``at_risk``."""
        if self.gained.blocks < ENOUGH:
            return 0
        return max(0, math.ceil((at_risk - self.seconds) / self._allowed(plain)))

    def _allowed(self, plain: float) -> float:
        return self.loss * plain + REGAINED * self._usual

    @property
    def _usual(self) -> float:
        return max(self.gained.mean, 0.0)


@dataclass
class _Source:
    """What is known of one source of drafts."""

    costs: BlockCosts = field(default_factory=BlockCosts)
    chances: Calibration = field(default_factory=Calibration)
    drafting: DraftCosts = field(default_factory=DraftCosts)
    nap: int = 0
    recent: _Rate = field(default_factory=lambda: _Rate(RECENT))
    usual: _Rate = field(default_factory=lambda: _Rate(USUAL))
    worth: list[float] = field(default_factory=list)
    """Mean of the last blocks, by the number of drafts to choose from."""
    value: list[float] = field(default_factory=list)
    """Mean of the last blocks, by the number of drafts verified."""
    gained: _Mean = field(default_factory=_Mean)
    """Tokens that a choice by the probabilities is worth, beyond what the usual length is."""
    waited: _Mean = field(default_factory=_Mean)
    """Seconds that such a choice costs."""
    seen: int = 0
    """Blocks so far."""
    matched: int | None = None
    """Leading drafts that were right in the last of this text's blocks that was learned; ``None`` where all were."""

    def expected_tokens(
        self, count: int, confidence: Sequence[float] | None, parents: Sequence[int] | None
    ) -> np.ndarray:
        """Tokens that a block commits if it verifies 0, 1, .. ``count`` drafts."""
        chances = self.chances.chances(count, confidence)
        survival = np.ones(count + 1)  # of the anchor, then of each draft
        if parents is None:
            np.cumprod(chances, out=survival[1:])
        else:
            for i, chance in enumerate(chances):
                survival[i + 1] = chance * survival[parents[i] + 1]
        return np.cumsum(survival)

    def best(self, tokens: np.ndarray, plain: float) -> tuple[float, float]:
        """Expected tokens and seconds of a block at the length that gains most on plain steps of ``plain`` seconds.

        Whether a drafter sleeps is judged by this: not by a length that was only tried.
        """
        most = len(tokens) - 1
        seconds = self.drafting.expected_to(most) + self.costs.expected_to(most)
        best = np.argmax(tokens * plain - seconds)
        return float(tokens[best]), float(seconds[best])

    def hopes(
        self, count: int, confidence: Sequence[float] | None, parents: Sequence[int] | None
    ) -> tuple[np.ndarray, np.ndarray, float]:
        """Of a block that verifies 0, 1, .. ``count`` drafts, the tokens expected and the seconds hoped for.

        The last is what the time of a block usually brings, in tokens per second.
        """
        tokens, seconds = self.expected_tokens(count, confidence, parents), self.costs.hoped_to(count)
        usual = self.usual.tokens_per_second or float(np.max(tokens / (seconds + self.drafting.expected(count))))
        return tokens, seconds, usual

    def remember(self, block: BlockRecord) -> None:
        """What the numbers of drafts to choose from, and those to verify, were worth in this block."""
        tokens, seconds, usual = self.hopes(block.drafted, block.confidence, block.parents)
        self.remember_worth(tokens - usual * seconds, tokens, usual)
        value = (tokens - usual * self.costs.expected_to(block.drafted)).tolist()  # what is hoped for is no gain
        if self.value:
            self.gained.add(max(value) - value[self.usual_length(block.drafted)])
        self.value = [*_averaged(self.value, value), *self.value[len(value) :]]

    def usual_length(self, most: int) -> int:
        """The number of drafts, 0 to ``most``, that was worth most to verify on average."""
        known = range(min(most + 1, len(self.value)))
        return max(known, key=self.value.__getitem__, default=most)

    def next_block(self, most: int) -> float:
        """Seconds that the next block will take, if ``most`` drafts can be asked for."""
        count = self.draft_length(most)
        return self.drafting.expected(count) + self.costs.expected(self.usual_length(count))

    def waiting_pays(self) -> bool:
        """Whether a block's probabilities gain more than the wait for them costs; true as long as nobody knows."""
        known = self.drafting.known and self.waited.blocks and self.gained.blocks >= ENOUGH
        return not known or self.gained.mean > self.usual.tokens_per_second * self.waited.mean

    def learn(self, block: BlockRecord) -> None:
        """The block's time, and every draft of which it is known whether the target would have written it."""
        if self.costs.known:
            self.remember(block)
        self.seen += 1
        self.matched = None if block.matched == block.drafted else block.matched
        self.costs.observe(block.verified, block.seconds - (block.drafting or self.drafting.expected(block.drafted)))
        if block.drafting:
            self.drafting.observe(block.drafted, block.drafting)
        if block.choosing:
            self.waited.add(block.choosing)
        reached = range(min(block.matched + 1, block.compared))
        outcomes = {i: i < block.matched for i in reached} if block.outcomes is None else block.outcomes
        for i, accepted in outcomes.items():
            self.chances.observe(None if block.confidence is None else block.confidence[i], accepted)

    def remember_worth(self, worth: np.ndarray, tokens: np.ndarray, usual: float) -> None:
        """``worth[k]`` is what verifying ``k`` drafts of this block is worth, in tokens; more drafts give more choice.

        Of drafts that were not asked for, each is expected to change the worth as the last one did, but by less. After
        a single draft, which saves a pass, that would be too much: there it is the tokens that grow by less, while the
        block takes longer.
        """
        best = np.maximum.accumulate(worth).tolist()
        gain = best[-1] - best[-2] if len(best) > 1 else 0.0
        if len(best) == 2:
            _, shorter, longer = self.costs.hoped_to(2)
            gain = max(0.0, float(tokens[1] - tokens[0] - usual * (longer - shorter) / FURTHER))
        while len(best) < len(self.worth):
            gain *= FURTHER
            best.append(best[-1] + gain)
        self.worth = _averaged(self.worth, best)

    def draft_length(self, most: int) -> int:
        """The number of drafts, 1 to ``most``, that was worth most beyond what drafting them costs."""
        if not self.drafting.known:
            trial = self.drafting.trial(most)
            cheap = self.matched is not None and self.matched <= trial  # a trial should cost no right drafts
            return trial if cheap or self.seen >= PATIENCE else most
        known, rate = min(most, len(self.worth) - 1), self.usual.tokens_per_second
        if known < 1:
            return most
        best = 1 + int(np.argmax(np.array(self.worth[1 : known + 1]) - rate * self.drafting.expected_to(known)[1:]))
        return most if best == known else best


def _averaged(before: list[float], now: list[float]) -> list[float]:
    """Means of the last blocks, by the numbers of drafts that ``now`` has; those that are new begin with it."""
    return [RECENT * b + (1 - RECENT) * n for b, n in zip(before + now[len(before) :], now, strict=False)]
