"""A loaded target: an mlx-lm model, its tokenizer and its adapter, behind the few calls decoding needs.

Knows how to load mlx-lm checkpoints. Must not know drafters or the decode loop.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..adapters import TargetAdapter, find_adapter
from ..backend import to_compute_dtype
from ..errors import CheckpointError, GenerationError
from ..files import read_json, resolve_checkpoint
from .caches import make_caches
from .rewind import TargetCache


class LoadedTargetModel:
    """A target ready for speculative decoding.

    Args:
        model: A model loaded by mlx-lm.
        tokenizer: mlx-lm's wrapper or a Hugging Face tokenizer; ``None`` where only token ids are used.
        adapter: Found by the model's ``model_type`` when ``None``.
    """

    def __init__(self, model: nn.Module, tokenizer: Any = None, adapter: TargetAdapter | None = None):
        self.model = model
        self.adapter = adapter or find_adapter(model)
        wrapped = tokenizer is None or isinstance(tokenizer, TokenizerWrapper)
        self.tokenizer = tokenizer if wrapped else TokenizerWrapper(tokenizer)

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self.adapter.hidden_size

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding table."""
        return self.adapter.vocab_size

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.adapter.layers)

    @property
    def max_length(self) -> int | None:
        """Longest sequence, in tokens, that the model was made for, if it says so."""
        return self.adapter.max_length

    def embed(self, tokens_BL: mx.array) -> mx.array:
        """Token embeddings ``[B, L, E]``."""
        return self.adapter.embed(tokens_BL)

    def head(self, hidden_BLE: mx.array) -> mx.array:
        """Logits ``[B, L, V]`` from normalised final hidden states."""
        return self.adapter.head(hidden_BLE)

    def forward_hidden(
        self, tokens: mx.array, cache: list[Any] | None, layer_ids: Sequence[int]
    ) -> tuple[mx.array, mx.array]:
        """Final hidden states ``[B, L, E]`` (normalised, before the head) and features ``[B, L, F]``.

        For prompts: what a rewind of recurrent layers would need is not kept.
        """
        return self._forward(tokens, cache, layer_ids, rewindable=False)

    def forward_with_hidden_states(
        self, tokens: mx.array, cache: list[Any] | None, layer_ids: Sequence[int]
    ) -> tuple[mx.array, mx.array]:
        """Logits ``[B, L, V]`` and features ``[B, L, len(layer_ids) * hidden_size]`` of ``tokens [B, L]``.

        Layer id ``i`` is the output of decoder layer ``i``, 0-based. ``cache`` is updated in place, and can
        be rewound within these tokens until the next pass.
        """
        hidden, features = self._forward(tokens, cache, layer_ids, rewindable=True)
        return self.head(hidden), features

    def _forward(
        self, tokens: mx.array, cache: list[Any] | None, layer_ids: Sequence[int], rewindable: bool
    ) -> tuple[mx.array, mx.array]:
        recorder = cache.expect(tokens.shape[1], rewindable) if isinstance(cache, TargetCache) else None
        return self.adapter.forward(tokens, cache, layer_ids, recorder)

    def make_cache(self, **options: Any) -> TargetCache:
        """New, empty caches, one a layer; ``options`` as in :func:`~dflash.target.caches.make_caches`.

        Raises :class:`~dflash.errors.IncompatibleModelsError` if one of them cannot be rewound exactly.
        """
        return TargetCache(make_caches(self.model, **options))

    def rewind_kv_caches(self, cache: list[Any], length: int) -> None:
        """Bring ``cache`` back to its first ``length`` tokens; only tokens of the last update may go.

        Raises :class:`~dflash.errors.GenerationError` if the cache holds fewer tokens than ``length``.
        """
        (cache if isinstance(cache, TargetCache) else TargetCache(cache)).rewind(length)

    def build_prompt(self, text: str, chat: bool = True, **switches: Any) -> list[int]:
        """Token ids of ``text`` as a user's message (or as it stands: ``chat=False`` or no template).

        ``switches`` go to the chat template, such as ``enable_thinking=False`` for Qwen3.
        """
        if self.tokenizer is None:
            raise GenerationError("This target was loaded without a tokenizer; pass token ids to spec_generate.")
        if not chat or not self.tokenizer.has_chat_template:
            return self.tokenizer.encode(text)
        return self.adapter.chat_tokens(self.tokenizer, [{"role": "user", "content": text}], **switches)

    def stop_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer; empty without a tokenizer."""
        return self.adapter.stop_tokens(self.tokenizer) if self.tokenizer is not None else frozenset()


def load_target(path_or_hub_name: str | Path, trust_remote_code: bool = False) -> LoadedTargetModel:
    """Load an mlx-lm model directory, or a hub name (``org/name``; the only case that uses the network).

    Raises :class:`~dflash.errors.CheckpointError` for missing or damaged files and
    :class:`~dflash.errors.IncompatibleModelsError` for an architecture without an adapter.
    """
    path = resolve_checkpoint(path_or_hub_name)
    read_json(path / "config.json")  # its errors name the file
    try:
        model, tokenizer, *_ = mlx_lm.load(
            str(path),
            tokenizer_config={"trust_remote_code": trust_remote_code},
            trust_remote_code=trust_remote_code,
        )
    except (ValueError, RuntimeError, OSError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise CheckpointError(f"Cannot load the target at {path}: {reason}") from error
    to_compute_dtype(model)
    mx.eval(model.parameters())  # what is left lazy could only be computed in this thread
    return LoadedTargetModel(model, tokenizer)


def load_target_model(path_or_model: str | Path | nn.Module, tokenizer: Any = None) -> LoadedTargetModel:
    """A :class:`LoadedTargetModel` from a folder, a hub name, or a model that mlx-lm has loaded."""
    if isinstance(path_or_model, nn.Module):
        return LoadedTargetModel(path_or_model, tokenizer)
    return load_target(path_or_model)
