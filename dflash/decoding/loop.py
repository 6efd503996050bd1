"""The decode loop: prefill, then draft a block, verify it in one target pass, commit, rewind."""

from collections.abc import Generator, Iterator
from typing import Any

import mlx.core as mx

from ..drafters.checks import check_drafted
from ..drafters.protocol import Drafter
from ..policies.base import BlockRecord
from ..target import LoadedTargetModel, TargetCache
from .block import (
    Block,
    BlockTimes,
    DecodeState,
    Decoding,
    ask,
    build_pass,
    check_committed,
    check_verified,
    known_outcomes,
    propose,
)
from .sampling import process_logits
from .verify import random_states, sample_target, sample_with_states, token_ids

PREFILL_STEP_SIZE = 2048  # tokens; mlx-lm's own default


def prefill(
    run: Decoding,
    prompt: list[int],
    step_size: int = PREFILL_STEP_SIZE,
    target_cache: TargetCache | None = None,
    draft_cache: Any = None,
) -> DecodeState:
    """Feed the prompt, into the caches given or new ones, and commit the target's first token.

    Caches that are given may hold the beginning of the prompt, but not its last token.

    Raises ``GenerationError`` if the target's logits are not a number.
    """
    target, drafter = run.target, run.drafter
    target_cache = target.make_cache() if target_cache is None else target_cache
    draft_cache = drafter.make_cache() if draft_cache is None else draft_cache
    state = DecodeState(list(prompt), target_cache, draft_cache)
    last = feed(target, drafter, prompt, target_cache, draft_cache, step_size)
    logits_LV = process_logits(run.processors, mx.array(prompt), target.head(last)[0])
    first = token_ids(sample_target(logits_LV, run.sampler))
    check_committed(target, first)
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
        if (nap := min(ask(run.policy.sleep), remaining)) > 0:
            yield from plain_steps(run, state, nap)
        else:
            most = min(block_size, remaining, state.target_cache.longest_pass) - 1
            yield decode_block(run, state, min(ask(run.policy.draft_length, most), most) if most else 0)


def decode_block(run: Decoding, state: DecodeState, length: int) -> Block:
    """Draft up to ``length`` tokens, verify as many as the policy says in one target pass, commit and rewind.

    On return both caches hold exactly the committed tokens without the new anchor. Drafting and verification are one
    lazy graph with one wait of the host. A policy that reads the drafter's confidence adds another wait, and so does a
    drafter that grows a tree; a rule that samples one token after another waits for each.

    Raises ``GenerationError`` if drafter, target or rule give what cannot be committed.
    """
    target, drafter, began = run.target, run.drafter, run.clock()
    proposal = propose(run, state, length)
    drafted_at = run.clock()
    one = build_pass(run, state, proposal)
    inspected = run.inspect(proposal, one.logits_LV) if run.inspect else None
    mx.async_eval(one.logits_LV, one.features, inspected)
    verified = run.verify(one.proposal, one.logits_LV, run.sampler)

    drafted = token_ids(one.proposal.tokens)
    check_drafted(drafter, drafted, target.vocab_size)
    check_verified(run.verify, verified, drafted, one.proposal.lineage)
    check_committed(target, verified.tokens)
    verified_at = run.clock()
    rows = [0, *(draft + 1 for draft in verified.accepted_drafts)]  # of the pass: the anchor and the accepted drafts
    state.target_cache.keep(rows)
    kept = mx.array(rows)
    drafter.extend_context(one.features[:, kept], state.draft_cache, one.inputs[:, kept])
    state.tokens += verified.tokens
    if run.wait:
        mx.eval([c.state for c in state.target_cache], getattr(state.draft_cache, "state", ()))
    ended = run.clock()
    times = BlockTimes(drafted_at - began, verified_at - drafted_at, ended - verified_at)
    proposed, known = proposal.tokens.shape[1], known_outcomes(proposal, verified)
    run.policy.observe(
        BlockRecord(
            drafted=proposed,
            verified=len(drafted),
            accepted=verified.accepted,
            matched=sum(known.values()),
            confidence=one.confidence,
            seconds=times.total,
            source=proposal.source,
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
    """Up to ``count`` tokens without the drafter, as mlx-lm decodes: a pass is under way before its input is read.

    The policy is asked after each step whether the drafter should go on pausing. The features are kept for the
    drafter, which gets them at the end. After the last token both caches hold exactly the committed tokens without the
    new anchor; where the caller stops earlier, they hold it too.
    """
    target, drafter = run.target, run.drafter
    begin, history, features = len(state.tokens) - 1, mx.array(state.tokens), []

    def launch(inputs: mx.array) -> tuple[mx.array, mx.array | None]:
        logits, step_features = target.forward_with_hidden_states(inputs, state.target_cache, drafter.target_layer_ids)
        chosen = sample_with_states(process_logits(run.processors, history, logits[0]), run.sampler)
        mx.async_eval(chosen, step_features)
        features.append(step_features)
        return chosen

    def hand_over() -> None:
        context = mx.array([state.tokens[begin : begin + len(features)]])
        drafter.extend_context(mx.concatenate(features, axis=1), state.draft_cache, context)

    began, left = run.clock(), count
    coming = launch(state.anchor)
    while left > 0:
        left -= 1
        target_token, state_after = coming
        if left > 0:
            history = mx.concatenate([history, target_token]) if run.processors else history
            coming = launch(target_token[None])
        tokens = token_ids(target_token)
        check_committed(target, tokens)
        state.tokens += tokens
        if left == 0:
            hand_over()
        times = BlockTimes(verify=run.clock() - began)
        run.policy.observe(BlockRecord(0, 0, 0, 0, None, times.total, asleep=True))
        try:
            yield Block([], tokens, 0, times=times, random_states=random_states(state_after), asleep=True)
        except GeneratorExit:
            if left > 0:
                hand_over()
            raise
        if left > 1:  # of which one is under way
            if hasattr(drafter, "wakes") and drafter.wakes(state.tokens, state.draft_cache):
                run.policy.wake()
            left = min(left, max(1, ask(run.policy.sleep)))
        began = run.clock()
