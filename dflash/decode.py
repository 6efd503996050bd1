"""The decode loop: prefill, then draft a block, verify it in one target pass, commit, rewind.

Knows token ids and caches. Must not know text, chat templates, any architecture, or how drafts are made.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, cast

import mlx.core as mx

from .drafters.protocol import Drafter
from .target import LoadedTargetModel
from .verify import Sampler, accepted_length, sample_target

PREFILL_STEP_SIZE = 2048  # tokens; mlx-lm's own default


@dataclass(frozen=True)
class Block:
    """What one target pass committed: the accepted drafts and the target's own next token.

    ``drafted`` has as many tokens as were verified, ``target_tokens`` (the target's choices) one more.
    """

    drafted: list[int]
    target_tokens: list[int]

    @property
    def tokens(self) -> list[int]:
        """Committed tokens: accepted drafts and the bonus token, all of them the target's choices."""
        return self.target_tokens[: accepted_length(self.drafted, self.target_tokens) + 1]


@dataclass
class DecodeState:
    """Committed tokens and the two caches, which hold all of them but the last, the anchor."""

    tokens: list[int]
    target_cache: list[Any]
    draft_cache: Any
    prompt_length: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_length = len(self.tokens)

    @property
    def anchor(self) -> mx.array:
        """The last committed token, ``[1, 1]``."""
        return mx.array([self.tokens[-1:]])


def prefill(
    target: LoadedTargetModel,
    drafter: Drafter,
    prompt: list[int],
    sampler: Sampler,
    step_size: int = PREFILL_STEP_SIZE,
    cache_options: Mapping[str, Any] = MappingProxyType({}),
) -> DecodeState:
    """Feed the prompt and commit the target's first token.

    Each chunk's features go straight into the drafter's cache and are dropped, and the head runs on the
    last position only, so memory grows with neither ``features x prompt`` nor ``vocabulary x prompt``.
    """
    state = DecodeState(list(prompt), target.make_cache(**cache_options), drafter.make_cache())
    tokens = mx.array([prompt])
    for start in range(0, len(prompt), step_size):
        chunk = tokens[:, start : start + step_size]
        hidden, features = target.forward_hidden(chunk, state.target_cache, drafter.target_layer_ids)
        drafter.extend_context(features, state.draft_cache, chunk)
        last = hidden[:, -1:]
        # The drafter's cache too, if it says what it holds: its lazy graph would keep every chunk's features.
        mx.eval(last, [c.state for c in state.target_cache], getattr(state.draft_cache, "state", ()))
        mx.clear_cache()
    state.tokens += _ids(sample_target(target.head(last)[0], sampler))
    return state


def decode_block(
    target: LoadedTargetModel, drafter: Drafter, state: DecodeState, length: int, sampler: Sampler
) -> Block:
    """Draft ``length`` tokens, verify them in one target pass, commit and rewind.

    On return both caches hold exactly the committed tokens without the new anchor. Drafting and
    verification are one lazy graph with one host synchronisation; the drafter already runs while the
    target's part of the graph is built.
    """
    inputs = state.anchor
    if length > 0:
        drafts = drafter.propose(state.anchor, length, state.draft_cache).tokens
        mx.async_eval(drafts)
        inputs = mx.concatenate([inputs, drafts.astype(inputs.dtype)], axis=1)
    logits, features = target.forward_with_hidden_states(inputs, state.target_cache, drafter.target_layer_ids)
    target_tokens = sample_target(logits[0], sampler)
    mx.eval(inputs, target_tokens, features)

    block = Block(drafted=_ids(inputs[0, 1:]), target_tokens=_ids(target_tokens))
    committed = len(block.tokens)
    target.rewind_kv_caches(state.target_cache, len(state.tokens) - 1 + committed)
    drafter.extend_context(features[:, :committed], state.draft_cache, inputs[:, :committed])
    state.tokens += block.tokens
    return block


def decode(
    target: LoadedTargetModel,
    drafter: Drafter,
    state: DecodeState,
    max_tokens: int,
    block_size: int,
    sampler: Sampler,
) -> Iterator[Block]:
    """Blocks until ``max_tokens`` tokens follow the prompt. The caller stops earlier at a stop token."""
    while (remaining := state.prompt_length + max_tokens - len(state.tokens)) > 0:
        yield decode_block(target, drafter, state, min(block_size, remaining) - 1, sampler)


def _ids(tokens: mx.array) -> list[int]:
    return cast(list[int], tokens.tolist())
