"""The DFlash block-diffusion drafter (arXiv:2602.06036): context features in, one block of tokens out, in one pass.

Shapes: B batch, L block positions, S context length, H query heads, K key-value heads, D head size,
E hidden size, F feature size, V vocabulary, N drafted vocabulary (``V``, or the part of it that the drafter knows).
"""

import logging
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

import mlx.core as mx
import mlx.nn as nn

from ..core.backend import begin, begins_early
from ..core.errors import GenerationError, IncompatibleModelsError
from ..target.identity import target_fingerprint
from .checkpoints.config import DFlashConfig
from .context import BatchContext, ContextCache, LayerContext
from .kinds import register_drafter
from .layers import Attend, DraftLayer
from .protocol import Proposal
from .trainable import Trainable

if TYPE_CHECKING:
    from ..target import LoadedTargetModel


logger = logging.getLogger(__name__)


@register_drafter("dflash")
class DFlashDraftModel(Trainable, nn.Module):
    """A block-diffusion drafter as DFlash published it.

    Follows :class:`~dflash.drafters.protocol.Drafter` once bound to a target. Weight names are those of published
    checkpoints. Embedding and head are the target's; a drafter with a reduced vocabulary uses the head's rows of its
    tokens, or a head of its own (:meth:`reduce_vocabulary`).

    To make another kind, subclass it and register the class with :func:`~dflash.register_drafter`.
    """

    config_class: ClassVar[type[DFlashConfig]] = DFlashConfig
    own_tables: ClassVar[tuple[str, ...]] = ()
    """Token tables that files of this kind may hold next to their layers, and that are then used."""
    head_modules: ClassVar[tuple[str, ...]] = ("lm_head",)

    def __init__(self, config: DFlashConfig):
        super().__init__()
        self.config = config
        feature_size = len(config.target_layer_ids) * config.hidden_size
        self.fc = nn.Linear(feature_size, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = [DraftLayer(config, i) for i in range(config.num_hidden_layers)]
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self._token_ids: mx.array | None = None
        self._draft_ids: mx.array | None = None
        self._head_rows: Callable[[mx.array], mx.array] | None = None
        self._projection: Callable[[mx.array], mx.array] | None = None
        self._context_limit: int | None = None

    @property
    def block_size(self) -> int:
        """Most tokens that a block commits, the anchor included: one more than it drafts."""
        return self.config.block_size + self.config.sample_from_anchor

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        """Target layers whose outputs are the features, 0-based."""
        return self.config.target_layer_ids

    @property
    def target(self) -> "LoadedTargetModel":
        """The target whose embedding and head the drafter shares, once bound."""
        return self._target

    def bind(self, target: "LoadedTargetModel") -> None:
        """Share the embedding and head of ``target``; warn if the drafter was trained for another target.

        Raises ``IncompatibleModelsError`` if the hidden size, vocabulary or number of layers differ.
        """
        for what, mine, theirs in (
            ("hidden_size", self.config.hidden_size, target.hidden_size),
            ("vocab_size", self.config.vocab_size, target.vocab_size),
            ("number of target layers", self.config.num_target_layers, target.num_layers),
        ):
            if mine is not None and mine != theirs:
                raise IncompatibleModelsError(
                    f"The drafter was made for a target with {what} {mine}, this target has {theirs}. "
                    "Use the drafter that was trained for this target."
                )
        self.config.check_layer_ids(target.num_layers)
        trained_for = self.config.target_fingerprint
        if trained_for is not None and trained_for != target_fingerprint(target):
            logger.warning(
                "The drafter was trained for another target of the same shape (another fine-tuning or quantisation); "
                "the output stays exact, but fewer drafts may be accepted. Use the drafter trained for this one."
            )
        # Drafters of some targets (Gemma, Muse) name a multiplier and a cap that the target's own head applies already.
        # Others replace them, and then need the logits without.
        self._target_multiplier = getattr(target.adapter.config, "output_multiplier", 1.0)
        self._target_cap = getattr(target.adapter.config, "final_logit_softcapping", None)
        if not self._has_targets_multiplier or self.config.final_logit_softcapping not in (None, self._target_cap):
            self._projection = target.adapter.projection(self._token_ids)
        self._target = target
        if self._token_ids is not None:
            self._head_rows = target.adapter.head_rows(self._token_ids)

    def embed(self, tokens_BL: mx.array) -> mx.array:
        """Target embeddings ``[B, L, E]``, scaled as the target scales them, times the drafter's own factor."""
        embeddings_BLE = self._target.embed(tokens_BL)
        scale = self._target.embedding_scale * self.config.input_embedding_scale
        return embeddings_BLE if scale == 1.0 else embeddings_BLE * scale

    def head(self, hidden_BLE: mx.array) -> mx.array:
        """Logits ``[B, L, N]`` in the order of :attr:`token_ids`, with the drafter's multiplier and soft cap.

        The head is the target's, or the drafter's own.
        """
        project = self.lm_head if "lm_head" in self else self._projection
        logits_BLN = (project or self.target_head)(hidden_BLE)
        multiplier, cap = self.config.output_multiplier, self.config.final_logit_softcapping
        if project is None and self._has_targets_multiplier:
            multiplier = 1.0
        if multiplier != 1.0:
            logits_BLN = logits_BLN * multiplier
        if cap is not None and (project is not None or multiplier != 1.0 or cap != self._target_cap):
            logits_BLN = cap * mx.tanh(logits_BLN / cap)
        return logits_BLN

    @property
    def _has_targets_multiplier(self) -> bool:
        return math.isclose(self.config.output_multiplier, self._target_multiplier, rel_tol=1e-6)  # files round it

    def target_head(self, hidden_BLE: mx.array) -> mx.array:
        """The target's own logits ``[B, L, N]`` from final hidden states."""
        return self._target.head(hidden_BLE) if self._head_rows is None else self._head_rows(hidden_BLE)

    def reduce_vocabulary(self, token_ids: mx.array, own_head: bool) -> None:
        """Draft only ``token_ids [draft_vocab_size]``, distinct ids of the target's; call it before :meth:`bind`.

        With ``own_head`` their logits come from the drafter's ``lm_head.weight [draft_vocab_size, E]``, which the
        caller loads; otherwise from the rows of the target's head, which :meth:`bind` gathers.
        """
        draft_ids = mx.full((self.config.vocab_size,), -1, mx.int32)
        draft_ids[token_ids] = mx.arange(token_ids.size, dtype=mx.int32)
        self._token_ids, self._draft_ids = token_ids, draft_ids
        mx.eval(token_ids, draft_ids)
        if own_head:
            self.lm_head = nn.Linear(self.config.hidden_size, token_ids.size, bias=False)

    @property
    def token_ids(self) -> mx.array | None:
        """The target's ids ``[N]`` of the drafted vocabulary; ``None``: the whole vocabulary."""
        return self._token_ids

    def tokens_of(self, columns: mx.array) -> mx.array:
        """The target's ids of columns of :meth:`head`."""
        return columns if self._token_ids is None else self._token_ids[columns]

    def candidates_of(self, logits_BLN: mx.array) -> mx.array | None:
        """The target's id of each logit, as :attr:`Proposal.candidates <.protocol.Proposal.candidates>` has it."""
        return None if self._token_ids is None else mx.broadcast_to(self._token_ids, logits_BLN.shape)

    @property
    def draft_ids(self) -> mx.array | None:
        """The column ``[V]`` of each of the target's ids, -1 for unknown ones; ``None``: the whole vocabulary."""
        return self._draft_ids

    def context(self, features_BSF: mx.array) -> mx.array:
        """The context ``[B, S, E]`` that every layer attends to, from target features."""
        return self.hidden_norm(self.fc(features_BSF))

    def context_keys_values(self, layer: int, context: mx.array, offset: int | mx.array) -> tuple[mx.array, mx.array]:
        """Keys and values, each ``[B, K, S, D]``, of ``context`` (from :meth:`context`) at ``offset ..`` in a layer."""
        return self.layers[layer].self_attn.keys_values(context, offset)

    def block_inputs(self, anchors_B: mx.array, drafts: int) -> mx.array:
        """Embeddings ``[B, L, E]`` of blocks ``[anchor, mask, ..., mask]`` with room for ``drafts`` tokens."""
        masks = drafts - self.config.sample_from_anchor
        masks_BM = mx.full((anchors_B.size, masks), self.config.mask_token_id, anchors_B.dtype)
        return self.embed(mx.concatenate([anchors_B[:, None], masks_BM], axis=1))

    def limit_context(self, tokens: int) -> None:
        """Limit full attention to the newest ``tokens`` of the context, in caches made from now on.

        Memory and time per draft then stop growing with the context. Drafts may change, the output never does.
        Sliding layers keep their own windows. Raises ``GenerationError`` for less than one token.
        """
        if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
            raise GenerationError(f"The drafter's window must be a whole number of at least 1, got {tokens!r}.")
        self._context_limit = tokens

    def make_cache(self) -> ContextCache:
        """A new, empty context cache: a sliding layer keeps what the next token's window can see."""
        windows = (self.config.window(layer) for layer in range(self.config.num_hidden_layers))
        return ContextCache([self._context_limit if window is None else window - 1 for window in windows])

    def extend_context(self, features: mx.array, cache: ContextCache, tokens: mx.array) -> None:
        """Append committed tokens by their ``features [1, S, F]``; what no layer keeps is not computed."""
        length, start = features.shape[1], cache.offset
        context = self.context(features[:, length - cache.newest_of(length) :])
        for layer, kv in enumerate(cache.layers):
            kept = kv.newest_of(length)
            kv.skip(length - kept)
            if kept:
                kv.append(*self.context_keys_values(layer, context[:, -kept:], start + length - kept))

    def propose(self, anchor: mx.array, length: int, cache: ContextCache) -> Proposal:
        """Fill the block after ``anchor [1, 1]`` greedily and return its first ``length`` tokens.

        The block is as wide as in training, so that its tokens do not depend on ``length``. A drafter with
        ``elastic_blocks`` was trained on all widths and fills only what is asked for.
        """
        return self.proposal(anchor.reshape(1), self.draft_hidden(anchor, length, cache))

    def proposal(self, anchors_B: mx.array, hidden_BLE: mx.array) -> Proposal:
        """The greedy drafts ``[B, L]`` of several blocks, from the hidden states that predict them.

        :meth:`draft_hidden` returns those of one block.
        """
        logits_BLN = self.head(hidden_BLE)
        return Proposal(self.tokens_of(mx.argmax(logits_BLN, axis=-1)), logits_BLN, self.candidates_of(logits_BLN))

    def draft_hidden(self, anchor: mx.array, length: int, cache: ContextCache) -> mx.array:
        """Final hidden states ``[1, length, E]`` at the positions that predict the tokens after ``anchor``.

        Raises ``GenerationError`` unless a block holds ``length`` drafts.
        """
        if not 1 <= length < self.block_size:
            raise GenerationError(
                f"A block of {self.block_size} drafts 1 to {self.block_size - 1} tokens, not {length}."
            )
        return self._block_hidden(anchor.reshape(1), length, cache.layers)

    def make_layers(self) -> list[LayerContext]:
        """The layers of a new context cache, which batches merge."""
        return self.make_cache().layers

    def extend_rows(
        self,
        features_BSF: mx.array,
        layers: Sequence[BatchContext],
        tokens_BS: mx.array,
        counts: Sequence[int] | None = None,
    ) -> None:
        """As :meth:`extend_context`, for several texts."""
        context, offset_B = self.context(features_BSF), layers[0].offset
        for layer, kv in enumerate(layers):
            kv.append(*self.context_keys_values(layer, context, offset_B), counts)

    def propose_rows(self, anchors_B: mx.array, length: int, layers: Sequence[BatchContext]) -> Proposal:
        """As :meth:`propose`, for several texts in one pass."""
        return self.proposal(anchors_B, self._block_hidden(anchors_B, length, layers))

    def _block_hidden(
        self, anchors_B: mx.array, length: int, layers: Sequence[LayerContext | BatchContext]
    ) -> mx.array:
        """Final hidden states ``[B, length, E]`` at the positions that predict the tokens after the anchors."""
        early, offset = begins_early(), layers[0].offset
        x_BLE = self.block_inputs(anchors_B, length if self.config.elastic_blocks else self.block_size - 1)
        for number, (layer, kv) in enumerate(zip(self.layers, layers, strict=True)):
            x_BLE = layer(x_BLE, offset, self._attend_cached(number, kv, early))
        first = 0 if self.config.sample_from_anchor else 1
        return self.norm(x_BLE)[:, first : first + length]

    def _attend_cached(self, layer: int, kv: LayerContext | BatchContext, early: bool) -> Attend:
        """Attention of one block to the cached context and itself, handed to the device at once if ``early``."""
        config = self.config

        def attend(queries_BHLD: mx.array, keys_BKLD: mx.array, values_BKLD: mx.array) -> mx.array:
            keys, values = kv.with_block(keys_BKLD, values_BKLD)
            mask = kv.block_mask(keys_BKLD.shape[2], config.window(layer), config.causal_in_block(layer))
            scale = queries_BHLD.shape[-1] ** -0.5
            attended = mx.fast.scaled_dot_product_attention(queries_BHLD, keys, values, scale=scale, mask=mask)
            if early:
                begin(attended)
            return attended

        return attend
