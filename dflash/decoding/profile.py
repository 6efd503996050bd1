"""A profile of one request: seconds by part, and blocks by verify length with what the policy expected of them."""

from collections import defaultdict
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

PARTS = ("prefill", "draft", "verify", "rewind", "plain", "host")


@dataclass
class LengthUse:
    """Sums over the blocks that verified one number of drafts, and the policy's reasons for them by name (``why``)."""

    blocks: int = 0
    accepted: int = 0
    committed: int = 0
    seconds: float = 0.0
    why: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def means(self) -> dict[str, float]:
        """Averages per block: ``accepted``, ``committed`` and ``seconds``."""
        sums = {"accepted": self.accepted, "committed": self.committed, "seconds": self.seconds}
        return {name: value / self.blocks for name, value in sums.items()}

    def expected(self) -> dict[str, float]:
        """The averages of what the policy expected, by its own names."""
        return {name: fmean(values) for name, values in self.why.items()}


@dataclass
class Profile:
    """A :data:`~dflash.decoding.trace.Trace` that sums a request's seconds by part and its blocks by verify length.

    Parts: ``prefill``; ``draft``, ``verify`` and ``rewind`` of the blocks; ``plain`` steps while drafting pauses; and
    ``host``, the rest, which includes the caller's own time. They add up to the time of the request.
    """

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    lengths: dict[int, LengthUse] = field(default_factory=dict)
    blocks: int = 0
    plain_steps: int = 0
    pauses: list[int] = field(default_factory=list)
    """The planned tokens of each pause in drafting, from policies that report ``next_attempt``."""
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
