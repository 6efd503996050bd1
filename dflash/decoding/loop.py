"""The decode loop: prefill, then one block after another.

State: committed tokens ``c[0 .. p]``. The last one, ``c[p]``, is the anchor; both caches hold ``c[0 .. p-1]``. A block

1. asks the drafter for drafts ``d[1 .. k]`` that follow the anchor,
2. runs the target once over the anchor and the drafts: its own choices ``t[0 .. k]``, and the features,
3. counts the ``n`` leading drafts with ``d[i + 1] == t[i]``,
4. commits ``d[1 .. n]`` and ``t[n]``, the target's own next token,
5. rewinds the target's caches to ``p + 1 + n`` tokens and extends the drafter's context by the same ones.

A policy decides ``k``, and when to decode plainly instead.
"""

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
    build_pass,
    call_policy,
    check_committed,
    check_verified,
    commit,
    known_outcomes,
    propose,
)
from .sampling import RandomState, process_logits
from .verify import sample_target, sample_with_states, token_ids

PREFILL_STEP_SIZE = 2048  # tokens; mlx-lm's own default


def prefill(
    run: Decoding,
    prompt: list[int],
    step_size: int = PREFILL_STEP_SIZE,
    target_cache: TargetCache | None = None,
    draft_cache: Any = None,
) -> DecodeState:
    """Read the prompt into the given caches, or into new ones, and commit the target's first token.

    Given caches may hold the beginning of the prompt, but not its last token.

    Raises ``GenerationError`` if the target's logits are not a number.
    """
    target, drafter = run.target, run.drafter
    target_cache = target.make_cache() if target_cache is None else target_cache
    draft_cache = drafter.make_cache() if draft_cache is None else draft_cache
    state = DecodeState(list(prompt), target_cache, draft_cache)
    last = prefill_context(target, drafter, prompt, target_cache, draft_cache, step_size)
    logits_LV = process_logits(run.processors, mx.array(prompt), target.head(last)[0])
    first = token_ids(sample_target(logits_LV, run.sampler))
    check_committed(target, first)
    state.tokens += first
    return state


def prefill_context(
    target: LoadedTargetModel,
    drafter: Drafter,
    tokens: list[int],
    target_cache: TargetCache,
    draft_cache: Any,
    step_size: int = PREFILL_STEP_SIZE,
) -> mx.array:
    """Read the part of ``tokens`` that the caches do not hold; returns the last final hidden state ``[1, 1, E]``.

    The tokens are read in chunks. Each chunk's features go straight into the drafter's cache and are dropped, and only
    one final hidden state is kept, so memory grows with neither ``features x tokens`` nor ``vocabulary x tokens``.
    """
    tokens_BL, start = mx.array([tokens]), target_cache.offset
    chunks_end = len(tokens) - 1 if target_cache.ends_prompts_alone else len(tokens)
    target_cache.set_in_prompt(True)
    while start < len(tokens):
        chunk = tokens_BL[:, start : min(start + step_size, chunks_end) if start < chunks_end else None]
        start += chunk.shape[1]
        hidden, features = target.forward_hidden(chunk, target_cache, drafter.target_layer_ids)
        last = hidden[:, -1:]
        # The pass ends before the features are joined, so that its activations are freed first.
        mx.eval(last, [c.state for c in target_cache])
        drafter.extend_context(features, draft_cache, chunk)
        # A cache that says what it holds is evaluated too; its lazy graph would keep the features of every chunk.
        mx.eval(getattr(draft_cache, "state", ()))
        del hidden, features  # or they would be held while the next chunk is computed
        mx.clear_cache()
    target_cache.set_in_prompt(False)
    return last


def decode(run: Decoding, state: DecodeState, max_tokens: int, block_size: int) -> Generator[Block, None, None]:
    """Yield blocks until ``max_tokens`` tokens follow the prompt. The caller stops earlier at a stop token."""
    run.policy.begin()
    while (remaining := state.prompt_length + max_tokens - len(state.tokens)) > 0:
        if (pause := min(call_policy(run.policy.sleep), remaining)) > 0:
            yield from plain_steps(run, state, pause)
        else:
            most = min(block_size, remaining, state.target_cache.longest_pass) - 1
            yield decode_block(run, state, min(call_policy(run.policy.draft_length, most), most) if most else 0)


