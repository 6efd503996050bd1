"""What a target adapter answers: where a model keeps its parts, its prompt form and its stop tokens.

Knows the usual mlx-lm layout (``model.model`` with ``embed_tokens``, ``layers``, ``norm``; a tied head or
``lm_head``). A family overrides only what differs. Must not know the decode loop or any drafter.

Shapes: B batch, L length, E hidden size, F feature size, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn


class TargetAdapter:
    """Access to one loaded mlx-lm model; the model's modules and parameters stay as they are."""

    def __init__(self, model: nn.Module):
        self.model = model

    @property
    def backbone(self) -> nn.Module:
        """The module that maps tokens to normalised final hidden states and owns ``layers``."""
        return self.model.model

    @property
    def config(self) -> Any:
        """The text model's config (mlx-lm's ``ModelArgs``)."""
        return self.model.args

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self.config.hidden_size

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding table."""
        return self.config.vocab_size

    @property
    def max_length(self) -> int | None:
        """Longest sequence in tokens that the model was made for, if it says so."""
        return getattr(self.config, "max_position_embeddings", None)

    def embed(self, tokens_BL: mx.array) -> mx.array:
        """Token embeddings ``[B, L, E]`` as the drafter shares them."""
        return self.backbone.embed_tokens(tokens_BL)

    def head(self, hidden_BLE: mx.array) -> mx.array:
        """Logits ``[B, L, V]`` from normalised final hidden states."""
        if "lm_head" in self.model:
            return self.model.lm_head(hidden_BLE)
        return self.backbone.embed_tokens.as_linear(hidden_BLE)

    def forward(
        self, tokens_BL: mx.array, cache: list[Any] | None, layer_ids: Sequence[int]
    ) -> tuple[mx.array, mx.array]:
        """Normalised final hidden states ``[B, L, E]`` and features ``[B, L, F]`` of one pass.

        Features are the outputs of the layers ``layer_ids`` (0-based, after their residuals),
        concatenated in that order.
        """
        with self._tapped(layer_ids) as outputs:
            hidden_BLE = self.backbone(tokens_BL, cache=cache)
        features = [outputs[i] for i in layer_ids]
        if not features:
            return hidden_BLE, mx.zeros((*hidden_BLE.shape[:2], 0), hidden_BLE.dtype)
        return hidden_BLE, mx.concatenate(features, axis=-1)

    def chat_tokens(self, tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a chat prompt that ends where the answer begins."""
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True)

    @contextmanager
    def _tapped(self, layer_ids: Sequence[int]) -> Iterator[dict[int, mx.array]]:
        """For one forward pass, stand a recording :class:`LayerTap` before each chosen layer.

        Only the backbone's list of layers is exchanged, and put back whatever happens, so modules and
        parameter names are untouched. Not for two threads on the same model at once.
        """
        outputs: dict[int, mx.array] = {}
        layers = self.backbone.layers
        chosen = frozenset(layer_ids)
        self.backbone.layers = [LayerTap(layer, i, outputs) if i in chosen else layer for i, layer in enumerate(layers)]
        try:
            yield outputs
        finally:
            self.backbone.layers = layers


class LayerTap:
    """Stands for a layer: calls it, keeps what it returned, and lends its attributes."""

    def __init__(self, layer: nn.Module, index: int, outputs: dict[int, mx.array]):
        self._layer, self._index, self._outputs = layer, index, outputs

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        output = self._outputs[self._index] = self._layer(*args, **kwargs)
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)
