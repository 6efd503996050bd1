"""The multi-token-prediction layer of Qwen3-Next and Qwen3.5 targets as a drafter: ``--drafter mtp``.

Such targets are published with one more layer, ``mtp.*``, which mlx-lm drops when it loads them. From the embedding of
a token and the target's final hidden state before it, the layer computes a hidden state that predicts the next token;
fed its own drafts and hidden states it continues. Its inner layer is of the target's full-attention kind. Names and
order of inputs are those of Qwen3-Next (after DeepSeek-V3, arXiv:2412.19437).

Shapes: S rows, a row being a token and the hidden state before it; E hidden size, V vocabulary.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache

from ..core.backend import to_compute_dtype
from ..core.errors import CheckpointError, IncompatibleModelsError
from ..core.files import read_json, read_safetensors
from .checkpoints.tensors import Weights, load_weights
from .kinds import register_drafter
from .protocol import Proposal
from .sequential import Choose, Walk, best, sampled

if TYPE_CHECKING:
    from ..decoding.sampling import DrawingSampler
    from ..target import LoadedTargetModel

NAME = "mtp"
BLOCK_SIZE = 4
"""Positions per block. The layer was trained to predict one draft; later drafts are accepted less often."""

_PREFIX = "mtp."


class MTPLayer(nn.Module):
    """``mtp.*``: two norms, a projection of the joined inputs, a layer of the target's kind, and a norm."""

    def __init__(self, layer: nn.Module, size: int, eps: float):
        super().__init__()
        self.pre_fc_norm_embedding = nn.RMSNorm(size, eps=eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(size, eps=eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = [layer]
        self.norm = nn.RMSNorm(size, eps=eps)

    def __call__(self, embeddings_1SE: mx.array, hidden_1SE: mx.array, cache: KVCache) -> mx.array:
        """Hidden states ``[1, S, E]``, for the head and the next draft, of the rows after those in ``cache``."""
        both = [self.pre_fc_norm_embedding(embeddings_1SE), self.pre_fc_norm_hidden(hidden_1SE)]
        x_1SE = self.fc(mx.concatenate(both, axis=-1))
        return self.norm(self.layers[0](x_1SE, mask=create_attention_mask(x_1SE, cache), cache=cache))


class MTPCache:
    """Keys and values of the layer's rows, and the hidden state of the last committed token, whose next is unknown.

    Rows ``waiting`` are committed but not fed yet: they go in one pass with the next anchor.
    """

    def __init__(self) -> None:
        self.kv = KVCache()
        self.offset = 0  # committed tokens
        self.hidden: mx.array | None = None
        self.waiting: list[tuple[mx.array, mx.array]] = []

    @property
    def state(self) -> list[Any]:
        """The arrays held, for ``mx.eval``."""
        return [self.kv.state if self.kv.offset else [], self.hidden, self.waiting]


@register_drafter(NAME)
class MTPDrafter:
    """The multi-token-prediction layer in the files of the target.

    Follows :class:`~dflash.drafters.protocol.DrawingDrafter`.

    Args:
        block_size: Most positions per block, the anchor included; each draft is one pass of the layer and the head.
    """

    def __init__(self, block_size: int = BLOCK_SIZE):
        self.block_size = block_size
        self.target_layer_ids: tuple[int, ...] = ()

    def bind(self, target: "LoadedTargetModel") -> None:
        """Read the layer from the target's files.

        Raises ``IncompatibleModelsError`` for a target without such a layer or not loaded from files, and
        ``CheckpointError`` for weights that do not fit.
        """
        if target.folder is None:
            raise IncompatibleModelsError(
                "The drafter 'mtp' reads the target's files; load the target by its folder or hub name."
            )
        self.layer = read_mtp_layer(target, target.folder)
        # The layer reads hidden states after the target's final norm; the last layer's outputs are those before it.
        self.target_layer_ids = (target.num_layers - 1,)
        self._final_norm, self._target = target.adapter.backbone.norm, target

    def make_cache(self) -> MTPCache:
        """A new, empty cache."""
        return MTPCache()

    def extend_context(self, features: mx.array, cache: MTPCache, tokens: mx.array) -> None:
        """Append committed ``tokens [1, S]`` with the outputs ``[1, S, E]`` of the target's last layer."""
        hidden_1SE = self._final_norm(features)
        before = hidden_1SE[:, :-1]
        if cache.hidden is not None:
            before = mx.concatenate([cache.hidden, before], axis=1)
        cache.offset, cache.hidden = cache.offset + tokens.shape[1], hidden_1SE[:, -1:]
        cache.waiting.append((tokens[:, tokens.shape[1] - before.shape[1] :], before))
        if sum(rows.shape[1] for rows, _ in cache.waiting) > self.block_size:  # a prompt
            self._feed(*_together(cache.waiting), cache)
            cache.waiting = []

    def propose(self, anchor: mx.array, length: int, cache: MTPCache) -> Proposal:
        """Draft up to ``length`` tokens after ``anchor [1, 1]``, one pass of the layer each."""
        return self._walk(anchor, length, cache, best)

    def draw(self, anchor: mx.array, length: int, cache: MTPCache, sampler: "DrawingSampler") -> Proposal:
        """As :meth:`propose`, with each token sampled by ``sampler`` given those before it."""
        return self._walk(anchor, length, cache, sampled(sampler.log_distribution))

    def _walk(self, anchor: mx.array, length: int, cache: MTPCache, choose: Choose) -> Proposal:
        assert cache.hidden is not None
        row = anchor.astype(mx.int32), cache.hidden
        hidden_11E = self._feed(*_together([*cache.waiting, row]), cache)[:, -1:]
        cache.waiting = []
        walk = Walk(choose)
        for i in range(min(length, self.block_size - 1)):
            if i > 0:
                hidden_11E = self._feed(walk.tokens[-1][None], hidden_11E, cache)
            walk.step(self._target.head(hidden_11E)[0])
        cache.kv.trim(len(walk.tokens))  # the anchor and all drafts but the last
        return walk.proposal()

    def _feed(self, tokens_1S: mx.array, hidden_1SE: mx.array, cache: MTPCache) -> mx.array:
        return self.layer(self._target.embed(tokens_1S), hidden_1SE, cache.kv)


def _together(rows: list[tuple[mx.array, mx.array]]) -> tuple[mx.array, mx.array]:
    tokens, hidden = zip(*rows, strict=True)
    return mx.concatenate([t.astype(mx.int32) for t in tokens], axis=1), mx.concatenate(list(hidden), axis=1)


# --- its files --------------------------------------------------------------------------------------------


def read_mtp_layer(target: "LoadedTargetModel", folder: Path) -> MTPLayer:
    """Read the layer ``mtp.*`` from the files of ``target``.

    Raises ``IncompatibleModelsError`` if there is none, or if the target has no full-attention layer of a known kind,
    and ``CheckpointError`` for weights that do not fit.
    """
    config, stored = read_json(folder / "config.json"), read_safetensors(folder)
    weights = {name.partition(_PREFIX)[2]: w for name, w in stored.items() if f".{_PREFIX}" in f".{name}"}
    if not weights:
        raise IncompatibleModelsError(
            f"{folder} holds no mtp.* tensors, so the drafter 'mtp' has nothing to draft with; conversions often leave "
            "them out."
        )
    if (config | config.get("text_config", {})).get("mtp_use_dedicated_embeddings"):
        raise CheckpointError(f"{folder}: mtp_use_dedicated_embeddings is not supported; it means other embeddings.")
    # In published files of these targets a norm multiplies by 1 + w. mlx-lm's conversion adds the 1, and transposes
    # the convolutions of recurrent layers, which identifies unconverted files. A conversion may have copied mtp.* as
    # it was: then the mean of the layer's own norms is near 0. (The two norms before `fc` are small in either form.)
    published = any(name.endswith("conv1d.weight") and w.shape[-1] != 1 for name, w in stored.items())
    own = [w for name, w in weights.items() if w.ndim == 1 and "norm" in name and "pre_fc" not in name]
    if published or (own and (mx.concatenate(own).astype(mx.float32).mean() < 0.5).item()):
        weights = {name: w + 1 if w.ndim == 1 and "norm" in name else w for name, w in weights.items()}
    model = new_mtp_layer(target)
    load_weights(model, _joined_experts(weights), config, folder)
    to_compute_dtype(model)
    mx.eval(model.parameters())
    return model


def new_mtp_layer(target: "LoadedTargetModel") -> MTPLayer:
    """A new layer for ``target``, with an inner layer of the class of the target's first full-attention layer.

    Raises ``IncompatibleModelsError`` if the target has no full-attention layer of a known kind.
    """
    index = next((i for i, layer in enumerate(target.adapter.layers) if "self_attn" in layer), None)
    try:
        assert index is not None
        kind: Any = type(target.adapter.layers[index])
        layer = kind(target.adapter.language_model.args, layer_idx=index)
        return MTPLayer(layer, target.hidden_size, target.adapter.config.rms_norm_eps)
    except (AssertionError, TypeError, AttributeError) as error:
        raise IncompatibleModelsError(
            "The drafter 'mtp' fits targets of the Qwen3-Next and Qwen3.5 families only, not this architecture."
        ) from error


def _joined_experts(weights: Weights) -> Weights:
    """``weights`` with the experts of each projection joined in one array, as in mlx-lm."""
    joined, experts = dict(weights), "layers.0.mlp.experts."
    count = len({name.split(".")[4] for name in weights if name.startswith(experts) and name.split(".")[4].isdigit()})
    for part in ("gate_proj", "up_proj", "down_proj") if count else ():
        rows = [joined.pop(f"{experts}{i}.{part}.weight") for i in range(count)]
        joined[f"layers.0.mlp.switch_mlp.{part}.weight"] = mx.stack(rows)
    if f"{experts}gate_up_proj" in joined:
        gate, up = mx.split(joined.pop(f"{experts}gate_up_proj"), 2, axis=-2)
        both = {"gate_proj": gate, "up_proj": up, "down_proj": joined.pop(f"{experts}down_proj")}
        joined |= {f"layers.0.mlp.switch_mlp.{part}.weight": w for part, w in both.items()}
    return joined
