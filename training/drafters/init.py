"""The drafter that a run trains: a new one for its target, or an existing one."""

import dataclasses
import logging
from collections.abc import Collection
from typing import Any

import mlx.core as mx

from dflash import DFlashConfig, DFlashDraftModel, LoadedTargetModel, load_drafter
from dflash.adapters.base import DRAFTER_SIZES
from dflash.core.errors import TrainingError, did_you_mean
from dflash.core.files import flat
from dflash.drafters.checkpoints.config import spread_layer_ids
from dflash.drafters.checkpoints.formats import SLIDING
from dflash.drafters.kinds import DEFAULT, drafter_class, kind_of
from dflash.target.identity import target_fingerprint

from ..data.mask_token import suggestion
from ..data.sequences import Sequences
from ..recipe import DrafterShape
from .vocabulary import frequent_tokens

logger = logging.getLogger(__name__)


def drafter_config(shape: DrafterShape, target: LoadedTargetModel) -> DFlashConfig:
    """The config of the drafter that ``shape`` describes for ``target``; unset sizes are the target's.

    Raises ``TrainingError`` for a size that the target does not state either and for options that the kind lacks, and
    ``DFlashError`` for an unknown kind or a drafter that cannot be loaded.
    """
    if shape.from_ is not None:
        return _existing(shape, target).config
    config = target.adapter.config
    sizes: dict[str, Any] = {name: getattr(shape, name) or getattr(config, name, None) for name in DRAFTER_SIZES}
    if missing := [name for name, size in sizes.items() if not isinstance(size, int)]:
        wanted = ", ".join(f"drafter.{name}" for name in missing)
        raise TrainingError(
            f"The target's config gives no {', '.join(missing)}; set {wanted} in the recipe, or by --set "
            f"{wanted.partition(',')[0]}=N."
        )
    head_dim = getattr(config, "head_dim", None) or target.hidden_size // sizes["num_attention_heads"]
    values: dict[str, Any] = sizes | {
        "hidden_size": target.hidden_size,
        "num_hidden_layers": shape.num_hidden_layers,
        "head_dim": shape.head_dim or head_dim,
        "num_target_layers": target.num_layers,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": shape.vocabulary,
        "mask_token_id": mask_token_id(shape.mask_token, target),
        "block_size": shape.block_size,
        "elastic_blocks": shape.elastic_blocks,
        "target_layer_ids": shape.target_layer_ids or _spread(shape, target),
        "rope_theta": float(shape.rope_theta or getattr(config, "rope_theta", None) or 1_000_000.0),
        "max_position_embeddings": target.max_length or 40960,
        "target_fingerprint": target_fingerprint(target),
    }
    if shape.window is not None:
        values |= {
            "layer_types": (SLIDING,) * shape.num_hidden_layers, "sliding_window": shape.window, "is_causal": False
        }  # fmt: skip
    kind = _trainable_class(shape.kind)
    for name in shape.options:
        if name in values:
            instead = {"draft_vocab_size": "vocabulary", "layer_types": "window", "sliding_window": "window",
                       "is_causal": "window"}.get(name, name)  # fmt: skip
            raise TrainingError(f"drafter.options.{name} is not an option of the kind; set drafter.{instead} instead.")
    if (shape.vocabulary or 0) > target.vocab_size:
        raise TrainingError(f"drafter.vocabulary {shape.vocabulary} is more than the target's {target.vocab_size}.")
    return kind.config_class(**values, **_options(shape, kind, {*values, "model_type"}))


def _options(shape: DrafterShape, kind: type[Any], given: Collection[str]) -> dict[str, Any]:
    """The kind's own keys: its usual values, overridden by the recipe, which may not name those ``given``."""
    known = {field.name for field in dataclasses.fields(kind.config_class)}.difference(given)
    for name in shape.options:
        if name not in known:
            raise TrainingError(
                f"drafter.options: the kind {shape.kind!r} has no option {name!r}; {did_you_mean(name, known)}"
            )
    return kind.usual_options | shape.options


def mask_token_id(mask_token: int | str | None, target: LoadedTargetModel) -> int:
    """The id that stands for "not yet drafted". Raises ``TrainingError`` if there is none."""
    if isinstance(mask_token, int):
        if not 0 <= mask_token < target.vocab_size:
            raise TrainingError(f"drafter.mask_token {mask_token} is not among the target's {target.vocab_size} ids.")
        return mask_token
    tokenizer = target.tokenizer
    token = tokenizer.mask_token if mask_token is None else mask_token
    number = tokenizer.get_vocab().get(token)
    if number is None:
        what = "The tokenizer has no mask token" if mask_token is None else f"The tokenizer has no token {token!r}"
        raise TrainingError(f"{what}; set drafter.mask_token to {suggestion(target)}.")
    return int(number)


def new_drafter(shape: DrafterShape, target: LoadedTargetModel, sequences: Sequences | None = None) -> DFlashDraftModel:
    """The drafter that ``shape`` describes, bound to ``target``, with float32 weights.

    ``sequences``, the training split, give the token frequencies for a new drafter with a reduced vocabulary. Weights
    come from the drafter ``shape.from_`` or are sampled from ``shape.seed``, smaller where they feed the residual. What
    the kind adds to DFlash is initialised by its own modules. Raises as :func:`drafter_config` does.
    """
    if shape.from_ is not None:
        return _existing(shape, target)
    config = drafter_config(shape, target)
    mx.random.seed(shape.seed)
    model: DFlashDraftModel = _trainable_class(shape.kind)(config)
    out_scale = (2 * config.num_hidden_layers) ** -0.5

    def draw(name: str, value: mx.array) -> mx.array:
        if value.ndim < 2 or _is_added(name, model):
            return value
        feeds_residual = "o_proj" in name or "down_proj" in name
        return mx.random.normal(value.shape, scale=value.shape[-1] ** -0.5 * (out_scale if feeds_residual else 1.0))

    model.load_weights([(name, draw(name, value)) for name, value in flat(model.parameters()).items()])
    if shape.vocabulary is not None:
        if sequences is None:
            raise TrainingError("drafter.vocabulary counts the tokens of a dataset; set data.folder to one.")
        ids = frequent_tokens(sequences, shape.vocabulary, target.vocab_size, target.stop_token_ids())
        model.reduce_vocabulary(mx.array(ids), own_head=False)
    model.bind(target)
    mx.eval(model.parameters())
    return model


