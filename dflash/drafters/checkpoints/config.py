"""The ``config.json`` of a DFlash drafter, as published, parsed and checked once."""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any, ClassVar

from ...core.errors import CheckpointError
from .formats import DEFAULT_THETA, FULL, SLIDING, published_values

logger = logging.getLogger(__name__)

MAX_BLOCK_SIZE = 512
"""Published drafters fill 4 to 16 positions; the logits of more than 512 would take gigabytes."""

Check = tuple[str, Callable[[Any], bool]]
"""What a value must be before anything is computed from it, in words and as a test."""


def is_whole(value: Any) -> bool:
    """Whether ``value`` is an integer, and no boolean."""
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def or_null(check: Check) -> Check:
    """``None``, or what ``check`` asks for."""
    expected, holds = check
    return f"{expected} or null", lambda value: value is None or holds(value)


POSITIVE: Check = ("a positive whole number", lambda v: is_whole(v) and v > 0)
SWITCH: Check = ("true or false", lambda v: isinstance(v, bool))
_ABOVE_0: Check = ("a positive number", lambda v: _is_number(v) and v > 0)


def spread_layer_ids(num_target_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """Evenly spread layers of the target, one for each drafter layer: the published default."""
    if num_draft_layers == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    return tuple(round(1 + i * span / (num_draft_layers - 1)) for i in range(num_draft_layers))


@dataclass(frozen=True)
class DFlashConfig:
    """Shape and constants of a block-diffusion drafter (names follow the published ``config.json``).

    Layer id ``i`` in ``target_layer_ids`` means the output of the target's decoder layer ``i`` (0-based).
    ``is_causal`` is one value for all layers, or ``None``: causal inside the block on sliding layers, bidirectional on
    full ones. Logits are ``cap * tanh(multiplier * logits / cap)`` with ``final_logit_softcapping`` as the cap, or
    ``multiplier * logits`` without one. Embeddings are the target's, scaled as the target scales them, times
    ``input_embedding_scale``.

    ``rope_parameters`` holds one recipe of rotary positions per layer type; without it ``rope_theta`` and
    ``rope_scaling`` apply to all layers. ``rope_is_neox_style`` false rotates adjacent pairs. With
    ``sample_from_anchor`` the anchor's position predicts the first draft (DeepSpec), so that a block of ``block_size``
    positions holds as many drafts. With ``elastic_blocks`` (this package's own key) the drafter was trained on blocks
    of every length, so that a pass fills only the positions asked for. ``draft_vocab_size`` is the size of a reduced
    vocabulary. ``target_fingerprint`` identifies the target that the drafter was trained for.

    Raises ``CheckpointError`` for an impossible value.
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
    max_position_embeddings: int = 32768
    rope_theta: float = DEFAULT_THETA
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, dict[str, Any]] | None = None
    rope_is_neox_style: bool = True
    rms_norm_eps: float = 1e-6
    layer_types: tuple[str, ...] = ()
    sliding_window: int | None = None
    is_causal: bool | None = None
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    attention_bias: bool = False
    sample_from_anchor: bool = False
    elastic_blocks: bool = False
    draft_vocab_size: int | None = None
    target_fingerprint: str | None = None
    model_type: str = field(default="qwen3", kw_only=True)

    checks: ClassVar[Mapping[str, Check]] = {
        "mask_token_id": ("a whole number", is_whole),
        "num_target_layers": or_null(POSITIVE),
        "head_dim": ("a positive whole number", lambda v: is_whole(v) and v >= 0),  # 0: hidden_size over heads
        "target_layer_ids": (
            "a list of layer numbers", lambda v: isinstance(v, list | tuple) and all(map(is_whole, v))
        ),
        "layer_types": (
            "a list of names", lambda v: isinstance(v, list | tuple) and all(isinstance(x, str) for x in v)
        ),
        "is_causal": ("true, false or null", lambda v: v is None or isinstance(v, bool)),
        **dict.fromkeys(("rope_scaling", "rope_parameters"), or_null(("an object", lambda v: isinstance(v, dict)))),
        **dict.fromkeys(("rope_is_neox_style", "attention_bias", "sample_from_anchor", "elastic_blocks"), SWITCH),
        "draft_vocab_size": or_null(("a positive whole number", is_whole)),
        "max_position_embeddings": POSITIVE,
        "target_fingerprint": or_null(("a text", lambda v: isinstance(v, str))),
        **dict.fromkeys(("rope_theta", "rms_norm_eps"), _ABOVE_0),
        **dict.fromkeys(("input_embedding_scale", "output_multiplier"), ("a number", _is_number)),
        "final_logit_softcapping": or_null(_ABOVE_0),
        **dict.fromkeys(
            ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
             "vocab_size", "block_size"), POSITIVE
        ),
    }  # fmt: skip
    """By field; a kind adds those of its own."""
    architecture: ClassVar[str] = "DFlashDraftModel"
    inside: ClassVar[tuple[str, ...]] = ()
    """Fields of a kind that published files have inside ``dflash_config``, unless they are null or empty."""
    inner_labels: ClassVar[Mapping[str, str]] = {}
    """Further keys that these files have there, with the same value in every file."""

    def __post_init__(self) -> None:
        for name, (expected, holds) in self.checks.items():
            if not holds(value := getattr(self, name)):
                raise CheckpointError(f"{name} must be {expected}, got {value!r}.")
        set_ = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731 (frozen dataclass)
        for name, most in _MOST.items():
            if getattr(self, name) > most:
                raise CheckpointError(f"{name} {getattr(self, name)} is too large; expected at most {most}.")
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
        if self.draft_vocab_size is not None and not 0 < self.draft_vocab_size <= self.vocab_size:
            raise CheckpointError(
                f"draft_vocab_size {self.draft_vocab_size} must be 1 to vocab_size, which is {self.vocab_size}."
            )
        self._check_layer_types()

    def check_layer_ids(self, num_layers: int) -> None:
        """Raise ``CheckpointError`` unless a target of ``num_layers`` has all ``target_layer_ids``."""
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
        """The published default for a config that names no layers."""
        _require_positive("num_target_layers (needed, as target_layer_ids is missing)", self.num_target_layers)
        assert self.num_target_layers is not None
        ids = spread_layer_ids(self.num_target_layers, self.num_hidden_layers)
        logger.warning("The drafter's config names no target_layer_ids; evenly spread ones are assumed: %s.", list(ids))
        return ids

    def rope(self, layer: int) -> dict[str, Any]:
        """The recipe of rotary positions of drafter layer ``layer``, with its ``rope_theta``."""
        own = (self.rope_parameters or {}).get(self.layer_types[layer], self.rope_scaling)
        return {"rope_theta": self.rope_theta} | (own or {})

    def causal_in_block(self, layer: int) -> bool:
        """Whether positions of a block see only earlier positions of it, in drafter layer ``layer``."""
        return self.layer_types[layer] == SLIDING if self.is_causal is None else self.is_causal

    def window(self, layer: int) -> int | None:
        """Sliding window of drafter layer ``layer`` in tokens; ``None`` on full layers."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> "DFlashConfig":
        """Parse a published ``config.json``, of any packaging that :mod:`.formats` knows.

        Raises ``CheckpointError`` for a missing key, for a misspelt one (naming the nearest known one), and by name
        for every unsupported key that changes the arithmetic.
        """
        values = published_values(config, {f.name for f in fields(cls)})
        missing = [f.name for f in fields(cls) if f.default is MISSING and f.name not in values]
        if missing:
            raise CheckpointError(f"config.json: {', '.join(missing)} missing; a DFlash drafter needs them.")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """This config as a published ``config.json``."""
        values, defaults = asdict(self), {f.name: f.default for f in fields(self)}
        usual = {name for name, value in values.items() if value == defaults[name]}
        inner = {name: values[name] for name in _INSIDE if name not in usual}
        inner |= {name: values[name] for name in ("mask_token_id", "target_layer_ids")}
        inner |= {name: values[name] for name in self.inside if values[name] not in (None, ())}
        left_out = {*inner, *_INSIDE, *self.inside, *(usual & _OPTIONAL)}
        outer = {name: value for name, value in values.items() if name not in left_out}
        rope = {} if self.rope_parameters else {"rope_scaling": outer.pop("rope_scaling")}
        return {
            "architectures": [self.architecture],
            "dflash_config": {**self.inner_labels, **inner},
            **rope,
            "tie_word_embeddings": True,
            **outer,
        }


_MOST = {
    "block_size": MAX_BLOCK_SIZE, "num_hidden_layers": 1000, "hidden_size": 2**20, "intermediate_size": 2**24,
    "num_attention_heads": 2**14, "num_key_value_heads": 2**14, "head_dim": 2**14, "vocab_size": 2**24,
}  # fmt: skip
_INSIDE = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping", "sample_from_anchor",
           "elastic_blocks")  # fmt: skip
_OPTIONAL = frozenset({
    "num_target_layers", "sliding_window", "is_causal", "rope_parameters", "rope_is_neox_style", "attention_bias",
    "draft_vocab_size", "target_fingerprint",
})  # fmt: skip


def _require_positive(name: str, value: Any) -> None:
    expected, holds = POSITIVE
    if not holds(value):
        raise CheckpointError(f"{name} must be {expected}, got {value!r}.")
