"""Where the seconds of a request went, by part, and which verify lengths were chosen, with what in mind.

Knows the records of a trace. Must not know how a block is decoded, or how a profile is shown.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

PARTS = ("prefill", "draft", "verify", "rewind", "plain", "host")


@dataclass
class LengthUse:
    """The blocks that verified one number of drafts: sums, and by name each number that the policy gave for one."""

    blocks: int = 0
    accepted: int = 0
    committed: int = 0
    seconds: float = 0.0
    why: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def means(self) -> dict[str, float]:
        """A block's averages: ``accepted``, ``committed`` and ``seconds``."""
        sums = {"accepted": self.accepted, "committed": self.committed, "seconds": self.seconds}
        return {name: value / self.blocks for name, value in sums.items()}

    def expected(self) -> dict[str, float]:
        """What the policy expected of a block, by its own names, on average."""
        return {name: fmean(values) for name, values in self.why.items()}


@dataclass
class Profile:
    """A request's seconds by part and its blocks by verify length; a :data:`~dflash.decoding.trace.Trace` that adds up.

    Parts: ``prefill``; ``draft``, ``verify`` and ``rewind`` of the blocks; ``plain`` steps while the drafter pauses;
    ``host``, all the rest, in which the caller's own time is. They add up to the time of the request.
    """

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    lengths: dict[int, LengthUse] = field(default_factory=dict)
    blocks: int = 0
    plain_steps: int = 0
    pauses: list[int] = field(default_factory=list)
    """Tokens of each pause in drafting, as the policy planned it when it began; of policies that say so."""
    _pausing: bool = False

    def __call__(self, record: dict[str, Any]) -> None:
        """Add a record of the trace."""
        if record["record"] != "block":
            return
        for part, seconds in record["seconds"].items():
            self.seconds[part] += seconds
        if record["number"] == 0:
            return
        began, self._pausing = record["asleep"] and not self._pausing, record["asleep"]
        if record["asleep"]:
            self.plain_steps += 1
            if began and "next_attempt" in record["why"]:
                self.pauses.append(int(record["why"]["next_attempt"]) + 1)
            return
        self.blocks += 1
        use = self.lengths.setdefault(record["verified"], LengthUse())
        use.blocks += 1
        use.accepted += record["accepted"]
        use.committed += len(record["tokens"])
        use.seconds += sum(record["seconds"][part] for part in ("draft", "verify", "rewind"))
        for name, value in record["why"].items():
            use.why[name].append(value)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        lengths = [
            {"verified": k, "blocks": use.blocks, **use.means(), "why": use.expected()}
            for k, use in sorted(self.lengths.items())
        ]
        return {
            "seconds": self.seconds,
            "blocks": self.blocks,
            "plain_steps": self.plain_steps,
            "pauses": self.pauses,
            "lengths": lengths,
        }
