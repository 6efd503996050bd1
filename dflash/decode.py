"""The decode loop: prefill, then draft a block, verify it in one target pass, commit, rewind.

Knows token ids and caches. Must not know text, chat templates, any architecture, or how drafts are made.
"""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import mlx.core as mx

from .drafters.checks import check_drafted, proposed_tokens
from .drafters.protocol import Drafter, Proposal
from .errors import GenerationError
from .policy import BlockRecord, Drafts, Policy
from .sampling import GREEDY, LogitsProcessor, Sampler, process_logits
from .target import LoadedTargetModel, TargetCache
from .trees import outcomes, rows_before
from .verify import (
    NO_TOKEN,
    Verified,
    VerifyRule,
    first_mismatch,
    random_states,
    sample_target,
    sample_with_states,
    token_ids,
)

PREFILL_STEP_SIZE = 2048  # tokens; mlx-lm's own default


@dataclass(frozen=True)
class Decoding:
    """Who decodes, and how.

    Args:
        target: The model whose text it is.
        drafter: Who guesses it.
        sampler: How the target chooses a token.
        verify: The rule that commits tokens.
        processors: Applied to the target's logits before the sampler.
        policy: How many drafts each block verifies.
        inspect: Called in each block with its whole proposal and the target's logits ``[L, V]``; the arrays that it
            returns are computed with the pass and come with the block, as :attr:`Block.inspected`.
        wait: Wait for the device after every part of a block, so that :attr:`Block.times` are those of the parts.
    """

    target: LoadedTargetModel
    drafter: Drafter
    sampler: Sampler = GREEDY
    verify: VerifyRule = first_mismatch
    processors: Sequence[LogitsProcessor] = ()
    policy: Policy = field(default_factory=Policy)
    inspect: Callable[[Proposal, mx.array], dict[str, mx.array]] | None = None
    wait: bool = False


@dataclass(frozen=True)
class BlockTimes:
    """Seconds of a block's parts; they overlap on the device, unless :attr:`Decoding.wait` keeps them apart.

    ``draft`` lasts until the drafts are known, or on their way where nobody asks for them; ``verify`` until the tokens
    to commit are known; ``rewind`` until both caches hold them.
    """

    draft: float = 0.0
    verify: float = 0.0
    rewind: float = 0.0

    @property
    def total(self) -> float:
        """The whole block."""
        return self.draft + self.verify + self.rewind


@dataclass(frozen=True)
class Block:
    """What one target pass decided.

    ``drafted`` are the tokens that it verified of the ``proposed`` ones, ``tokens`` those that it committed: the
    first ``accepted`` drafts and one token of the target's own. ``source`` tells which of several drafters made them.
    ``random_states``: MLX's random state after each of ``tokens``, if the target's sampler drew them in plain order.
    ``asleep``: a plain step, for which no drafter was asked. ``order``: the number of each draft in the proposal, the
    accepted ones first, as they stand in ``drafted``.
    """

    drafted: list[int]
    tokens: list[int]
    accepted: int
    proposed: int = 0
    source: str = ""
    times: BlockTimes = BlockTimes()
    inspected: dict[str, mx.array] | None = None
    random_states: list[list[int]] = field(default_factory=list)
    asleep: bool = False
    order: list[int] = field(default_factory=list)


@dataclass
class DecodeState:
    """Committed tokens and the two caches, which hold all of them but the last, the anchor."""

    tokens: list[int]
    target_cache: TargetCache
    draft_cache: Any
    prompt_length: int = field(init=False)
    last_length: int | None = None
    """Drafts that the last block verified: what the next one probably will."""

    def __post_init__(self) -> None:
        self.prompt_length = len(self.tokens)

    @property
    def anchor(self) -> mx.array:
        """The last committed token, ``[1, 1]``."""
        return mx.array([self.tokens[-1:]], mx.uint32)


