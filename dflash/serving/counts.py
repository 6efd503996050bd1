"""What is told of decoding: in a response's usage and metrics, and in Prometheus' text, in vLLM's names."""

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import prometheus_client as prometheus

if TYPE_CHECKING:
    from ..decoding.stream import DFlashResponse


class Counts:
    """Of one request: tokens, and how many blocks accepted how many drafts.

    ``prompt`` and ``answer`` are its token ids, ``blocks`` has the drafts and the accepted ones of each block.
    """

    def __init__(self) -> None:
        self.tokens = self.drafted = self.accepted = 0
        self.histogram: Counter[int] = Counter()
        self.prompt: list[int] = []
        self.answer: list[int] = []
        self.blocks: list[tuple[int, int]] = []
        self.finish: str | None = None

    def add(self, step: "DFlashResponse") -> None:
        """Count a step; only one with drafts is a block."""
        self.tokens, self.finish = step.generation_tokens, step.finish_reason
        self.answer += step.tokens
        if step.drafted:
            self.drafted += len(step.drafted)
            self.accepted += step.accepted
            self.histogram[step.accepted] += 1
            self.blocks.append((len(step.drafted), step.accepted))

    def put_into(self, response: dict[str, Any]) -> None:
        """Complete the usage of ``response``: accepted and rejected drafts are those that the target verified."""
        blocks = self.histogram.total()
        usage = response["usage"]
        usage |= {"completion_tokens": self.tokens, "total_tokens": usage["prompt_tokens"] + self.tokens}
        usage["completion_tokens_details"] = {
            "accepted_prediction_tokens": self.accepted,
            "rejected_prediction_tokens": self.drafted - self.accepted,
        }
        of_blocks = {
            "mean_acceptance_length": 1 + self.accepted / blocks if blocks else None,
            "draft_acceptance_rate": self.accepted / self.drafted if blocks else None,
            "acceptance_histogram": {str(accepted): self.histogram[accepted] for accepted in sorted(self.histogram)},
            "num_spec_steps": blocks,
            "num_draft_tokens": self.drafted,
            "num_accepted_draft_tokens": self.accepted,
        }
        response["metrics"] = {"speculative_decoding": of_blocks}


COUNTERS = {
    "prompt_tokens": "Prompt tokens.",
    "prompt_tokens_cached": "Prompt tokens that were in the prompt cache.",
    "generation_tokens": "Generated tokens.",
    "request_success": "Requests by how they ended.",
    "spec_decode_num_drafts": "Blocks with drafts.",
    "spec_decode_num_draft_tokens": "Drafts that the target verified.",
    "spec_decode_num_accepted_tokens": "Drafts that it accepted.",
    "spec_decode_num_accepted_tokens_per_pos": "Accepted drafts by their place in the block.",
}
LABELS = {"request_success": ["finished_reason"], "spec_decode_num_accepted_tokens_per_pos": ["position"]}


class Metrics:
    """Of the whole server. ``gauges`` are read when they are asked for."""

    def __init__(self, gauges: dict[str, tuple[str, Callable[[], float]]]):
        self._registry = prometheus.CollectorRegistry()
        for name, (meaning, read) in gauges.items():
            prometheus.Gauge(name, meaning, registry=self._registry).set_function(read)
        self._counters = {
            name: prometheus.Counter(f"vllm:{name}", meaning, LABELS.get(name, ()), registry=self._registry)
            for name, meaning in COUNTERS.items()
        }

    def add(self, name: str, count: int = 1, *label: object) -> None:
        """Count something of :data:`COUNTERS`."""
        counter = self._counters[name]
        (counter.labels(*label) if label else counter).inc(count)

    def step(self, step: "DFlashResponse") -> None:
        """Count a step."""
        self.add("generation_tokens", len(step.tokens))
        if step.drafted:
            self.add("spec_decode_num_drafts")
            self.add("spec_decode_num_draft_tokens", len(step.drafted))
            self.add("spec_decode_num_accepted_tokens", step.accepted)
        for position in range(step.accepted):
            self.add("spec_decode_num_accepted_tokens_per_pos", 1, position)

    def text(self) -> bytes:
        """All of it, in Prometheus' text format."""
        return prometheus.generate_latest(self._registry)
