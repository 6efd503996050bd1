"""The interface of a target adapter: where a model keeps its parts, its prompt format and its stop tokens.

The defaults fit the usual mlx-lm layout (``model.model`` with ``embed_tokens``, ``layers``, ``norm``; a tied head or
``lm_head``), also inside the ``language_model`` of a multimodal wrapper. A family overrides only what differs.

Shapes: B batch, L length, E hidden size, F feature size, V vocabulary, N tokens of it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import RLock
from types import SimpleNamespace
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn

from dflash.core.errors import IncompatibleModelsError

from .stand_ins import StandIn, standing_in

DRAFTER_SIZES = ("intermediate_size", "num_attention_heads", "num_key_value_heads")
"""The names that training reads from :attr:`TargetAdapter.config`, to give a new drafter the target's sizes."""

LayerCaller = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]
"""Calls a layer with these arguments in place of the backbone: to record what a rewind needs, or to dispatch early."""


class TargetAdapter:
    """Access to the parts of one loaded mlx-lm model, which stays unchanged."""

    guessed: ClassVar[bool] = False
    """Whether the parts were found by structure, so that a trial must check them."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.in_use = RLock()
        """Held by the thread that computes with the model: every pass exchanges its layers (:meth:`tapped`)."""

    @property
    def language_model(self) -> nn.Module:
        """The text model: the model itself, or the ``language_model`` of a multimodal wrapper."""
        return self.model.get("language_model", self.model)

    @property
    def backbone(self) -> nn.Module:
        """The module that maps tokens to normalised final hidden states and owns the decoder layers."""
        return self.language_model.model

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder layers, in order."""
        return self.backbone.layers

    @property
    def layers_owner(self) -> nn.Module:
        """The module that has the list of layers: the backbone, or a part of it."""
        return self.backbone

    @property
    def embedding(self) -> nn.Module:
        """The token embedding table."""
        return self.backbone.embed_tokens

    @property
    def config(self) -> Any:
        """The text model's config: mlx-lm's ``ModelArgs``, or a view of a wrapper's ``text_config``.

        Training gives a new drafter the sizes ``intermediate_size``, ``num_attention_heads`` and
        ``num_key_value_heads`` from here and, if present, ``head_dim`` (default: ``hidden_size`` by heads) and
        ``rope_theta``. If the config uses other names, override this with an object that has these, such as a
        ``SimpleNamespace``. Decoding reads only what the properties below use.
        """
        model = self.language_model
        config = getattr(model, "args", None) or getattr(model, "config", None)
        text = getattr(config, "text_config", None)
        return SimpleNamespace(**text) if isinstance(text, Mapping) else text or config

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
        """Longest sequence in tokens that the model supports; ``None`` if its config does not say."""
        return getattr(self.config, "max_position_embeddings", None)

    @property
    def embedding_scale(self) -> float:
        """The factor by which the backbone multiplies :meth:`embed` before its first layer.

        A drafter embeds with ``embed(tokens) * embedding_scale``, times its own ``input_embedding_scale`` (default 1).
        """
        return 1.0

    def embed(self, tokens_BL: mx.array) -> mx.array:
        """Rows ``[B, L, E]`` of the embedding table, not scaled yet."""
        return self.embedding(tokens_BL)

    @property
    def head_table(self) -> nn.Module:
        """The module whose rows are the head's: ``lm_head``, or the token embedding table of a tied head."""
        return self.language_model.lm_head if "lm_head" in self.language_model else self.embedding

    def head(self, hidden_BLE: mx.array) -> mx.array:
        """Logits ``[B, L, V]`` from normalised final hidden states: :meth:`cap_logits` of :meth:`project`.

        The norm is the backbone's, since a drafter has a norm of its own.
        """
        return self.cap_logits(self.project(hidden_BLE))

    def project(self, hidden_BLE: mx.array) -> mx.array:
        """The product ``[B, L, V]`` of final hidden states with :attr:`head_table`: logits without a cap."""
        table = self.head_table
        return table.as_linear(hidden_BLE) if hasattr(table, "as_linear") else table(hidden_BLE)

    def cap_logits(self, logits: mx.array) -> mx.array:
        """What the model does to each logit after the product: nothing, or a soft cap."""
        return logits

    def head_rows(self, token_ids_N: mx.array) -> Callable[[mx.array], mx.array]:
        """A function from final hidden states ``[.., E]`` to the logits ``[.., N]`` of the tokens ``token_ids_N``.

        Its rows are gathered once, packed if the head is quantised. If a family overrides :meth:`head`, or its table
        is of an unknown class, all logits are computed and the wanted ones selected.
        """
        product = self.projection(token_ids_N)
        if product is None:
            return lambda hidden: self.head(hidden)[..., token_ids_N]
        return lambda hidden: self.cap_logits(product(hidden))

    def projection(self, token_ids_N: mx.array | None) -> Callable[[mx.array], mx.array] | None:
        """:meth:`project` for the tokens ``token_ids_N``, or all; ``None`` where only :meth:`head` knows it."""
        if getattr(self.head, "__func__", None) is not TargetAdapter.head:
            return None
        return self.project if token_ids_N is None else rows_of_table(self.head_table, token_ids_N)

    def forward(
        self,
        tokens_BL: mx.array,
        cache: list[Any] | None,
        layer_ids: Sequence[int],
        recorder: LayerCaller | None = None,
    ) -> tuple[mx.array, mx.array]:
        """Normalised final hidden states ``[B, L, E]`` and features ``[B, L, F]`` of one pass.

        Features are the outputs of the layers ``layer_ids`` (0-based, after their residuals), concatenated in that
        order. ``recorder`` calls the layers in place of the backbone.

        Raises ``IncompatibleModelsError`` if the backbone does not call one of these layers.
        """
        with self.tapped(layer_ids, recorder) as outputs:
            hidden_BLE = self.run_backbone(tokens_BL, cache)
        missing = [i for i in layer_ids if i not in outputs]
        if missing:
            raise IncompatibleModelsError(f"The backbone does not call its layer {missing[0]}, so it has no features.")
        features = [self.feature(outputs[i]) for i in layer_ids]
        if not features:
            return hidden_BLE, mx.zeros((*hidden_BLE.shape[:2], 0), hidden_BLE.dtype)
        return hidden_BLE, mx.concatenate(features, axis=-1)

    def run_backbone(self, tokens_BL: mx.array, cache: list[Any] | None) -> mx.array:
        """Normalised final hidden states ``[B, L, E]``."""
        return self.backbone(tokens_BL, cache=cache)

    def feature(self, output: Any) -> mx.array:
        """The hidden states ``[B, L, E]`` in a layer's output (the first of several values)."""
        return output[0] if isinstance(output, tuple) else output

    def chat_tokens(self, tokenizer: Any, messages: list[dict[str, str]], **switches: Any) -> list[int]:
        """Token ids of a chat prompt, up to where the answer begins.

        ``switches`` go to the chat template (``enable_thinking``, ``reasoning_effort``), which ignores unknown ones.
        """
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, **switches)

    def stop_tokens(self, tokenizer: Any) -> frozenset[int]:
        """Token ids that end an answer, from the tokenizer and the model's generation config."""
        return frozenset(tokenizer.eos_token_ids)

    @contextmanager
    def tapped(self, layer_ids: Sequence[int], recorder: LayerCaller | None = None) -> Iterator[dict[int, Any]]:
        """For one forward pass, replace layers by :class:`LayerTap`; yields their outputs by layer id.

        Only the list of layers is exchanged, and always restored, so modules and parameter names are untouched. Not
        for two threads on the same model at once.
        """
        outputs: dict[int, Any] = {}
        layers, owner = self.layers, self.layers_owner
        name, listed = _list_of_layers(owner, layers)
        tapped = {id(layers[i]): i for i in (range(len(layers)) if recorder is not None else layer_ids)}
        taps = [LayerTap(x, tapped[id(x)], outputs, recorder) if id(x) in tapped else x for x in listed]
        with standing_in([(owner, name, taps)]):
            yield outputs