def prefill(
    run: Decoding,
    prompt: list[int],
    step_size: int = PREFILL_STEP_SIZE,
    target_cache: TargetCache | None = None,
    draft_cache: Any = None,
) -> DecodeState:
    """Feed the prompt, into the caches given or new ones, and commit the target's first token.

    Caches that are given may hold the beginning of the prompt, but not its last token.

    Raises :class:`~dflash.errors.GenerationError` if the target's logits are not a number.
    """
    target, drafter = run.target, run.drafter
    target_cache = target.make_cache() if target_cache is None else target_cache
    draft_cache = drafter.make_cache() if draft_cache is None else draft_cache
    state = DecodeState(list(prompt), target_cache, draft_cache)
    last = feed(target, drafter, prompt, target_cache, draft_cache, step_size)
    logits_LV = process_logits(run.processors, mx.array(prompt), target.head(last)[0])
    first = token_ids(sample_target(logits_LV, run.sampler))
    _check_committed(target, first)
    state.tokens += first
    return state


def feed(
    target: LoadedTargetModel,
    drafter: Drafter,
    tokens: list[int],
    target_cache: TargetCache,
    draft_cache: Any,
    step_size: int = PREFILL_STEP_SIZE,
) -> mx.array:
    """Feed what the caches do not hold of ``tokens``, in chunks; the last token's final hidden state ``[1, 1, E]``.

    Each chunk's features go straight into the drafter's cache and are dropped, and only one final hidden state is
    kept, so memory grows with neither ``features x tokens`` nor ``vocabulary x tokens``. Beside the target's pass
    over a chunk, no more is held than the drafter's cache and the outputs that become features.
    """
    tokens_BL, fed = mx.array([tokens]), target_cache.offset
    together = len(tokens) - 1 if target_cache.ends_prompts_alone else len(tokens)
    target_cache.set_in_prompt(True)
    while fed < len(tokens):
        chunk = tokens_BL[:, fed : min(fed + step_size, together) if fed < together else None]
        fed += chunk.shape[1]
        hidden, features = target.forward_hidden(chunk, target_cache, drafter.target_layer_ids)
        last = hidden[:, -1:]
        # The target's pass ends before the features are joined: its activations are never held beside both.
        mx.eval(last, [c.state for c in target_cache])
        drafter.extend_context(features, draft_cache, chunk)
        # The drafter's cache too, if it says what it holds: its lazy graph would keep every chunk's features.
        mx.eval(getattr(draft_cache, "state", ()))
        del hidden, features  # or the next chunk would be computed beside them
        mx.clear_cache()
    target_cache.set_in_prompt(False)
    return last


def decode(run: Decoding, state: DecodeState, max_tokens: int, block_size: int) -> Generator[Block, None, None]:
    """Blocks until ``max_tokens`` tokens follow the prompt. The caller stops earlier at a stop token."""
    run.policy.begin()
    while (remaining := state.prompt_length + max_tokens - len(state.tokens)) > 0:
        if (nap := min(run.policy.sleep(), remaining)) > 0:
            yield from plain_steps(run, state, nap)
        else:
            most = min(block_size, remaining, state.target_cache.longest_pass) - 1
            yield decode_block(run, state, run.policy.draft_length(most) if most else 0)


def decode_block(run: Decoding, state: DecodeState, length: int) -> Block:
    """Draft up to ``length`` tokens, verify as many as the policy says in one target pass, commit and rewind.

    On return both caches hold exactly the committed tokens without the new anchor. Drafting and verification are one
    lazy graph with one host synchronisation; a policy that reads the drafter's confidence adds another, and so does a
    drafter that grows a tree.

    Raises :class:`~dflash.errors.GenerationError` if drafter, target or rule give what cannot be committed.
    """
    target, drafter, began = run.target, run.drafter, time.perf_counter()
    proposal = _propose(run, state, length)
    drafted_at = time.perf_counter()
    choice = _choose_pass(run, state, proposal)
    one, chosen_at = choice.chosen, time.perf_counter()
    inspected = run.inspect(proposal, one.logits_LV) if run.inspect else None
    mx.async_eval(choice.chances_L, one.logits_LV, one.features, inspected)
    verified = run.verify(one.proposal, one.logits_LV, run.sampler)

    drafted = token_ids(one.proposal.tokens[0])
    check_drafted(drafter, drafted, target.vocab_size)
    _check_verified(run.verify, verified, drafted, one.proposal.lineage)
    _check_committed(target, verified.tokens)
    verified_at = time.perf_counter()
    rows = [0, *(draft + 1 for draft in verified.accepted_drafts)]  # of the pass: the anchor and the accepted drafts
    state.target_cache.keep(rows)
    kept = mx.array(rows)
    drafter.extend_context(one.features[:, kept], state.draft_cache, one.inputs[:, kept])
    state.tokens += verified.tokens
    state.last_length = len(drafted)
    if run.wait:
        mx.eval([c.state for c in state.target_cache], getattr(state.draft_cache, "state", ()))
    ended = time.perf_counter()
    times = BlockTimes(drafted_at - began, verified_at - drafted_at, ended - verified_at)
    proposed, known = proposal.tokens.shape[1], _outcomes(proposal, verified)
    run.policy.observe(
        BlockRecord(
            drafted=proposed,
            verified=len(drafted),
            accepted=verified.accepted,
            matched=sum(known.values()),
            confidence=None if choice.chances_L is None else cast(list[float], choice.chances_L.tolist()),
            seconds=times.total - choice.rebuilding,
            drafting=0.0 if choice.known_at is None else choice.known_at - began,
            choosing=0.0 if choice.known_at is None else chosen_at - choice.known_at,
            source=proposal.source,
            parents=proposal.parents,
            outcomes=known,
        )
    )
    return Block(
        [drafted[i] for i in verified.accepted_first(len(drafted))],
        verified.tokens,
        verified.accepted,
        proposed,
        proposal.source,
        times,
        inspected,
        verified.random_states,
        order=verified.accepted_first(proposed),
    )


