"""Prompt caches: what target and drafter hold of a prompt, kept between requests, saved and loaded.

The file format is mlx-lm's (``mlx_lm.cache_prompt``, ``mlx_lm.models.cache.save_prompt_cache``): the target's caches,
one per layer. Ours appends the tokens and the drafter's context, also as caches, which mlx-lm loads and ignores.
"""

import copy
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import (
    ArraysCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
)

from ..core.errors import GenerationError, IncompatibleModelsError, one_line
from ..core.files import atomic_write
from ..drafters.combined import CombinedCache
from ..drafters.context import ContextCache
from ..drafters.protocol import Drafter
from ..drafters.rows import Contexts, TextByText, for_batches
from ..target import LoadedTargetModel, TargetCache
from ..target.caches import KeptWindowCache, Quantization
from ..target.identity import model_fingerprint, target_fingerprint
from ..target.rewind import cache_name, members
from ..target.ring import RowsCache
from ..target.rows import as_rows

if TYPE_CHECKING:
    from ..decoding.sampling import LogitsProcessor

logger = logging.getLogger(__name__)

KEY = "dflash"
UNKNOWN = 0
"""The id given to each token of mlx-lm's files, which do not store them."""


class PromptCache:
    """The caches of target and drafter for a prefix of the text, so that it need not be read again.

    A prompt cache never changes the text, unless the target's caches are quantised or bounded. Each request gives its
    whole prompt, and the part that is cached is skipped. After the request the cache holds the prompt and the answer,
    so the next turn of a conversation continues it. If the next prompt differs, the caches rewind to the common prefix.
    Those that cannot (sliding windows that have moved on, recurrent states) start again.

    Args:
        target: The target.
        drafter: The drafter, bound to ``target``.
        cache_options: As in :meth:`~dflash.LoadedTargetModel.make_cache`.
    """

    def __init__(self, target: LoadedTargetModel, drafter: Drafter, **cache_options: Any):
        self.target, self.drafter, self._options = target, drafter, cache_options
        self.tokens: list[int] = []
        self.reused = 0
        """How many tokens of the last prompt were not read again."""
        self.unknown = 0
        """How many of the first tokens are not known, as mlx-lm's files do not store them."""
        self.target_cache = target.make_cache(**cache_options)
        self._quantization = self.target_cache.quantization
        self.draft_cache = drafter.make_cache()

    def check_models(self, target: LoadedTargetModel, drafter: Drafter) -> None:
        """Raise ``IncompatibleModelsError`` unless the cache belongs to these models."""
        if self.target.model is not target.model or self.drafter is not drafter:
            raise IncompatibleModelsError(
                "The prompt cache belongs to another decoder; use make_prompt_cache or load_prompt_cache of this one."
            )

    def begin(self, prompt: list[int], quantization: Quantization | None = None) -> int:
        """Trim the caches to the longest prefix of ``prompt[:-1]`` that they hold; returns its length.

        Until :meth:`end` the caches belong to the request. Raises ``GenerationError`` if they are quantised differently
        from what the request asks for.
        """
        self._check_quantization(quantization)
        if self.target_cache.offset != len(self.tokens):  # a request failed or has not ended
            self._reset()
        pairs = zip(self.tokens, prompt[:-1], strict=False)
        most = min(len(self.tokens), len(prompt) - 1)
        shared = next((i for i, (a, b) in enumerate(pairs) if a != b), most)
        if shared < len(self.tokens) and not self._rewind(shared):
            kinds = ", ".join(sorted({cache_name(cache) for cache in self.target_cache}))
            logger.warning(
                "The prompt has %d of the %d cached tokens and these caches (%s) cannot go back, so it is read anew.",
                shared,
                len(self.tokens),
                kinds,
            )
            self._reset()
        self.target_cache.quantization = quantization or self._quantization
        self.reused, self.tokens = len(self.tokens), []
        return self.reused

    def end(self, tokens: list[int], wanted: int) -> None:
        """Take the caches back from a request: they hold a prefix of ``tokens``, of which ``wanted`` are in the text.

        The others are removed if the caches can rewind; if not, the next prompt may have to be read from the start.
        """
        self.tokens = tokens[: self.target_cache.offset]
        if self.target_cache.offset > len(tokens) or self.draft_cache.offset < len(self.tokens):
            self._reset()
        elif len(self.tokens) > wanted:
            self._rewind(wanted)

    def of_known(self, process: "LogitsProcessor") -> "LogitsProcessor":
        """A logits processor that is not shown the unknown tokens, as mlx-lm does not show them."""
        unknown = self.unknown
        return (lambda tokens, logits: process(tokens[unknown:], logits)) if unknown else process

    # --- mlx-lm's interface of a cache, by which its server keeps several ---------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes of both caches."""
        return sum(cache.nbytes for cache in self.target_cache) + getattr(self.draft_cache, "nbytes", 0)

    def is_trimmable(self) -> bool:
        """Whether :meth:`trim` can go back, as far as the classes of the caches tell."""
        return self._drafter_goes_back and all(cache.is_trimmable() for cache in self.target_cache)

    def trim(self, count: int) -> int:
        """Drop the last ``count`` tokens, or all if that is not possible; returns how many were dropped."""
        held = len(self.tokens)
        if not self._rewind(held - count):
            self._reset()
        return held - len(self.tokens)

    def __deepcopy__(self, memo: dict[int, Any]) -> "PromptCache":
        """The same tokens in caches of their own, for the same models."""
        memo |= {id(self.target): self.target, id(self.drafter): self.drafter}
        other = copy.copy(self)
        caches = copy.deepcopy(list(self.target_cache), memo)
        other.target_cache = TargetCache(caches, self.target_cache.quantization, self.target_cache.offset)
        other.draft_cache, other.tokens = copy.deepcopy(self.draft_cache, memo), list(self.tokens)
        return other

    # --- a row of a batch -----------------------------------------------------------------------------------

    @property
    def keeps_all(self) -> bool:
        """Whether the target's caches hold every token, so that they can go back to any."""
        return all(isinstance(cache, KVCache | QuantizedKVCache) for cache in self.target_cache)

    def row(self) -> list[Any]:
        """The caches of target and drafter as a row of :class:`~dflash.decoding.batch.Tapped`, to which they go.

        Raises ``IncompatibleModelsError`` for a drafter whose own cache is not what it has in batches.
        """
        if isinstance(for_batches(self.drafter), TextByText):
            return [*as_rows(self.target_cache), Contexts([self.draft_cache])]
        if not isinstance(self.draft_cache, ContextCache):
            raise IncompatibleModelsError(f"The cache of a {type(self.drafter).__name__} cannot join a batch.")
        return [*as_rows(self.target_cache), *self.draft_cache.layers]

    def of_row(self, layers: list[Any], tokens: list[int]) -> "PromptCache":
        """A cache of the same models that holds ``tokens`` in ``layers``, a row's, also of one that has not begun."""
        if not tokens:
            return PromptCache(self.target, self.drafter, **self._options)
        other, number = copy.copy(self), len(self.target_cache)
        if any(isinstance(member, RowsCache) for cache in layers[:number] for member in members(cache)):
            layers = [*(cache.extract(0) for cache in layers[:number]), *layers[number:]]
        other.tokens, other.target_cache = list(tokens), TargetCache(layers[:number], length=len(tokens))
        if isinstance(layers[number], Contexts):
            (other.draft_cache,) = layers[number].caches
        else:
            other.draft_cache = self.drafter.make_cache()
            other.draft_cache.layers = layers[number:]
        mx.eval([cache.state for cache in layers])  # or the batch's arrays would be held
        return other

    def _rewind(self, length: int) -> bool:
        """Keep the first ``length`` tokens; returns whether that was possible. If not, nothing has changed."""
        if not self._drafter_goes_back:
            return False
        try:
            self.target_cache.rewind(length)
        except (GenerationError, RuntimeError):
            return False
        self.tokens, self.unknown = self.tokens[:length], min(self.unknown, length)
        if self.drafter.target_layer_ids:
            self.draft_cache.rewind(length)
        else:
            self.draft_cache = _rebuilt_cache(self.drafter, self.tokens)
        return True

    @property
    def _drafter_goes_back(self) -> bool:
        """Whether the drafter's cache can be rewound; one without features is rebuilt from the tokens."""
        context = self.draft_cache.model if isinstance(self.draft_cache, CombinedCache) else self.draft_cache
        return isinstance(context, ContextCache) or not self.drafter.target_layer_ids

    def _reset(self) -> None:
        self.tokens, self.unknown = [], 0
        self.target_cache = self.target.make_cache(**self._options)
        self._quantization = self.target_cache.quantization
        self.draft_cache = self.drafter.make_cache()

    def _check_quantization(self, asked: Quantization | None) -> None:
        own = next((cache for cache in self.target_cache if isinstance(cache, QuantizedKVCache)), None)
        if own is not None and asked is not None and (asked.bits, asked.group_size) != (own.bits, own.group_size):
            raise GenerationError(
                f"The prompt cache is quantised with kv_bits {own.bits} and kv_group_size {own.group_size}, "
                f"the request asks for {asked.bits} and {asked.group_size}; use the same ones."
            )

    def save(self, path: str | Path, metadata: dict[str, str] | None = None) -> None:
        """Write the file ``path`` (``.safetensors``) atomically, with mlx-lm's ``metadata``.

        Only a DFlash drafter's context is saved; other drafters rebuild theirs from the tokens, without the target.
        Raises ``GenerationError`` if the cache is empty, ``OSError`` if the file cannot be written.
        """
        path = Path(path)
        if not self.tokens:
            raise GenerationError("The prompt cache is empty; generate or read a prompt with it before it is saved.")
        if path.suffix != ".safetensors":
            raise GenerationError(f"A prompt cache is a .safetensors file, got {path}.")
        fingerprints: dict[str, Any] = {"target": target_fingerprint(self.target), "unknown": self.unknown}
        caches = [_in_mlx_lm(cache) for cache in self.target_cache] + [_one_array(mx.array(self.tokens, mx.int32))]
        if isinstance(self.draft_cache, ContextCache) and isinstance(self.drafter, nn.Module):
            fingerprints["drafter"] = model_fingerprint(self.drafter)
            for layer in self.draft_cache.layers:
                caches.append(
                    KVCache.from_state((*map(mx.contiguous, layer.state), layer.held)) if layer.held else KVCache()
                )
        written = {"model": "", "tokenizer_config": "{}"} | (metadata or {}) | {KEY: json.dumps(fingerprints)}
        atomic_write(path, lambda file: save_prompt_cache(str(file), caches, written))

    @classmethod
    def load(cls, path: str | Path, target: LoadedTargetModel, drafter: Drafter) -> "PromptCache":
        """Read a file written by :meth:`save` or by mlx-lm.

        mlx-lm's files do not store the tokens: each counts as token 0, and a request must continue :attr:`tokens`. If
        the file has no context of this drafter, the drafter sees only later tokens, at their correct positions.

        Raises ``GenerationError`` for a file that is no prompt cache, ``IncompatibleModelsError`` for another model's.
        """
        try:
            caches, metadata = cast("tuple[list[Any], Any]", load_prompt_cache(str(path), return_metadata=True))
            fingerprints = json.loads(metadata.get(KEY, "{}")) if isinstance(metadata, dict) else {}
        except Exception as error:  # of many types, for a file that is missing, damaged or of another kind
            expected = "expected a file of dflash cache-prompt or mlx_lm.cache_prompt"
            raise GenerationError(f"{path} is no prompt cache; {expected} ({one_line(error)}).") from error
        found = cls(target, drafter)
        number = len(found.target_cache)
        if fingerprints and fingerprints.get("target") != target_fingerprint(target):
            raise IncompatibleModelsError(f"The prompt cache {path} was made for another target.")
        tokens = caches[number][0].tolist() if fingerprints else []
        found.target_cache = _target_cache(target, caches[:number] if fingerprints else caches, len(tokens), path)
        found.unknown = fingerprints.get("unknown", 0) if tokens else found.target_cache.offset
        found.tokens = tokens or [UNKNOWN] * found.unknown
        for cache in found.target_cache:  # what makes others like them
            if isinstance(cache, KeptWindowCache):
                found._options = {"max_kv_size": cache.max_size}
            elif isinstance(cache, QuantizedKVCache):
                found._options = {"kv_bits": cache.bits, "kv_group_size": cache.group_size, "quantized_kv_start": 0}
        same_drafter = isinstance(drafter, nn.Module) and fingerprints.get("drafter") == model_fingerprint(drafter)
        layers = caches[number + 1 :] if same_drafter else []
        found.draft_cache = _draft_cache(drafter, layers, found.tokens, bool(fingerprints))
        return found


