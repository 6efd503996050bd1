"""The recipe of a training run: one dataclass per part, checked before any model loads."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dflash

from ..core.settings import Checked, SettingsError, load_settings, load_values, require, setting
from .drafters.objectives import ObjectiveSettings
from .loop.optimizer import AdamWSettings, MuonSettings
from .loop.settings import LoopSettings

MOST_POSITIONS = 512
"""The largest block size; published drafters have 16."""


@dataclass(frozen=True)
class DataSettings(Checked):
    """The dataset, and how it is batched. A batch holds whole sequences.

    Each sequence gets up to ``anchors`` blocks, sampled again in every epoch. ``max_blocks_per_batch`` bounds the
    memory of a batch of many short sequences, but each keeps at least one block.
    """

    folder: Path = setting(meaning="dataset: a folder made by dflash prepare")
    max_length: int = setting(3072, "sequences of more tokens are left out", above=0)
    batch_tokens: int = setting(3072, "most tokens of a batch, with padding", above=0)
    anchors: int = setting(512, "most blocks of a sequence", above=0)
    max_blocks_per_batch: int = setting(1024, "most blocks of a batch", above=0)
    cached_features: Path | None = setting(
        None, "read the target's features from this folder, made by dflash cache-features"
    )
    sequences: int | None = setting(None, "train on this many sequences only, the first ones", above=0)
    seed: int = setting(0, "seed of the order of sequences and of the anchors", at_least=0, below=2**63)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.batch_tokens >= self.max_length,
            f"batch_tokens {self.batch_tokens} cannot hold a sequence of max_length {self.max_length}.",
        )


@dataclass(frozen=True)
class DrafterShape(Checked):
    """Kind and shape of the new drafter, or the drafter to start from."""

    kind: str = setting("dflash", "kind of the drafter, as registered with register_drafter")
    options: dict[str, Any] = setting(meaning="further keys of the kind's own config", factory=dict)
    from_: str | None = setting(
        None, "start from the weights and shape of this block drafter, of this kind or another (a folder or hub name)"
    )
    num_hidden_layers: int = setting(5, "layers of the drafter", above=0)
    block_size: int = setting(16, "positions of a block, the anchor included", at_least=2, at_most=MOST_POSITIONS)
    elastic_blocks: bool = setting(
        False, "train blocks of every length up to block_size, so that drafting fills only the positions it needs"
    )
    target_layer_ids: tuple[int, ...] = setting((), "target layers whose outputs it reads; default: spread evenly")
    window: int | None = setting(
        None,
        "newest tokens of the context that each layer sees; default: all, also where training showed fewer",
        above=0,
    )
    mask_token: int | str | None = setting(
        None, "a token's text or an id that no text uses; default: the tokenizer's own mask token"
    )
    vocabulary: int | None = setting(
        None, "draft only this many tokens, the most frequent in the dataset's responses; default: all", above=0
    )
    intermediate_size: int | None = setting(None, "width of the MLP; default: the target's", above=0)
    num_attention_heads: int | None = setting(None, "query heads; default: the target's", above=0)
    num_key_value_heads: int | None = setting(None, "key-value heads; default: the target's", above=0)
    head_dim: int | None = setting(None, "size of a head, even; default: the target's", above=0)
    rope_theta: float | None = setting(None, "base of the rotary embedding; default: the target's", above=0)
    seed: int = setting(0, "seed of the new weights", at_least=0, below=2**63)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.head_dim is None or self.head_dim % 2 == 0, f"head_dim must be even, got {self.head_dim}.")
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        require(
            heads is None or kv_heads is None or heads % kv_heads == 0,
            f"num_attention_heads {heads} must be a multiple of num_key_value_heads {kv_heads}.",
        )
        require(
            not isinstance(self.mask_token, int) or self.mask_token >= 0,
            f"mask_token must be a token's text or an id of at least 0, got {self.mask_token}.",
        )
        require(
            all(i >= 0 for i in self.target_layer_ids)
            and len(set(self.target_layer_ids)) == len(self.target_layer_ids),
            f"target_layer_ids must be different layer numbers of at least 0, got {list(self.target_layer_ids)}.",
        )


@dataclass(frozen=True)
class RunSettings(LoopSettings):
    """A run's folder, length, computation and reports."""

    folder: Path = setting(meaning="where the run leaves its files", kw_only=True)
    epochs: int = setting(6, "passes over the data, unless steps says the length", above=0)
    grad_checkpoint: bool = setting(
        False, "compute each drafter layer again in the backward pass: less memory, more time"
    )
    evaluate_prompts: int = setting(64, "held-out prompts of an evaluation", above=0)
    evaluate_tokens: int = setting(256, "most tokens of each answer in an evaluation", at_least=2)
    peer_timeout: float = setting(
        30.0, "seconds to wait for another machine, in addition to twice this one's time for the same work", above=0
    )
    callbacks: tuple[str, ...] = setting((), "callbacks that get every line of the log (register_callback)")


@dataclass(frozen=True)
class Recipe(Checked):
    """One complete run: a drafter for ``target``."""

    target: str = setting(meaning="the target: a folder or a hub name")
    data: DataSettings = setting()
    run: RunSettings = setting()
    drafter: DrafterShape = field(default_factory=DrafterShape)
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    optimizer: AdamWSettings | MuonSettings = field(default_factory=AdamWSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.target.strip()), "target is empty; give a folder or a hub name.")
        require(
            self.drafter.block_size <= self.data.max_length,
            f"drafter.block_size {self.drafter.block_size} is more than data.max_length {self.data.max_length}.",
        )


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe, or a bundled one by its name; ``overrides`` are settings such as ``"run.steps=100"``.

    Raises :class:`~dflash.core.settings.SettingsError`, naming file and key.
    """
    known = bundled_recipes()
    if not Path(path).exists() and str(path) in known:
        path = known[str(path)]
    values = load_values(Path(path))
    if isinstance(values, dict) and {"vary", "folder"} <= values.keys():
        raise SettingsError(f"{path} is not a recipe; this looks like a study: dflash ablate {path}")
    return load_settings(Recipe, Path(path), overrides)


def bundled_recipes() -> dict[str, Path]:
    """The recipes of drafters that come with this package, by name."""
    folder = Path(dflash.__file__).parent / "configs"
    return {path.stem: path for path in sorted(folder.glob("*.yaml")) if not path.stem.endswith("-target")}