def plain_steps(run: Decoding, state: DecodeState, count: int) -> Iterator[Block]:
    """``count`` tokens without the drafter, as mlx-lm decodes: a pass is under way before its input is read.

    The features are kept for the drafter, which gets them when it wakes. After the last token both caches hold
    exactly the committed tokens without the new anchor; where the caller stops earlier, they hold it too.
    """
    target, drafter = run.target, run.drafter
    begin, history, features = len(state.tokens) - 1, mx.array(state.tokens), []

    def launch(inputs: mx.array) -> tuple[mx.array, mx.array | None]:
        logits, step_features = target.forward_with_hidden_states(inputs, state.target_cache, drafter.target_layer_ids)
        chosen = sample_with_states(process_logits(run.processors, history, logits[0]), run.sampler)
        mx.async_eval(chosen, step_features)
        features.append(step_features)
        return chosen

    def wake() -> None:
        context = mx.array([state.tokens[begin : begin + len(features)]])
        drafter.extend_context(mx.concatenate(features, axis=1), state.draft_cache, context)

    began, left = time.perf_counter(), count
    coming = launch(state.anchor)
    while left > 0:
        left -= 1
        target_token, state_after = coming
        if left > 0:
            history = mx.concatenate([history, target_token]) if run.processors else history
            coming = launch(target_token[None])
        tokens = token_ids(target_token)
        _check_committed(target, tokens)
        state.tokens += tokens
        if left == 0:
            wake()
        times = BlockTimes(verify=time.perf_counter() - began)
        run.policy.observe(BlockRecord(0, 0, 0, 0, None, times.total, asleep=True))
        try:
            yield Block([], tokens, 0, times=times, random_states=random_states(state_after), asleep=True)
        except GeneratorExit:
            if left > 0:
                wake()
            raise
        if left > 1 and hasattr(drafter, "wakes") and drafter.wakes(state.tokens, state.draft_cache):
            run.policy.wake()
            left = 1  # the pass that is under way
        began = time.perf_counter()


# --- a block's parts --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Pass:
    """A target pass over the anchor and the drafts of ``proposal``, as lazy arrays."""

    proposal: Proposal
    inputs: mx.array
    logits_LV: mx.array
    features: mx.array


def _propose(run: Decoding, state: DecodeState, length: int) -> Proposal:
    """The drafts, on their way: the device begins with them while the target's part of the graph is built."""
    if length == 0:
        return Proposal(mx.zeros((1, 0), mx.int64))
    if hasattr(run.verify, "propose"):
        raw = run.verify.propose(run.drafter, state.anchor, length, state.draft_cache, run.sampler)
    else:
        raw = run.drafter.propose(state.anchor, length, state.draft_cache)
    proposal = replace(raw, tokens=proposed_tokens(run.drafter, raw, length))
    (mx.eval if run.wait else mx.async_eval)(proposal.tokens)
    return proposal