def _is_added(name: str, model: DFlashDraftModel) -> bool:
    return not set(name.split(".")).isdisjoint(model.added_modules)


def _spread(shape: DrafterShape, target: LoadedTargetModel) -> tuple[int, ...]:
    ids = spread_layer_ids(target.num_layers, shape.num_hidden_layers)
    logger.info("drafter.target_layer_ids is not set: the drafter reads evenly spread layers, %s.", list(ids))
    return ids


def _trainable_class(kind: str) -> type[Any]:
    found = drafter_class(kind)
    if not issubclass(found, DFlashDraftModel):
        raise TrainingError(
            f"drafter.kind {kind!r} cannot be trained: its class {found.__name__} is no subclass of DFlashDraftModel."
        )
    return found


SHAPE = ("num_hidden_layers", "target_layer_ids", "intermediate_size", "num_attention_heads",
         "num_key_value_heads", "head_dim", "rope_theta")  # fmt: skip
"""Settings of a drafter's shape that its config has under the same names."""


def _existing(shape: DrafterShape, target: LoadedTargetModel) -> DFlashDraftModel:
    """The drafter ``shape.from_`` bound to this target, or a drafter of another kind that starts from its weights."""
    model = load_drafter(shape.from_ or "")
    kind = kind_of(model)
    _trainable_class(kind)
    if any(name.endswith(".scales") for name in flat(model.parameters())):
        raise TrainingError(f"drafter.from {shape.from_} is quantised; start from its weights before quantisation.")
    defaults = {field.name: field.default for field in dataclasses.fields(DrafterShape)}
    model.config = dataclasses.replace(
        model.config,
        # No weight depends on the number of masks, so it may grow or shrink; the default leaves it.
        block_size=model.config.block_size if shape.block_size == defaults["block_size"] else shape.block_size,
        elastic_blocks=model.config.elastic_blocks or shape.elastic_blocks,
        num_target_layers=target.num_layers,
        target_fingerprint=target_fingerprint(target),
    )
    model.apply(lambda weight: weight.astype(mx.float32))
    model.bind(target)
    if own := [name for name in model.own_tables if name in model]:
        raise TrainingError(
            f"drafter.from {shape.from_} has an {' and an '.join(own)} of its own that are not this target's; train it "
            "for the target whose copies they are."
        )
    if shape.kind not in (kind, DEFAULT):
        model = _extended(shape, model)
        model.bind(target)
    elif shape.options:
        raise TrainingError(f"drafter.options are those of {shape.from_}; remove drafter.options, or drafter.from.")
    asked = {name: getattr(shape, name) for name in SHAPE}
    there = {name: getattr(model.config, name) for name in SHAPE}
    if shape.mask_token is not None:
        asked["mask_token"], there["mask_token"] = mask_token_id(shape.mask_token, target), model.config.mask_token_id
    asked["vocabulary"], there["vocabulary"] = shape.vocabulary, model.config.draft_vocab_size
    asked["window"], there["window"] = shape.window, model.config.sliding_window
    for name, value in asked.items():
        if value not in (defaults[name], there[name]):
            raise TrainingError(
                f"drafter.{name} is {value!r}, but {shape.from_} has {there[name]!r}. A drafter keeps its shape: "
                f"remove drafter.{name}, or drafter.from."
            )
    mx.eval(model.parameters())
    return model


def _extended(shape: DrafterShape, start: DFlashDraftModel) -> DFlashDraftModel:
    """A drafter of the kind ``shape.kind`` with the weights of ``start`` and new additions.

    Heads that the new kind lacks stay behind: no layer depends on them. Any other difference is refused.
    """
    kind, there = _trainable_class(shape.kind), kind_of(start)
    shared = {field.name: getattr(start.config, field.name) for field in dataclasses.fields(DFlashConfig)}
    mx.random.seed(shape.seed)
    model: DFlashDraftModel = kind(kind.config_class(**shared, **_options(shape, kind, shared)))
    if start.token_ids is not None:
        model.reduce_vocabulary(start.token_ids, own_head="lm_head" in start)
    weights, wanted = flat(start.parameters()), flat(model.parameters())
    alike = {name for name in weights.keys() & wanted.keys() if weights[name].shape == wanted[name].shape}
    behind = {name for name in weights.keys() - alike if name.partition(".")[0] in start.head_modules}
    new = {name for name in wanted.keys() - alike if _is_added(name, model)}
    if unfit := (weights.keys() | wanted.keys()) - alike - behind - new:
        raise TrainingError(
            f"drafter.from {shape.from_} is of the kind {there!r}, from which one of the kind {shape.kind!r} cannot "
            f"start: {min(unfit)} is not in both, or not of one shape."
        )
    model.load_weights([(name, weights[name]) for name in alike], strict=False)
    parts = [part for part in model.added_modules if any(part in name.split(".") for name in new)]
    lost = f"; {' and '.join(sorted({n.partition('.')[0] for n in behind}))} stay behind" if behind else ""
    logger.info("drafter.from %s: a %s drafter, with new %s%s.", shape.from_, there, " and ".join(parts), lost)
    return model
