"""A small language model as drafter: it decodes the draft token by token.

This is mlx-lm's ``draft_model``, and speculative decoding as first published (Leviathan et al., arXiv:2211.17192).
Any model that mlx-lm loads can draft for a target with the same vocabulary: ``--drafter PATH``, or
``AutoregressiveDrafter(load_target(PATH))``.

Shapes: S tokens, L length of a draft, V vocabulary of the target.
"""

import copy
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models.cache import CacheList, ConcatenateKVCache, KVCache, QuantizedKVCache

from ..core.errors import IncompatibleModelsError
from ..target import LoadedTargetModel
from ..target.rewind import TargetCache
from .checkpoints.vocabularies import vocabulary_difference
from .protocol import Proposal

BLOCK_SIZE = 9
"""Positions per block (up to 8 drafts), unless a decoder sets another number (``block_size``, ``--block-size``).

Each draft costs one pass of the draft model, whether or not it is verified; the adaptive policy asks for as many as
pay. (mlx-lm always drafts 3 tokens from the command line and 2 in Python.)
"""

TRIMMED = (KVCache, QuantizedKVCache, ConcatenateKVCache)
"""Caches that can drop any number of their newest entries, from however many passes."""


@dataclass
class Draft:
    """The last draft: what the layers were fed, and how to undo it.

    ``waiting`` and ``anchor`` went in one pass, then the drafts one by one. ``before`` and ``after_anchor`` hold the
    layers that cannot be trimmed, by index, as they were before and after that pass.
    """

    waiting: mx.array
    anchor: mx.array
    tokens: mx.array
    before: dict[int, Any]
    after_anchor: dict[int, Any]


class DraftCache:
    """The draft model's own caches, which follow the committed context.

    ``offset`` counts the context. Its newest tokens may wait to be fed, in one pass with the next anchor. Entries of
    the last draft are kept as far as it was committed. Layers that can drop their newest entries keep all of these; the
    others (sliding windows, recurrent states) go back to a copy from after the anchor, and accepted drafts are fed
    again. The copy is by reference: no array is copied before the next pass writes into it.
    """

    def __init__(self, caches: list[Any]):
        self.layers = list(caches)
        self.offset = 0
        self.waiting = mx.zeros((1, 0), mx.int32)
        self.draft: Draft | None = None
        trimmed = [_can_be_trimmed(cache) for cache in caches]
        self._trimmed = TargetCache(cache for cache, trims in zip(caches, trimmed, strict=True) if trims)
        self._restored = [i for i, trims in enumerate(trimmed) if not trims]

    @property
    def state(self) -> list[Any]:
        """The arrays of all non-empty layers, for ``mx.eval``."""
        return [cache.state for cache in self.layers if not cache.empty()]

    def set_aside(self) -> dict[int, Any]:
        """Copies of the layers that cannot be trimmed, by index.

        A deep copy makes new array objects over the same data. A reference is not enough: mlx-lm's windows assign into
        their arrays in place.
        """
        return {i: copy.deepcopy(self.layers[i]) for i in self._restored}

    def commit(self, tokens: mx.array) -> None:
        """Append committed ``tokens [1, S]``: those that the last draft fed stay in the layers, the others wait."""
        kept = self.forget_draft(tokens)
        self.waiting = mx.concatenate([self.waiting, tokens[:, kept:].astype(mx.int32)], axis=1)
        self.offset += tokens.shape[1]

    def forget_draft(self, committed: mx.array) -> int:
        """Undo the last draft except for the tokens that ``committed [1, S]`` begins with; returns their number."""
        draft, self.draft = self.draft, None
        if draft is None:
            return 0
        kept = agreeing(_ids(draft.anchor) + _ids(draft.tokens)[:-1], _ids(committed))
        if self._restored:
            kept = min(kept, 1)
            for i, cache in (draft.after_anchor if kept else draft.before).items():
                self.layers[i] = cache
            if not kept:
                self.waiting = draft.waiting
        if self._trimmed:
            self._trimmed.rewind(self.offset + kept - self.waiting.shape[1])
        return kept