def _in_mlx_lm(cache: Any) -> Any:
    """The cache as one of mlx-lm's classes."""
    return RotatingKVCache.from_state(cache.state) if isinstance(cache, KeptWindowCache) else cache


def _one_array(array: mx.array) -> ArraysCache:
    cache = ArraysCache(1)
    cache[0] = array
    return cache


def _target_cache(target: LoadedTargetModel, loaded: list[Any], length: int, path: str | Path) -> TargetCache:
    """The target's part of a file, checked against this target: the kinds of its caches, and a pass over them."""
    made = make_prompt_cache(target.model)
    bounded = not hasattr(target.model, "make_cache")
    kinds = []
    for cache, own in zip(loaded, made, strict=False):  # their counts are compared below
        if bounded and type(cache) is RotatingKVCache:
            cache = KeptWindowCache.from_state(cache.state)
        same = cache_name(cache) == cache_name(own)
        kinds.append(cache if same or isinstance(cache, QuantizedKVCache | KeptWindowCache) else None)
    other = IncompatibleModelsError(f"The prompt cache {path} was made for another target.")
    if len(loaded) != len(made) or any(cache is None for cache in kinds):
        raise other
    caches = TargetCache(kinds, length=length)
    if caches.offset == 0:
        raise GenerationError(f"The prompt cache {path} does not tell how many tokens it holds.")
    try:
        target.forward_hidden(mx.zeros((1, 1), mx.int32), copy.deepcopy(caches), ())  # built, never evaluated
    except Exception as error:  # MLX's error for shapes that do not fit
        raise other from error
    return caches


def _draft_cache(drafter: Drafter, layers: list[Any], tokens: list[int], known: bool) -> Any:
    """The drafter's context of ``tokens``: from the file's ``layers``, from the tokens, or only its length."""
    cache = drafter.make_cache()
    if isinstance(cache, ContextCache):
        if len(layers) != len(cache.layers):
            logger.warning("The prompt cache has no context of this drafter, which will see only what comes after it.")
            cache.skip(len(tokens))
        for layer, rows in zip(cache.layers, layers, strict=False):
            if rows.empty():
                layer.skip(len(tokens))
            else:
                keys, values = rows.keys_and_values()
                layer.restore(keys, values, len(tokens))
        return cache
    if drafter.target_layer_ids:
        raise IncompatibleModelsError(
            f"A {type(drafter).__name__} needs the target's features of the whole prompt; it cannot start from a file."
        )
    return _rebuilt_cache(drafter, tokens if known else [])


def _rebuilt_cache(drafter: Drafter, tokens: list[int]) -> Any:
    """The cache of a drafter that needs no features, rebuilt from the tokens."""
    cache = drafter.make_cache()
    if tokens:
        drafter.extend_context(mx.zeros((1, len(tokens), 0)), cache, mx.array([tokens]))
    return cache
