"""One block: its records, and its steps: propose, build the target pass, commit, check."""

import operator
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import mlx.core as mx

from ..core.errors import GenerationError
from ..core.trees import outcomes, rows_before
from ..core.values import short
from ..drafters.checks import proposed_tokens
from ..drafters.protocol import Drafter, Proposal
from ..policies.base import Drafts, Policy
from ..target import LoadedTargetModel, TargetCache
from .sampling import GREEDY, LogitsProcessor, RandomState, Sampler, process_logits
from .verify import NO_TOKEN, Verified, VerifyRule, first_mismatch, token_ids


@dataclass(frozen=True)
class Decoding:
    """Everything that one decoding run needs.

    Args:
        target: The model whose text is written.
        drafter: Proposes tokens.
        sampler: How the target chooses a token.
        verify: The rule that commits tokens.
        processors: Applied to the target's logits before the sampler.
        policy: How many drafts each block verifies.
        inspect: Called in each block with the whole proposal and the target's logits ``[L, V]``. The arrays that it
            returns are computed with the pass and become :attr:`Block.inspected`.
        wait: Wait for the device after each part of a block, so that :attr:`Block.times` measure the parts.
        clock: Returns seconds, for :attr:`Block.times` and the policy.
    """

    target: LoadedTargetModel
    drafter: Drafter
    sampler: Sampler = GREEDY
    verify: VerifyRule = first_mismatch
    processors: Sequence[LogitsProcessor] = ()
    policy: Policy = field(default_factory=Policy)
    inspect: Callable[[Proposal, mx.array], dict[str, mx.array]] | None = None
    wait: bool = False
    clock: Callable[[], float] = time.perf_counter


@dataclass(frozen=True)
class BlockTimes:
    """Seconds of a block's parts; on the device they overlap, unless :attr:`Decoding.wait` separates them.

    ``draft`` lasts until the drafts are known, or only under way if nothing needs them yet; ``verify`` until the tokens
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

    Args:
        drafted: The drafts that the pass verified.
        tokens: The committed tokens: the first ``accepted`` drafts and one token of the target's own.
        accepted: How many drafts were accepted.
        proposed: How many tokens the drafter proposed.
        source: Which of several drafters proposed them.
        times: Seconds by part.
        inspected: See :attr:`Decoding.inspect`.
        random_states: MLX's random state after each of ``tokens``, if they were sampled in the order of plain decoding.
        asleep: Whether this was a plain step, without the drafter.
        order: The numbers of the drafts in the proposal, in the order of ``drafted``: the accepted ones first.
    """

    drafted: list[int]
    tokens: list[int]
    accepted: int
    proposed: int = 0
    source: str = ""
    times: BlockTimes = BlockTimes()
    inspected: dict[str, mx.array] | None = None
    random_states: list[RandomState] = field(default_factory=list)
    asleep: bool = False
    order: list[int] = field(default_factory=list)


@dataclass
class DecodeState:
    """Committed tokens and the two caches, which hold all of them but the last, the anchor."""

    tokens: list[int]
    target_cache: TargetCache
    draft_cache: Any
    prompt_length: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_length = len(self.tokens)

    @property
    def anchor(self) -> mx.array:
        """The last committed token, ``[1, 1]``."""
        return mx.array([self.tokens[-1:]], mx.uint32)


@dataclass(frozen=True)
class Pass:
    """A target pass over the anchor and the drafts of ``proposal``, as lazy arrays.

    ``proposal`` is cut to the drafts that are verified; ``confidence`` covers all drafts that were proposed.
    """

    proposal: Proposal
    inputs: mx.array
    logits_LV: mx.array
    features: mx.array
    confidence: list[float] | None


def propose(run: Decoding, state: DecodeState, length: int) -> Proposal:
    """Up to ``length`` drafts. The device starts on them while the target's part of the graph is built."""
    if length == 0:
        return Proposal(mx.zeros((1, 0), mx.int64))
    if hasattr(run.verify, "propose"):
        raw = run.verify.propose(run.drafter, state.anchor, length, state.draft_cache, run.sampler)
    else:
        raw = run.drafter.propose(state.anchor, length, state.draft_cache)
    proposal = replace(raw, tokens=proposed_tokens(run.drafter, raw, length))
    (mx.eval if run.wait else mx.async_eval)(proposal.tokens)
    return proposal


