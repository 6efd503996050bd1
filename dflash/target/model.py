"""A target ready for decoding: an mlx-lm model, its tokenizer and its adapter, behind the few calls decoding needs."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..adapters import TargetAdapter, detect_model_architecture, find_adapter
from ..adapters.base import LayerCaller
from ..adapters.registry import generic_does_not_fit
from ..core.errors import GenerationError, IncompatibleModelsError
from .caches import make_caches
from .early import early_layers
from .rewind import TargetCache, check_trees
from .rows import RowsPass, check_batchable
from .trial import first_difference, passes, rows_difference, tree_difference

logger = logging.getLogger(__name__)


class LoadedTargetModel:
    """A target ready for speculative decoding.

    Args:
        model: A model loaded by mlx-lm.
        tokenizer: mlx-lm's wrapper or a Hugging Face tokenizer; ``None`` if only token ids are used.
        adapter: By default the one for the model's ``model_type``. A generic adapter is tried on a few short passes
            first.
        folder: The folder that it was loaded from, if any.

    Raises ``IncompatibleModelsError`` for an architecture that has no adapter and that the generic one does not fit.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any = None,
        adapter: TargetAdapter | None = None,
        folder: Path | None = None,
    ):
        self.model, self.folder = model, folder
        self.adapter = adapter or find_adapter(model)
        wrapped = tokenizer is None or isinstance(tokenizer, TokenizerWrapper)
        self.tokenizer = tokenizer if wrapped else TokenizerWrapper(tokenizer)
        if adapter is None and self.adapter.guessed:
            self._try_guessed_adapter()

    def _try_guessed_adapter(self) -> None:
        model_type = detect_model_architecture(self.model)
        logger.info("%s has no adapter of its own: %d short passes try the generic one.", model_type, passes())
        if difference := first_difference(self):
            raise generic_does_not_fit(model_type, difference)

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
        """Longest sequence, in tokens, that the model was made for, if its config says so."""
        return self.adapter.max_length

    @property
    def embedding_scale(self) -> float:
        """The factor by which the backbone multiplies :meth:`embed` before its first layer."""
        return self.adapter.embedding_scale

    def embed(self, tokens_BL: mx.array) -> mx.array:
        """Rows of the embedding table, ``[B, L, E]``, not yet multiplied by :attr:`embedding_scale`."""
        return self.adapter.embed(tokens_BL)

    def head(self, hidden_BLE: mx.array) -> mx.array:
        """Logits ``[B, L, V]`` from normalised final hidden states."""
        return self.adapter.head(hidden_BLE)

    def forward_hidden(
        self, tokens: mx.array, cache: list[Any] | None, layer_ids: Sequence[int]
    ) -> tuple[mx.array, mx.array]:
        """Final hidden states ``[B, L, E]`` (normalised, before the head) and features ``[B, L, F]``.

        For prompts: nothing is kept for a rewind of recurrent layers.
        """
        return self._forward(tokens, cache, layer_ids, rewindable=False)

    def forward_with_hidden_states(
        self,
        tokens: mx.array,
        cache: list[Any] | None,
        layer_ids: Sequence[int],
        parents: Sequence[int] | None = None,
    ) -> tuple[mx.array, mx.array]:
        """Logits ``[B, L, V]`` and features ``[B, L, len(layer_ids) * hidden_size]`` of ``tokens [B, L]``.

        Layer id ``i`` is the output of decoder layer ``i``, 0-based. ``cache`` is updated in place, and can be rewound
        within these tokens until the next pass. With ``parents`` the tokens after the first are a tree
        (:mod:`dflash.core.trees`), ``B`` is 1, and :meth:`TargetCache.keep` chooses the path that remains. A CPU starts
        on each layer while the next is built.

        Raises ``IncompatibleModelsError``, naming a layer, if the target cannot verify trees.
        """
        hidden, features = self._forward(tokens, cache, layer_ids, rewindable=True, parents=parents)
        return self.head(hidden), features

    def forward_rows(
        self, tokens: mx.array, caches: list[Any], layer_ids: Sequence[int]
    ) -> tuple[mx.array, mx.array, RowsPass]:
        """Logits and features of a row of ``tokens [B, L]`` a text, as :meth:`forward_with_hidden_states` returns them.

        ``caches`` are mlx-lm's batch caches. The pass that comes third says which tokens each row keeps, and must do so
        before the next one.
        """
        rows_pass = RowsPass(caches, *tokens.shape)
        hidden, features = self.adapter.forward(tokens, caches, layer_ids, early_layers(rows_pass.recorder))
        return self.head(hidden), features, rows_pass

    def _forward(
        self,
        tokens: mx.array,
        cache: list[Any] | None,
        layer_ids: Sequence[int],
        rewindable: bool,
        parents: Sequence[int] | None = None,
    ) -> tuple[mx.array, mx.array]:
        recorder: LayerCaller | None = None
        if parents:
            recorder = cast(TargetCache, cache).expect_tree(parents)
        elif isinstance(cache, TargetCache):
            recorder = cache.expect(tokens.shape[1], rewindable)
        if rewindable:
            recorder = early_layers(recorder)
        return self.adapter.forward(tokens, cache, layer_ids, recorder)

    @contextmanager
    def alone(self, wait: bool = False) -> Iterator[None]:
        """Compute with the model while no other thread does.

        Raises ``GenerationError`` if another thread is computing with it, unless told to ``wait``.
        """
        if not self.adapter.in_use.acquire(blocking=wait):
            raise GenerationError(
                "Another thread is computing with this target; decode in one thread at a time, or load one for each."
            )
        try:
            yield
        finally:
            self.adapter.in_use.release()

    def check_trees(self, cache: TargetCache) -> None:
        """Raise ``IncompatibleModelsError`` if no tree of drafts can be verified over ``cache``.

        The first call makes a few short passes, to see whether trees can set the positions that the model uses.
        """
        check_trees(cache)
        if self._tree_difference:
            raise IncompatibleModelsError(
                "This target computes something else for a tree of drafts than for its paths, so leave out tree: "
                f"{self._tree_difference}."
            )

    @cached_property
    def _tree_difference(self) -> str:
        return tree_difference(self)

    def check_batchable(self) -> None:
        """Raise ``IncompatibleModelsError``, naming the layer, if several texts cannot be decoded at once.

        The first call makes a few short passes, since not every model heeds the padding of its rows.
        """
        check_batchable(self.make_cache())
        if self._rows_difference:
            raise IncompatibleModelsError(
                "This target computes something else for several texts at once than for each alone, so decode one "
                f"after another: {self._rows_difference}."
            )

    @cached_property
    def _rows_difference(self) -> str:
        return rows_difference(self)

    def make_cache(self, **options: Any) -> TargetCache:
        """New, empty caches, one per layer; ``options`` as in :func:`~dflash.target.caches.make_caches`.

        Raises ``IncompatibleModelsError`` if one of them cannot be rewound exactly, and ``GenerationError`` for options
        that do not fit together or the model.
        """
        return TargetCache(*make_caches(self.model, **options))

    def rewind_kv_caches(self, cache: list[Any], length: int) -> None:
        """Bring ``cache`` back to its first ``length`` tokens; only tokens of the last update can be removed.

        Raises ``GenerationError`` if the cache holds fewer tokens than ``length``.
        """
        (cache if isinstance(cache, TargetCache) else TargetCache(cache)).rewind(length)

    def build_prompt(self, text: str, chat: bool = True, **switches: Any) -> list[int]:
        """Token ids of ``text`` as a user's message, or of the bare text with ``chat=False`` or without a template.

        ``switches`` are passed to the chat template, such as ``enable_thinking=False`` for Qwen3.
        """
        if self.tokenizer is None:
            raise GenerationError(
                "This target has no tokenizer, so only token ids can be decoded (spec_generate). "
                "Put the tokenizer's files (tokenizer.json or tokenizer.model) next to its weights."
            )
        if not chat or not self.tokenizer.has_chat_template:
            return self.tokenizer.encode(text)
        return self.adapter.chat_tokens(self.tokenizer, [{"role": "user", "content": text}], **switches)

    def stop_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer; empty without a tokenizer."""
        return self.adapter.stop_tokens(self.tokenizer) if self.tokenizer is not None else frozenset()
