"""What one training run is made of: a dataclass for each part, checked before any model loads.

Knows names, defaults and which values go together. Must not know how anything is done.
"""

from dataclasses import dataclass, field
from pathlib import Path

from .drafters.objectives import ObjectiveSettings
from .loop.optimizer import AdamWSettings, MuonSettings
from .settings import require


def _positive(settings: object, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        require(value is None or value > 0, f"{name} must be above 0, got {value}.")


def _seed(settings: "DataSettings | DrafterShape") -> None:
    require(0 <= settings.seed < 2**63, f"seed must be at least 0 and below 2**63, got {settings.seed}.")


@dataclass(frozen=True)
class DataSettings:
    """Which dataset (a folder made by ``dflash prepare``) and how it is put into batches.

    Sequences of more than ``max_length`` tokens are left out. A batch holds whole sequences, at most
    ``batch_tokens`` tokens with padding. Each gets up to ``anchors`` blocks, drawn anew in every epoch, and
    all together at most ``max_blocks_per_batch`` (but one each), which bounds the memory of a batch of many short ones.
    With ``cached_features``, a folder made by ``dflash cache-features``, the target's features are read from it.
    """

    folder: Path
    max_length: int = 3072
    batch_tokens: int = 3072
    anchors: int = 512
    max_blocks_per_batch: int = 1024
    cached_features: Path | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        _positive(self, "max_length", "batch_tokens", "anchors", "max_blocks_per_batch")
        _seed(self)
        require(
            self.batch_tokens >= self.max_length,
            f"batch_tokens {self.batch_tokens} cannot hold a sequence of max_length {self.max_length}.",
        )


@dataclass(frozen=True)
class DrafterShape:
    """Shape of the new drafter; sizes that are not given are the target's own.

    ``mask_token`` is a token's text or its id (published drafters take an id that no text uses); ``None``
    takes the tokenizer's own mask token. Without ``target_layer_ids`` they are spread evenly.
    """

    num_hidden_layers: int = 5
    block_size: int = 16
    target_layer_ids: tuple[int, ...] = ()
    mask_token: int | str | None = None
    intermediate_size: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rope_theta: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        _positive(self, "num_hidden_layers", "intermediate_size", "num_attention_heads", "num_key_value_heads")
        _positive(self, "head_dim", "rope_theta")
        _seed(self)
        require(self.head_dim is None or self.head_dim % 2 == 0, f"head_dim must be even, got {self.head_dim}.")
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        require(
            heads is None or kv_heads is None or heads % kv_heads == 0,
            f"num_attention_heads {heads} must be a multiple of num_key_value_heads {kv_heads}.",
        )
        require(
            not isinstance(self.mask_token, int) or self.mask_token >= 0,
            f"mask_token must be a token's text or an id from 0 on, got {self.mask_token}.",
        )
        require(self.block_size > 1, f"block_size counts the anchor and must be at least 2, got {self.block_size}.")
        require(
            all(i >= 0 for i in self.target_layer_ids)
            and len(set(self.target_layer_ids)) == len(self.target_layer_ids),
            f"target_layer_ids must be different layer numbers from 0 on, got {list(self.target_layer_ids)}.",
        )


@dataclass(frozen=True)
class RunSettings:
    """Where a run leaves its files, how long it is and what it reports. Counts are in steps.

    ``steps`` wins over ``epochs``. A step takes the mean gradient of ``batches_per_step`` batches, those of
    all machines together. On a CPU, ``threads`` of them go side by side. With ``grad_checkpoint`` the backward
    pass computes each drafter layer again instead of keeping it: less memory, more time. ``evaluate_prompts`` held-out
    prompts are decoded for up to ``evaluate_tokens`` tokens each. A loss above ``max_loss_spike`` times the recent
    median stops the run; ``null`` never does. ``peer_timeout`` is how many seconds a machine waits for
    another, beside twice its own time for the same work and the time to send and write.
    """

    folder: Path
    epochs: int = 6
    steps: int | None = None
    batches_per_step: int = 1
    threads: int = 1
    grad_checkpoint: bool = False
    log_every: int = 10
    checkpoint_every: int = 200
    evaluate_every: int = 1000
    evaluate_prompts: int = 64
    evaluate_tokens: int = 256
    max_loss_spike: float | None = 20.0
    peer_timeout: float = 30.0

    def __post_init__(self) -> None:
        _positive(self, "epochs", "steps", "batches_per_step", "threads", "log_every", "checkpoint_every")
        _positive(self, "evaluate_every", "evaluate_prompts", "evaluate_tokens", "peer_timeout")
        require(
            self.max_loss_spike is None or self.max_loss_spike > 1,
            f"max_loss_spike must be above 1, got {self.max_loss_spike}.",
        )


@dataclass(frozen=True)
class Recipe:
    """One complete run: a drafter for ``target`` (a folder or a hub name)."""

    target: str
    data: DataSettings
    run: RunSettings
    drafter: DrafterShape = field(default_factory=DrafterShape)
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    optimizer: AdamWSettings | MuonSettings = field(default_factory=AdamWSettings)
