"""The decode loop: prefill, then draft a block, verify it in one target pass, commit, rewind.

Knows token ids and caches. Must not know text, chat templates, any architecture, or how drafts are made.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from .drafters.checks import check_drafted, proposed_tokens
from .drafters.protocol import Drafter, Proposal
from .errors import GenerationError
from .sampling import LogitsProcessor, Sampler, process_logits
from .target import LoadedTargetModel, TargetCache
from .verify import NO_TOKEN, Verified, VerifyRule, first_mismatch, sample_target, token_ids

PREFILL_STEP_SIZE = 2048  # tokens; mlx-lm's own default


@dataclass(frozen=True)
class Block:
    """What one target pass decided.

    ``drafted`` are the tokens that it verified, ``tokens`` those that it committed: the first ``accepted`` drafts
    and one token of the target's own.
    """

    drafted: list[int]
    tokens: list[int]
    accepted: int


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
        return mx.array([self.tokens[-1:]], mx.uint32)


def prefill(
    target: LoadedTargetModel,
    drafter: Drafter,
    prompt: list[int],
    sampler: Sampler,
    step_size: int = PREFILL_STEP_SIZE,
    target_cache: TargetCache | None = None,
    processors: Sequence[LogitsProcessor] = (),
) -> DecodeState:
    """Feed the prompt, into ``target_cache`` or a new one, and commit the target's first token.

    Each chunk's features go straight into the drafter's cache and are dropped, and the head runs on the
    last position only, so memory grows with neither ``features x prompt`` nor ``vocabulary x prompt``.

    Raises :class:`~dflash.errors.GenerationError` if the target's logits are not a number.
    """
    target_cache = target.make_cache() if target_cache is None else target_cache
    state = DecodeState(list(prompt), target_cache, drafter.make_cache())
    tokens = mx.array([prompt])
    for start in range(0, len(prompt), step_size):
        chunk = tokens[:, start : start + step_size]
        hidden, features = target.forward_hidden(chunk, state.target_cache, drafter.target_layer_ids)
        drafter.extend_context(features, state.draft_cache, chunk)
        last = hidden[:, -1:]
        # The drafter's cache too, if it says what it holds: its lazy graph would keep every chunk's features.
        mx.eval(last, [c.state for c in state.target_cache], getattr(state.draft_cache, "state", ()))
        mx.clear_cache()
    logits_LV = process_logits(processors, tokens[0], target.head(last)[0])
    first = token_ids(sample_target(logits_LV, sampler))
    _check_committed(target, first)
    state.tokens += first
    return state


def decode_block(
    target: LoadedTargetModel,
    drafter: Drafter,
    state: DecodeState,
    length: int,
    sampler: Sampler,
    verify: VerifyRule = first_mismatch,
    processors: Sequence[LogitsProcessor] = (),
) -> Block:
    """Draft up to ``length`` tokens, verify them in one target pass, commit and rewind.

    On return both caches hold exactly the committed tokens without the new anchor. Drafting and
    verification are one lazy graph with one host synchronisation; the drafter already runs while the
    target's part of the graph is built.

    Raises :class:`~dflash.errors.GenerationError` if drafter, target or rule give what cannot be committed.
    """
    proposal, inputs = Proposal(mx.zeros((1, 0), mx.int64)), state.anchor
    if length > 0:
        raw = drafter.propose(state.anchor, length, state.draft_cache)
        proposal = Proposal(proposed_tokens(drafter, raw, length), raw.logits)
        if hasattr(verify, "draft"):
            proposal = verify.draft(proposal, sampler)
        # Ids are checked once they are known; until then none may read past the embedding's rows (nor before them:
        # without a sign, a negative id is a large one).
        drafts = mx.minimum(proposal.tokens.astype(mx.uint32), target.vocab_size - 1)
        mx.async_eval(drafts)
        inputs = mx.concatenate([inputs, drafts], axis=1)
    logits, features = target.forward_with_hidden_states(inputs, state.target_cache, drafter.target_layer_ids)
    logits_LV = logits[0]
    if processors:
        before = mx.array(state.tokens[:-1], mx.uint32)
        logits_LV = process_logits(processors, mx.concatenate([before, inputs[0]]), logits_LV)
    mx.async_eval(logits_LV, features)
    verified = verify(proposal, logits_LV, sampler)

    drafted = token_ids(proposal.tokens[0])
    check_drafted(drafter, drafted, target.vocab_size)
    _check_verified(verify, verified, drafted)
    _check_committed(target, verified.tokens)
    committed = len(verified.tokens)
    target.rewind_kv_caches(state.target_cache, len(state.tokens) - 1 + committed)
    drafter.extend_context(features[:, :committed], state.draft_cache, inputs[:, :committed])
    state.tokens += verified.tokens
    return Block(drafted, verified.tokens, verified.accepted)


def decode(
    target: LoadedTargetModel,
    drafter: Drafter,
    state: DecodeState,
    max_tokens: int,
    block_size: int,
    sampler: Sampler,
    verify: VerifyRule = first_mismatch,
    processors: Sequence[LogitsProcessor] = (),
) -> Iterator[Block]:
    """Blocks until ``max_tokens`` tokens follow the prompt. The caller stops earlier at a stop token."""
    while (remaining := state.prompt_length + max_tokens - len(state.tokens)) > 0:
        yield decode_block(target, drafter, state, min(block_size, remaining) - 1, sampler, verify, processors)


def _check_verified(verify: VerifyRule, verified: Verified, drafted: list[int]) -> None:
    """The committed drafts are in the caches already, so a rule can only take a beginning of them."""
    name = getattr(verify, "__name__", type(verify).__name__)
    if not isinstance(verified, Verified):
        raise GenerationError(
            f"The verification rule {name!r} returned {type(verified).__name__}; expected a dflash.Verified."
        )
    accepted = verified.accepted
    if len(verified.tokens) != accepted + 1 or verified.tokens[:-1] != drafted[:accepted]:
        raise GenerationError(
            f"The verification rule {name!r} committed {verified.tokens} with "
            f"{accepted} accepted of the drafts {drafted}; expected the accepted drafts and one token more."
        )


def _check_committed(target: LoadedTargetModel, tokens: list[int]) -> None:
    if NO_TOKEN in tokens:
        raise GenerationError(
            "The target's logits are not a number (NaN): its weights are damaged, or they overflow in their type. "
            "Load the target again from intact files, or in bfloat16 or float32."
        )
    if not 0 <= min(tokens) <= max(tokens) < target.vocab_size:
        raise GenerationError(
            f"The sampler or verification rule chose {tokens}; this target's ids are 0 to {target.vocab_size - 1}."
        )
