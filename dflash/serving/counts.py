"""What is told of decoding: in a response's usage and metrics, and in Prometheus' text, in vLLM's names."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import prometheus_client as prometheus

if TYPE_CHECKING:
    from ..decoding.stream import DFlashResponse


def totals(steps: Sequence["DFlashResponse"]) -> tuple[int, int, int]:
    """Tokens, drafts that the target verified, and accepted ones, in the steps of a request."""
    tokens = sum(len(step.tokens) for step in steps)
    drafted = sum(len(step.drafted) for step in steps)
    return tokens, drafted, sum(step.accepted for step in steps)


def complete_usage(response: dict[str, Any], steps: Sequence["DFlashResponse"]) -> None:
    """Put into the usage and metrics of ``response`` what the steps of its request were; a block is one with drafts."""
    tokens, drafted, accepted = totals(steps)
    histogram = Counter(step.accepted for step in steps if step.drafted)
    blocks = histogram.total()
    usage = response["usage"]
    usage |= {"completion_tokens": tokens, "total_tokens": usage["prompt_tokens"] + tokens}
    usage["completion_tokens_details"] = {
        "accepted_prediction_tokens": accepted,
        "rejected_prediction_tokens": drafted - accepted,
    }
    of_blocks = {
        "mean_acceptance_length": 1 + accepted / blocks if blocks else None,
        "draft_acceptance_rate": accepted / drafted if blocks else None,
        "acceptance_histogram": {str(count): histogram[count] for count in sorted(histogram)},
        "num_spec_steps": blocks,
        "num_draft_tokens": drafted,
        "num_accepted_draft_tokens": accepted,
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