def rows_of_table(table: nn.Module, rows_N: mx.array) -> Callable[[mx.array], mx.array] | None:
    """The linear map ``[.., E]`` to ``[.., N]`` by rows of a linear layer or an embedding, quantised or not.

    ``None`` for a module of another class.
    """
    arrays = {name: table[name][rows_N] for name in ("weight", "scales", "biases", "bias") if name in table}
    if type(table) in (nn.Linear, nn.Embedding):

        def product(x: mx.array) -> mx.array:
            return x @ arrays["weight"].T

    elif type(table) in (nn.QuantizedLinear, nn.QuantizedEmbedding):
        form = {"group_size": table.group_size, "bits": table.bits, "mode": table.mode}

        def product(x: mx.array) -> mx.array:
            return mx.quantized_matmul(x, arrays["weight"], arrays["scales"], arrays.get("biases"), **form)

    else:
        return None
    mx.eval(arrays)  # on this thread's stream, whichever thread uses them
    bias_N = arrays.get("bias")
    return product if bias_N is None else lambda x: product(x) + bias_N


class LayerTap(StandIn):
    """Calls a layer, by the recorder if there is one, and keeps the output."""

    def __init__(self, layer: nn.Module, index: int, outputs: dict[int, Any], recorder: LayerCaller | None):
        super().__init__(layer)
        self._index, self._outputs, self._recorder = index, outputs, recorder

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        recorder = self._recorder
        output = self._module(*args, **kwargs) if recorder is None else recorder(self._module, args, kwargs)
        self._outputs[self._index] = output
        return output

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # some backbones select a mask by isinstance
        return type(self._module)


def _list_of_layers(owner: nn.Module, layers: Sequence[nn.Module]) -> tuple[str, list[nn.Module]]:
    """The attribute of ``owner`` (``layers``, ``h``) that holds the decoder layers."""
    wanted = {id(layer) for layer in layers}
    for name, value in owner.items():
        if isinstance(value, list) and wanted <= {id(item) for item in value}:
            return name, value
    raise IncompatibleModelsError(
        f"No list of {type(owner).__name__} holds all layers of the adapter; layers must be modules of one list, and "
        "layers_owner the module that has this list."
    )
