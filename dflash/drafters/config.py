"""``config.json`` of a DFlash drafter, as published, parsed and checked once.

Knows the field names of the format and their defaults. Must not know weights, targets or files.
"""

import difflib
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from ..errors import CheckpointError

logger = logging.getLogger(__name__)

FULL, SLIDING = "full_attention", "sliding_attention"

# Written by the transformers library into every config; they say nothing about a drafter's arithmetic.
_IGNORED = frozenset({
    "architectures", "attention_dropout", "auto_map", "bos_token_id", "chunk_size_feed_forward", "dtype",
    "eos_token_id", "id2label", "initializer_range", "label2id", "max_window_layers", "model_type",
    "output_attentions", "output_hidden_states", "pad_token_id", "problem_type", "return_dict",
    "tie_word_embeddings", "torch_dtype", "transformers_version", "use_cache", "use_sliding_window",
})  # fmt: skip
# Values that mean "off"; anything else would change the arithmetic, which this package does not implement.
_MUST_BE_OFF = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu"}
_DFLASH_FIELDS = frozenset({
    "block_size", "mask_token_id", "target_layer_ids", "layer_types", "sliding_window", "is_causal",
    "input_embedding_scale", "output_multiplier", "final_logit_softcapping",
})  # fmt: skip


@dataclass(frozen=True)
class DFlashConfig:
    """Shape and constants of a block-diffusion drafter (names follow the published ``config.json``).

    Layer id ``i`` in ``target_layer_ids`` means the output of the target's decoder layer ``i`` (0-based).
    ``is_causal`` is one value for all layers, or ``None``: causal inside the block on sliding layers,
    bidirectional on full ones. Logits are ``cap * tanh(multiplier * logits / cap)`` where
    ``final_logit_softcapping`` is given, else ``multiplier * logits``.

    Raises :class:`~dflash.errors.CheckpointError` when a value is impossible.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    mask_token_id: int
    head_dim: int = 0
    num_target_layers: int | None = None
    block_size: int = 16
    target_layer_ids: tuple[int, ...] = ()
    max_position_embeddings: int = 40960
    rope_theta: float = 1_000_000.0
    rope_scaling: dict[str, Any] | None = None
    rms_norm_eps: float = 1e-6
    layer_types: tuple[str, ...] = ()
    sliding_window: int | None = None
    is_causal: bool | None = None
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    model_type: str = field(default="qwen3", kw_only=True)

    def __post_init__(self) -> None:
        for name, (expected, holds) in _KINDS.items():
            if not holds(value := getattr(self, name)):
                raise CheckpointError(f"{name} must be {expected}, got {value!r}.")
        set_ = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731 (frozen dataclass)
        for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
            _require_positive(name, getattr(self, name))
        for name in ("num_key_value_heads", "vocab_size", "block_size"):
            _require_positive(name, getattr(self, name))
        set_("head_dim", self.head_dim or self.hidden_size // self.num_attention_heads)
        set_("target_layer_ids", tuple(self.target_layer_ids) or self._spread_layer_ids())
        set_("layer_types", tuple(self.layer_types) or (FULL,) * self.num_hidden_layers)
        if self.num_attention_heads % self.num_key_value_heads:
            raise CheckpointError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}."
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise CheckpointError(
                f"mask_token_id {self.mask_token_id} is outside the vocabulary of {self.vocab_size} tokens."
            )
        if self.num_target_layers is not None:
            self.check_layer_ids(self.num_target_layers)
        self._check_layer_types()

    def check_layer_ids(self, num_layers: int) -> None:
        """Raise :class:`~dflash.errors.CheckpointError` unless a target of ``num_layers`` has all layers read."""
        bad = [i for i in self.target_layer_ids if not 0 <= i < num_layers]
        if bad:
            raise CheckpointError(
                f"target_layer_ids {bad} are out of range: the target has layers 0 to {num_layers - 1}."
            )

    def _check_layer_types(self) -> None:
        if len(self.layer_types) != self.num_hidden_layers:
            raise CheckpointError(
                f"layer_types names {len(self.layer_types)} layers, num_hidden_layers is {self.num_hidden_layers}."
            )
        unknown = sorted(set(self.layer_types) - {FULL, SLIDING})
        if unknown:
            raise CheckpointError(f"layer_types holds {unknown}; expected {FULL!r} or {SLIDING!r}.")
        if SLIDING in self.layer_types:
            _require_positive("sliding_window (needed by the sliding layers)", self.sliding_window)

    def _spread_layer_ids(self) -> tuple[int, ...]:
        """Evenly spread target layers, the published default when a config names none."""
        _require_positive("num_target_layers (needed where target_layer_ids is missing)", self.num_target_layers)
        assert self.num_target_layers is not None
        logger.warning("The drafter's config names no target_layer_ids; they are assumed to be evenly spread.")
        drafts, span = self.num_hidden_layers, self.num_target_layers - 4
        if drafts == 1:
            return (self.num_target_layers // 2,)
        return tuple(round(1 + i * span / (drafts - 1)) for i in range(drafts))

    def causal_in_block(self, layer: int) -> bool:
        """Whether block positions of drafter layer ``layer`` see only earlier block positions."""
        return self.layer_types[layer] == SLIDING if self.is_causal is None else self.is_causal

    def window(self, layer: int) -> int | None:
        """Sliding window of drafter layer ``layer`` in tokens; ``None`` on full layers."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> "DFlashConfig":
        """Parse a published ``config.json``.

        Raises :class:`~dflash.errors.CheckpointError` for a missing or unknown key (naming the nearest
        known one) and for options that change the arithmetic and are not supported.
        """
        flat = dict(config)
        for name in ("dflash_config", "rope_parameters"):
            if not isinstance(flat.get(name) or {}, dict):
                raise CheckpointError(f"config.json: {name} must be an object, got {flat[name]!r}.")
        nested = flat.pop("dflash_config", None) or {}
        rope = flat.pop("rope_parameters", None) or {}
        _refuse_unknown(nested, _DFLASH_FIELDS, "dflash_config")
        flat.update(nested)
        if "rope_theta" in rope:
            flat["rope_theta"] = rope["rope_theta"]
        if rope.get("rope_type", "default") != "default":
            flat["rope_scaling"] = rope
        for name, off in _MUST_BE_OFF.items():
            if flat.pop(name, off) != off:
                raise CheckpointError(f"config.json: {name} {config[name]!r} is not supported, only {off!r}.")
        names = {f.name for f in fields(cls)}
        _refuse_unknown(flat, names | _IGNORED, "config.json")
        values = {k: v for k, v in flat.items() if k in names and v is not None}
        missing = [f.name for f in fields(cls) if f.name in _REQUIRED and f.name not in values]
        if missing:
            raise CheckpointError(f"config.json: {', '.join(missing)} missing; a DFlash drafter needs them.")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """The published ``config.json`` form of this config."""
        flat = asdict(self)
        rope_scaling = flat.pop("rope_scaling")
        defaults = {f.name: f.default for f in fields(self)}
        nested = {
            name: flat.pop(name) for name in ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")
        }
        nested = {name: value for name, value in nested.items() if value != defaults[name]}
        nested |= {name: flat.pop(name) for name in ("mask_token_id", "target_layer_ids")}
        optional = ("num_target_layers", "sliding_window", "is_causal")
        flat = {k: v for k, v in flat.items() if k not in optional or v is not None}
        return {
            "architectures": ["DFlashDraftModel"],
            "dflash_config": nested,
            "rope_scaling": rope_scaling,
            "tie_word_embeddings": True,
            **flat,
        }