@dataclass(frozen=True)
class _Choice:
    """The pass that verifies, and the chances of the drafts where the policy learns from them.

    If the policy waited for them, they were there at ``known_at``; ``rebuilding`` are the seconds of building a pass
    of another length.
    """

    chosen: _Pass
    chances_L: mx.array | None
    known_at: float | None = None
    rebuilding: float = 0.0


def _choose_pass(run: Decoding, state: DecodeState, proposal: Proposal) -> _Choice:
    """The pass over as many drafts as the policy says.

    If the policy waits for the drafter's confidence, a pass of the last block's length is built meanwhile, so that the
    device need not wait for the host afterwards; if the policy then wants another length, it is built anew.
    """
    proposed = proposal.tokens.shape[1]
    # Drafts that were drawn must be verified whatever they are: to look at them first would prefer some.
    chances_L = proposal.acceptance_chances() if run.policy.reads_confidence and proposal.log_q is None else None
    if chances_L is None or not run.policy.waits_for_confidence(proposal.source):
        length = run.policy.verify_length(Drafts(proposed, None, proposal.source, proposal.parents))
        return _Choice(_build_pass(run, state, proposal.first(length)), chances_L)
    mx.async_eval(chances_L)
    undo, began = state.target_cache.undo_point(), time.perf_counter()
    guess = proposed if state.last_length is None else min(state.last_length, proposed)
    one, building = _build_pass(run, state, proposal.first(guess)), time.perf_counter() - began
    confidence, known_at = cast(list[float], chances_L.tolist()), time.perf_counter()
    drafts = Drafts(proposed, confidence, proposal.source, proposal.parents, guess, building)
    length = run.policy.verify_length(drafts)
    if length == guess:
        return _Choice(one, chances_L, known_at)
    undo()
    began = time.perf_counter()
    one = _build_pass(run, state, proposal.first(length))
    return _Choice(one, chances_L, known_at, time.perf_counter() - began)


def _build_pass(run: Decoding, state: DecodeState, proposal: Proposal) -> _Pass:
    # Ids are checked once they are known; until then none may read past the embedding's rows (nor before them:
    # without a sign, a negative id is a large one).
    drafts = mx.minimum(proposal.tokens.astype(mx.uint32), run.target.vocab_size - 1)
    inputs = mx.concatenate([state.anchor, drafts], axis=1)
    layer_ids = run.drafter.target_layer_ids
    logits, features = run.target.forward_with_hidden_states(inputs, state.target_cache, layer_ids, proposal.parents)
    logits_LV = logits[0]
    if run.processors:
        before = mx.array(state.tokens[:-1], mx.uint32)
        texts = [mx.concatenate([before, inputs[0, mx.array(rows)]]) for rows in rows_before(proposal.lineage)]
        rows = [process_logits(run.processors, text, logits_LV[i : i + 1]) for i, text in enumerate(texts)]
        logits_LV = mx.concatenate(rows)
    return _Pass(proposal, inputs, logits_LV, features)


def _outcomes(proposal: Proposal, verified: Verified) -> dict[int, bool]:
    """Of the drafts that follow what was committed, verified or not, which are what was committed next."""
    if proposal.log_q is not None:  # drafts that were drawn tell nothing beyond what the rule says
        return {i: i < verified.accepted for i in range(min(verified.accepted + 1, proposal.tokens.shape[1]))}
    return outcomes(token_ids(proposal.tokens[0]), proposal.lineage, verified.tokens)


def _check_verified(verify: VerifyRule, verified: Verified, drafted: list[int], parents: list[int]) -> None:
    """The committed drafts are in the caches already, so a rule can only take a beginning of them."""
    name = getattr(verify, "__name__", type(verify).__name__)
    if not isinstance(verified, Verified):
        raise GenerationError(
            f"The verification rule {name!r} returned {type(verified).__name__}; expected a dflash.Verified."
        )
    accepted, path = verified.accepted, verified.accepted_drafts
    one_after_another = max(path, default=-1) < len(drafted) and [-1, *path[:-1]][: len(path)] == [
        parents[i] for i in path
    ]
    tokens = [drafted[i] for i in path] if one_after_another else None
    if len(path) != accepted or len(verified.tokens) != accepted + 1 or verified.tokens[:-1] != tokens:
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