class AutoregressiveDrafter:
    """A small language model with the target's vocabulary, which drafts greedily.

    Follows :class:`~dflash.drafters.protocol.Drafter`. Beyond the context length of ``model`` it proposes nothing, and
    decoding is plain.

    Args:
        model: The draft model with its tokenizer, as :func:`dflash.load_target` returns it.
        block_size: Most positions per block, the anchor included; each draft costs one pass of ``model``.
    """

    target_layer_ids: tuple[int, ...] = ()

    def __init__(self, model: LoadedTargetModel, block_size: int = BLOCK_SIZE):
        self.model, self.block_size = model, block_size
        self.vocab_size = model.vocab_size

    def bind(self, target: LoadedTargetModel) -> None:
        """Compare the vocabularies.

        Raises ``IncompatibleModelsError``, naming the first token whose text differs or that the draft model has no
        embedding for.
        """
        if difference := vocabulary_difference(self.model, target):
            raise IncompatibleModelsError(
                f"This draft model does not fit the target: {difference}. Use a model of the target's own family."
            )
        self.vocab_size = target.vocab_size

    def make_cache(self) -> DraftCache:
        """New, empty caches of the draft model."""
        return DraftCache(self.model.make_cache())

    def extend_context(self, features: mx.array, cache: DraftCache, tokens: mx.array) -> None:
        """Append committed ``tokens [1, S]``; a block's wait for the next anchor, a prompt's are fed at once."""
        cache.commit(tokens)
        if cache.waiting.shape[1] > self.block_size:
            self.settle(cache)

    def propose(self, anchor: mx.array, length: int, cache: DraftCache) -> Proposal:
        """Up to ``length`` greedy tokens after ``anchor [1, 1]``, with their logits ``[1, L, V]``.

        Each step is dispatched as soon as it is built, and none is waited for.
        """
        cache.forget_draft(anchor[:, :0])
        length = min(length, self._room(cache))
        if length < 1:
            return Proposal(mx.zeros((1, 0), mx.int32))
        anchor = anchor.astype(mx.int32)
        waiting, before = cache.waiting, cache.set_aside()
        logits = [self._feed(mx.concatenate([waiting, anchor], axis=1), cache)]
        after_anchor = cache.set_aside()
        tokens = [_best(logits[0])]
        while len(tokens) < length:
            logits.append(self._feed(tokens[-1], cache))
            tokens.append(_best(logits[-1]))
        cache.waiting = waiting[:, :0]
        proposed = mx.concatenate(tokens, axis=1)
        cache.draft = Draft(waiting, anchor, proposed, before, after_anchor)
        return Proposal(proposed, mx.concatenate(logits, axis=1))

    def settle(self, cache: DraftCache) -> None:
        """Feed the waiting tokens, so that the layers hold exactly the context."""
        cache.forget_draft(cache.waiting[:, :0])
        if cache.waiting.shape[1] and self._room(cache) >= 0:
            self._feed(cache.waiting, cache)
        cache.waiting = cache.waiting[:, :0]

    def _room(self, cache: DraftCache) -> int:
        """Tokens that still fit after the context."""
        longest = self.model.max_length
        return self.block_size if longest is None else longest - cache.offset

    def _feed(self, tokens: mx.array, cache: DraftCache) -> mx.array:
        """Logits ``[1, 1, V]`` after ``tokens [1, S]`` over the target's ids; ids that the model lacks get -inf."""
        own = self.model.vocab_size
        if own < self.vocab_size:  # the target's table is padded further: do not read past the end of this one
            tokens = mx.minimum(tokens, own - 1)
        hidden = self.model.adapter.run_backbone(tokens, cache.layers)  # no features, and so no taps
        logits = self.model.head(hidden[:, -1:])[..., : self.vocab_size]
        missing = self.vocab_size - logits.shape[-1]
        return mx.pad(logits, [(0, 0), (0, 0), (0, missing)], constant_values=-mx.inf) if missing else logits


def agreeing(fed: list[int], committed: list[int]) -> int:
    """Leading tokens that two lists have in common."""
    pairs = zip(fed, committed, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(fed), len(committed)))


def _best(logits: mx.array) -> mx.array:
    token = mx.argmax(logits, axis=-1).astype(mx.int32)
    mx.async_eval(token)
    return token


def _can_be_trimmed(cache: Any) -> bool:
    return all(type(member) in TRIMMED for member in (cache.caches if isinstance(cache, CacheList) else [cache]))


def _ids(tokens: mx.array) -> list[int]:
    return cast(list[list[int]], tokens.tolist())[0]  # indexing the array first would synchronise once more