def build_pass(run: Decoding, state: DecodeState, proposal: Proposal) -> Pass:
    """The target pass over the anchor and as many drafts as the policy verifies, not evaluated yet."""
    proposed = proposal.tokens.shape[1]
    chances_L = proposal.acceptance_chances() if run.policy.reads_confidence else None
    confidence = None if chances_L is None else cast(list[float], chances_L.tolist())
    drafts = Drafts(proposed, confidence, proposal.source, proposal.parents)
    proposal = proposal.first(min(call_policy(run.policy.verify_length, drafts), proposed))
    # Ids are checked once they are known. Until then none may index outside the embedding; unsigned, a negative id
    # is a large one.
    verified = mx.minimum(proposal.tokens.astype(mx.uint32), run.target.vocab_size - 1)
    inputs = mx.concatenate([state.anchor, verified], axis=1)
    logits, features = run.target.forward_with_hidden_states(
        inputs, state.target_cache, run.drafter.target_layer_ids, proposal.parents
    )
    logits_LV = logits[0]
    if run.processors:
        before = mx.array(state.tokens[:-1], mx.uint32)
        texts = [mx.concatenate([before, inputs[0, mx.array(rows)]]) for rows in rows_before(proposal.lineage)]
        rows = [process_logits(run.processors, text, logits_LV[i : i + 1]) for i, text in enumerate(texts)]
        logits_LV = mx.concatenate(rows)
    return Pass(proposal, inputs, logits_LV, features, confidence)


def commit(run: Decoding, state: DecodeState, target_pass: Pass, verified: Verified) -> None:
    """Commit the tokens and bring both caches to them: the rows of rejected drafts are dropped."""
    rows = [0, *(draft + 1 for draft in verified.accepted_drafts)]  # of the pass: the anchor and the accepted drafts
    state.target_cache.keep(rows)
    kept = mx.array(rows)
    run.drafter.extend_context(target_pass.features[:, kept], state.draft_cache, target_pass.inputs[:, kept])
    state.tokens += verified.tokens


def known_outcomes(proposal: Proposal, verified: Verified) -> dict[int, bool]:
    """For each draft that follows committed tokens, verified or not: whether it is what was committed next."""
    if proposal.log_q is not None:  # of sampled drafts only the rule's own decisions count
        return {i: i < verified.accepted for i in range(min(verified.accepted + 1, proposal.tokens.shape[1]))}
    return outcomes(token_ids(proposal.tokens), proposal.lineage, verified.tokens)


def call_policy(method: Callable[..., int], *arguments: Any) -> int:
    """The number that a policy's ``method`` returns.

    Raises ``GenerationError`` for anything but a whole number of at least 0.
    """
    returned = method(*arguments)
    try:
        number = operator.index(returned)
    except TypeError:
        number = -1
    if number < 0:
        raise GenerationError(
            f"The policy's {method.__qualname__} returned {short(returned)}; expected a whole number of at least 0."
        )
    return number


def check_verified(verify: VerifyRule, verified: Verified, drafted: list[int], parents: list[int]) -> None:
    """Raise ``GenerationError`` unless ``verified`` commits a path of the drafts and one token more.

    The drafts are already in the caches, so a rule can only accept drafts that follow one another from the anchor on.
    """
    name = getattr(verify, "__name__", type(verify).__name__)
    if not isinstance(verified, Verified):
        raise GenerationError(
            f"The verification rule {name!r} returned {type(verified).__name__}; expected a dflash.Verified."
        )
    accepted, path = verified.accepted, verified.accepted_drafts
    follows = max(path, default=-1) < len(drafted) and [-1, *path[:-1]][: len(path)] == [parents[i] for i in path]
    tokens = [drafted[i] for i in path] if follows else None
    if len(path) != accepted or len(verified.tokens) != accepted + 1 or verified.tokens[:-1] != tokens:
        raise GenerationError(
            f"The verification rule {name!r} committed {verified.tokens} with "
            f"{accepted} accepted of the drafts {drafted}; expected the accepted drafts and one token more."
        )


def not_a_number() -> GenerationError:
    """What is said of logits that are NaN."""
    return GenerationError(
        "The target's logits are not a number (NaN): its weights are damaged, or they overflow in their type. "
        "Load the target again from intact files, or in bfloat16 or float32."
    )


def check_committed(target: LoadedTargetModel, tokens: Sequence[int]) -> None:
    """Raise ``GenerationError`` unless ``tokens`` are tokens of the target."""
    if NO_TOKEN in tokens:
        raise not_a_number()
    if not all(0 <= token < target.vocab_size for token in tokens):
        raise GenerationError(
            f"The sampler or verification rule chose {tokens}; this target's ids are 0 to {target.vocab_size - 1}."
        )