_REQUIRED = frozenset({
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "vocab_size", "mask_token_id",
})  # fmt: skip


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# What a value must be before anything is computed from it; the counts are checked by `_require_positive`.
_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "mask_token_id": ("a whole number", _is_whole),
    "head_dim": ("a positive whole number", lambda v: _is_whole(v) and v >= 0),  # 0: hidden_size over heads
    "target_layer_ids": ("a list of layer numbers", lambda v: isinstance(v, list | tuple) and all(map(_is_whole, v))),
    "layer_types": ("a list of names", lambda v: isinstance(v, list | tuple) and all(isinstance(x, str) for x in v)),
    "is_causal": ("true, false or null", lambda v: v is None or isinstance(v, bool)),
    "rope_scaling": ("an object or null", lambda v: v is None or isinstance(v, dict)),
    "rope_theta": ("a positive number", lambda v: _is_number(v) and v > 0),
    "rms_norm_eps": ("a positive number", lambda v: _is_number(v) and v > 0),
    "input_embedding_scale": ("a number", _is_number),
    "output_multiplier": ("a number", _is_number),
    "final_logit_softcapping": ("a positive number or null", lambda v: v is None or (_is_number(v) and v > 0)),
}


def _require_positive(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"{name} must be a positive whole number, got {value!r}.")


def _refuse_unknown(values: dict[str, Any], known: frozenset[str] | set[str], where: str) -> None:
    for name in sorted(set(values) - set(known)):
        near = difflib.get_close_matches(name, sorted(known), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise CheckpointError(f"{where}: unknown key {name!r}{hint}")
