"""The decode loop: prefill, then draft a block, verify it in one target pass, commit, rewind.

Knows token ids and caches. Must not know text, chat templates, any architecture, or how drafts are made.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import mlx.core as mx

from .drafters.checks import check_drafted, proposed_tokens
from .drafters.protocol import Drafter, Proposal
from .errors import GenerationError
from .policy import BlockRecord, Policy
from .sampling import LogitsProcessor, Sampler, process_logits
from .target import LoadedTargetModel, TargetCache
from .verify import NO_TOKEN, Verified, VerifyRule, first_mismatch, sample_target, token_ids

PREFILL_STEP_SIZE = 2048  # tokens; mlx-lm's own default
EVERY_DRAFT = Policy()


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
    policy: Policy = EVERY_DRAFT,
) -> Block:
    """Draft up to ``length`` tokens, verify as many as ``policy`` says in one target pass, commit and rewind.

    On return both caches hold exactly the committed tokens without the new anchor. Drafting and
    verification are one lazy graph with one host synchronisation, unless the policy reads the drafter's
    confidence in between; the drafter already runs while the target's part of the graph is built.

    Raises :class:`~dflash.errors.GenerationError` if drafter, target or rule give what cannot be committed.
    """
    began = drafted_at = time.perf_counter()
    proposal, proposed, confidence, inputs = Proposal(mx.zeros((1, 0), mx.int64)), 0, None, state.anchor
    if length > 0:
        raw = drafter.propose(state.anchor, length, state.draft_cache)
        proposal = Proposal(proposed_tokens(drafter, raw, length), raw.logits)
        proposed = proposal.tokens.shape[1]
        if policy.reads_confidence:
            confidence = drafter_confidence(proposal)
            mx.eval(proposal.tokens)
            drafted_at = time.perf_counter()
        proposal = proposal.first(policy.verify_length(proposed, confidence))
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
    committed, ended = len(verified.tokens), time.perf_counter()
    policy.observe(
        BlockRecord(proposed, len(drafted), verified.accepted, confidence, drafted_at - began, ended - drafted_at)
    )
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
    policy: Policy = EVERY_DRAFT,
) -> Iterator[Block]:
    """Blocks until ``max_tokens`` tokens follow the prompt. The caller stops earlier at a stop token."""
    policy.begin()
    while (remaining := state.prompt_length + max_tokens - len(state.tokens)) > 0:
        if nap := min(policy.sleep(), remaining):
            yield from plain_steps(target, drafter, state, nap, sampler, processors, policy)
        else:
            length = min(block_size, remaining) - 1
            yield decode_block(target, drafter, state, length, sampler, verify, processors, policy)


def plain_steps(
    target: LoadedTargetModel,
    drafter: Drafter,
    state: DecodeState,
    count: int,
    sampler: Sampler,
    processors: Sequence[LogitsProcessor] = (),
    policy: Policy = EVERY_DRAFT,
) -> Iterator[Block]:
    """``count`` tokens without the drafter, as mlx-lm decodes: a pass is under way before its input is read.

    The features are kept for the drafter, which gets them when it wakes. After the last token both caches hold
    exactly the committed tokens without the new anchor; where the caller stops earlier, the target's is a token ahead.
    """
    begin, history, features = len(state.tokens) - 1, mx.array(state.tokens), []

    def launch(inputs: mx.array) -> mx.array:
        logits, step_features = target.forward_with_hidden_states(inputs, state.target_cache, drafter.target_layer_ids)
        target_token = sample_target(process_logits(processors, history, logits[0]), sampler)
        mx.async_eval(target_token, step_features)
        features.append(step_features)
        return target_token

    coming = launch(state.anchor)
    for left in range(count - 1, -1, -1):
        began, target_token = time.perf_counter(), coming
        if left > 0:
            history = mx.concatenate([history, target_token]) if processors else history
            coming = launch(target_token[None])
        tokens = token_ids(target_token)
        _check_committed(target, tokens)
        state.tokens += tokens
        policy.observe(BlockRecord(0, 0, 0, None, 0.0, time.perf_counter() - began))
        if left == 0:
            context = mx.array([state.tokens[begin:-1]])
            drafter.extend_context(mx.concatenate(features, axis=1), state.draft_cache, context)
        yield Block([], tokens, 0)


def drafter_confidence(proposal: Proposal) -> list[float] | None:
    """The drafter's probability of each of its drafts, ``None`` where it has no logits."""
    if proposal.logits is None:
        return None
    logits_LV = proposal.logits[0].astype(mx.float32)
    known_L1 = mx.clip(proposal.tokens[0, :, None], 0, logits_LV.shape[-1] - 1)  # ids are checked later
    own_L1 = mx.take_along_axis(logits_LV, known_L1, axis=-1)
    confidence_L = mx.exp(own_L1 - mx.logsumexp(logits_LV, axis=-1, keepdims=True))[:, 0]
    return cast(list[float], confidence_L.tolist())


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