def decode_block(run: Decoding, state: DecodeState, length: int) -> Block:
    """Draft up to ``length`` tokens, verify as many as the policy says in one target pass, commit and rewind.

    On return both caches hold exactly the committed tokens without the new anchor. Drafting and verification are one
    lazy graph, for which the host waits once. It waits once more for a policy that reads the drafter's confidence or a
    drafter that grows a tree, and for each token under a rule that samples one by one.

    Raises ``GenerationError`` if drafter, target or rule return something that cannot be committed.
    """
    started = run.clock()
    proposal = propose(run, state, length)
    drafted_at = run.clock()
    target_pass = build_pass(run, state, proposal)
    inspected = run.inspect(proposal, target_pass.logits_LV) if run.inspect else None
    mx.async_eval(target_pass.logits_LV, target_pass.features, inspected)
    verified = run.verify(target_pass.proposal, target_pass.logits_LV, run.sampler)

    drafted = token_ids(target_pass.proposal.tokens)
    check_drafted(run.drafter, drafted, run.target.vocab_size)
    check_verified(run.verify, verified, drafted, target_pass.proposal.lineage)
    check_committed(run.target, verified.tokens)
    verified_at = run.clock()
    commit(run, state, target_pass, verified)
    if run.wait:
        mx.eval([c.state for c in state.target_cache], getattr(state.draft_cache, "state", ()))
    ended = run.clock()

    times = BlockTimes(drafted_at - started, verified_at - drafted_at, ended - verified_at)
    proposed, known = proposal.tokens.shape[1], known_outcomes(proposal, verified)
    run.policy.observe(
        BlockRecord(
            drafted=proposed,
            verified=len(drafted),
            accepted=verified.accepted,
            matched=sum(known.values()),
            confidence=target_pass.confidence,
            seconds=times.total,
            source=proposal.source,
            outcomes=known,
        )
    )
    return Block(
        drafted=[drafted[i] for i in verified.accepted_first(len(drafted))],
        tokens=verified.tokens,
        accepted=verified.accepted,
        proposed=proposed,
        source=proposal.source,
        times=times,
        inspected=inspected,
        random_states=verified.random_states,
        order=verified.accepted_first(proposed),
    )


def plain_steps(run: Decoding, state: DecodeState, count: int) -> Iterator[Block]:
    """Decode up to ``count`` tokens without the drafter, as mlx-lm does: the next pass starts before a token is read.

    After each step the policy decides whether the pause continues. The drafter gets the features of all steps at the
    end: after the last one, or when the caller stops earlier. Then both caches hold exactly the committed tokens
    without the new anchor.
    """
    target, drafter = run.target, run.drafter
    start, history, features = len(state.tokens) - 1, mx.array(state.tokens), []

    def launch(inputs: mx.array) -> tuple[mx.array, list[RandomState]]:
        logits, step_features = target.forward_with_hidden_states(inputs, state.target_cache, drafter.target_layer_ids)
        token, random_states = sample_with_states(process_logits(run.processors, history, logits[0]), run.sampler)
        mx.async_eval(token, [random_state.key for random_state in random_states], step_features)
        features.append(step_features)
        return token, random_states

    def extend_drafter_context() -> None:
        context = mx.array([state.tokens[start : start + len(features)]])
        drafter.extend_context(mx.concatenate(features, axis=1), state.draft_cache, context)

    step_started, left = run.clock(), count
    launched = launch(state.anchor)
    while left > 0:
        left -= 1
        token, random_states = launched
        if left > 0:
            history = mx.concatenate([history, token]) if run.processors else history
            launched = launch(token[None])
        tokens = token_ids(token)
        check_committed(target, tokens)
        state.tokens += tokens
        if left == 0:
            extend_drafter_context()
        times = BlockTimes(verify=run.clock() - step_started)
        run.policy.observe(BlockRecord(0, 0, 0, 0, None, times.total, asleep=True))
        try:
            yield Block([], tokens, 0, times=times, random_states=random_states, asleep=True)
        except GeneratorExit:
            if left > 0:
                extend_drafter_context()
            raise
        if left > 1:  # one of them is launched already
            if hasattr(drafter, "wakes") and drafter.wakes(state.tokens, state.draft_cache):
                run.policy.wake()
            left = min(left, max(1, call_policy(run.policy.sleep)))
        step_started = run.clock()
