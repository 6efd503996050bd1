"""The settings that every run of the loop has: its length, and how often it reports, saves and evaluates."""

from dataclasses import dataclass, field

from ...core.settings import Checked, setting
from .optimizer import AdamWSettings, MuonSettings


@dataclass(frozen=True)
class LoopSettings(Checked):
    """All counts are in steps, so a run does not depend on the machine's speed.

    A step takes the mean gradient of ``batches_per_step`` batches over all machines.
    """

    steps: int | None = setting(None, "length of the run; wins over epochs", above=0)
    batches_per_step: int = setting(1, "batches whose mean gradient makes a step, all machines together", above=0)
    threads: int = setting(1, "batches of a step computed in parallel on a CPU; the others follow", above=0)
    log_every: int = setting(10, "steps between two lines of log.jsonl", above=0)
    checkpoint_every: int = setting(
        200, "steps between two checkpoints; on one machine there is also one a minute", above=0
    )
    evaluate_every: int = setting(1000, "steps between two evaluations", above=0)
    max_loss_spike: float | None = setting(
        20.0,
        "a loss over this many times the recent median, or as far above one below 0, stops the run; null: never",
        above=1,
    )


@dataclass(frozen=True)
class FitSettings(LoopSettings):
    """The loop's settings with their optimiser; ``steps`` must be given."""

    steps: int = setting(meaning="length of the run", above=0)
    optimizer: MuonSettings | AdamWSettings = field(default_factory=MuonSettings)
