"""A new drafter for a target: its config from a recipe's shape, its weights from a seed.

Knows a target's config and tokenizer. Must not know data, losses or how a drafter is trained.
"""

import mlx.core as mx

from dflash import DFlashConfig, DFlashDraftModel, LoadedTargetModel
from dflash.errors import TrainingError
from dflash.files import flat

from ..recipe import DrafterShape


def drafter_config(shape: DrafterShape, target: LoadedTargetModel) -> DFlashConfig:
    """The config of a drafter for ``target``; what ``shape`` leaves open is as in the target.

    Raises :class:`~dflash.errors.TrainingError` for what the target does not say either.
    """
    config = target.adapter.config

    def size(name: str) -> int:
        value = getattr(shape, name) or getattr(config, name, None)
        if not isinstance(value, int):
            raise TrainingError(f"The target's config gives no {name}; set drafter.{name} in the recipe.")
        return value

    heads = size("num_attention_heads")
    return DFlashConfig(
        hidden_size=target.hidden_size,
        intermediate_size=size("intermediate_size"),
        num_hidden_layers=shape.num_hidden_layers,
        num_attention_heads=heads,
        num_key_value_heads=size("num_key_value_heads"),
        head_dim=shape.head_dim or getattr(config, "head_dim", None) or target.hidden_size // heads,
        num_target_layers=target.num_layers,
        vocab_size=target.vocab_size,
        mask_token_id=mask_token_id(shape.mask_token, target),
        block_size=shape.block_size,
        target_layer_ids=shape.target_layer_ids,
        rope_theta=float(shape.rope_theta or getattr(config, "rope_theta", None) or 1_000_000.0),
        max_position_embeddings=target.max_length or 40960,
    )


def mask_token_id(mask_token: int | str | None, target: LoadedTargetModel) -> int:
    """The id that stands for "not yet drafted". Raises :class:`~dflash.errors.TrainingError` if there is none."""
    if isinstance(mask_token, int):
        if not 0 <= mask_token < target.vocab_size:
            raise TrainingError(f"drafter.mask_token {mask_token} is not among the target's {target.vocab_size} ids.")
        return mask_token
    tokenizer = target.tokenizer
    token = tokenizer.mask_token if mask_token is None else mask_token
    number = tokenizer.get_vocab().get(token)
    if number is None:
        what = "The tokenizer has no mask token" if mask_token is None else f"The tokenizer has no token {token!r}"
        raise TrainingError(f"{what}; set drafter.mask_token to a token or id that no text uses.")
    return int(number)


def new_drafter(shape: DrafterShape, target: LoadedTargetModel) -> DFlashDraftModel:
    """A drafter bound to ``target``, its weights drawn from ``shape.seed``, smaller where they feed the residual."""
    config = drafter_config(shape, target)
    mx.random.seed(shape.seed)
    model = DFlashDraftModel(config)
    out_scale = (2 * config.num_hidden_layers) ** -0.5

    def draw(name: str, value: mx.array) -> mx.array:
        if value.ndim < 2:
            return value
        feeds_residual = "o_proj" in name or "down_proj" in name
        return mx.random.normal(value.shape, scale=value.shape[-1] ** -0.5 * (out_scale if feeds_residual else 1.0))

    model.load_weights([(name, draw(name, value)) for name, value in flat(model.parameters()).items()])
    model.bind(target)
    mx.eval(model.parameters())
    return model
