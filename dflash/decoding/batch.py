"""The decode loop of several texts at once: the page of :mod:`.loop` again, a row a text, inside mlx-lm's batches.

mlx-lm's ``BatchGenerator`` admits texts, reads their prompts together and lets finished ones go, at any step. A row's
caches hold what it has answered; the token after that, its anchor, is known. A block

1. asks the drafter for ``k`` drafts after each row's anchor, in one pass,
2. runs the target once over the anchors and drafts of all rows,
3. counts in each row the leading drafts that are the target's own choices,
4. answers each row's anchor and accepted drafts; the target's own next token is the row's new anchor,
5. keeps exactly these tokens in the row's caches, the target's and the drafter's.

No row waits for another: each keeps what was right in it. A policy decides ``k`` for all rows, by what blocks of so
many rows cost; where none pays, the step is mlx-lm's own. Either also reads the last token of a prompt that joins.
"""

import copy
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
from mlx_lm.generate import GenerationBatch
from mlx_lm.models.cache import TokenBuffer, make_prompt_cache

from ..core.errors import GenerationError
from ..drafters.protocol import Drafter
from ..drafters.rows import TextByText, drafts_of_row, for_batches
from ..policies.base import BlockRecord, Drafts, Policy
from ..target import LoadedTargetModel
from ..target.rows import as_rows
from .block import Block, call_policy, check_committed, not_a_number
from .sampling import DrawingSampler, Sampler, process_logits
from .verify import NO_TOKEN, accepted_length, sample_target

logger = logging.getLogger(__name__)

WAITING = 64  # plain steps whose features are kept for the drafter, at most
FEW_ROWS = 4  # with more, a pass is large enough for all BLAS threads
JOINING = -1  # tokens answered by a row that joins: the step that reads its prompt's last token counts it up to 0


class Tapped:
    """Target and drafter as one model for mlx-lm: the drafter's context is further layers of the list of caches.

    Args:
        target: The model whose texts are written.
        drafter: Proposes tokens; one that drafts for one text only is asked for each in turn.
        policy: How many drafts each block verifies; it is told with each step how many rows there were.
        block_size: Most tokens of a row in one pass.
        max_length: Most tokens of a row.
        clock: Returns seconds, for the policy.
        few: What steps of few rows run inside of, such as another number of BLAS threads.
    """

    def __init__(
        self,
        target: LoadedTargetModel,
        drafter: Drafter,
        policy: Policy,
        block_size: int,
        max_length: int,
        clock: Callable[[], float] = time.perf_counter,
        few: Callable[[], AbstractContextManager[None]] = nullcontext,
    ):
        self.target, self.drafter, self.policy = target, for_batches(drafter), policy
        self.block_size, self.max_length, self.clock, self.few = block_size, max_length, clock, few
        self.target_layers = len(make_prompt_cache(target.model))
        self.reads_prompts = False
        """Whether prompts have been read in part, so that others of their tokens came after the last step's."""
        self.waiting: list[tuple[mx.array, mx.array]] | None = None
        """Features and tokens of plain steps, for the drafter's context; ``None`` while it takes them at once."""
        if isinstance(self.drafter, TextByText):
            logger.info("%s drafts for one text after another; the target reads all at once.", type(drafter).__name__)

    def make_cache(self) -> list[Any]:
        """New, empty caches of one text: the target's, then the drafter's."""
        return [*as_rows(make_prompt_cache(self.target.model)), *self.drafter.make_layers()]

    def __call__(self, tokens_BL: mx.array, cache: list[Any]) -> mx.array:
        """Logits ``[B, L, V]``; both models' caches take in the tokens."""
        layer_ids = self.drafter.target_layer_ids
        hidden, features = self.target.forward_hidden(tokens_BL, cache[: self.target_layers], layer_ids)
        if self.waiting is None:
            self.drafter.extend_rows(features, cache[self.target_layers :], tokens_BL)
        else:
            self.waiting.append((features, tokens_BL))
        return self.target.head(hidden)


@dataclass(frozen=True)
class RowBlock:
    """What one pass answered in one row.

    ``block.tokens`` are the row's anchor and the accepted drafts, and its last token if that ends it. With the last
    block come the reason, the row's caches, and the tokens that these hold: all but the last, if that was not fed. A
    row that fails ends with the reason ``"error"`` and its ``error``, without tokens and caches; the others go on.
    """

    uid: int
    block: Block
    finish_reason: str | None = None
    prompt_cache: list[Any] | None = None
    all_tokens: list[int] | None = None
    error: Exception | None = None


class Guarded:
    """A row's own sampler or logits processor, whose error ends its row only; after one, ``instead`` is called."""

    def __init__(self, function: Callable[..., mx.array], instead: Callable[..., mx.array]):
        self.function, self.instead = function, instead
        self.error: Exception | None = None

    def __call__(self, *inputs: mx.array) -> mx.array:
        harmless = self.instead(*inputs)
        if self.error is None:
            try:
                return self.function(*inputs).reshape(harmless.shape)
            except Exception as error:
                self.error = error
        return harmless


class SpeculativeBatch(GenerationBatch):
    """mlx-lm's running batch, whose step verifies drafts."""

    model: Any  # Tapped
    samplers: Any
    logits_processors: Any

    def __init__(self, *args: Any, **kwargs: Any):
        self._waiting: list[tuple[mx.array, mx.array]] = []  # of the plain steps that the drafter has not seen yet
        super().__init__(*args, **kwargs)

    def next(self) -> list[Any]:
        """One step of every row: a :class:`RowBlock` each."""
        with self.model.few() if len(self.uids) <= FEW_ROWS else nullcontext():
            return self._next()

    def _next(self) -> list[RowBlock]:
        errors = [self._error(row) for row in range(len(self.uids))]
        failed = [_failed(uid, error) for uid, error in zip(self.uids, errors, strict=True) if error is not None]
        if failed:  # when they were sampled last
            self.filter([row for row, error in enumerate(errors) if error is None])
        if not self.uids:
            return failed
        if all(answered == JOINING for answered in self._num_tokens):
            self._plain_step()
            return failed + self._next()  # none has answered, and mlx-lm takes [] for the end
        policy = self.model.policy
        most = 0 if call_policy(policy.sleep) else self._most_drafts()
        length = min(call_policy(policy.draft_length, most), most) if most else 0
        verified = min(call_policy(policy.verify_length, Drafts(length)), length) if length else 0
        return failed + (self._block(length, verified) if verified else self._plain_step())

    def _most_drafts(self) -> int:
        """As many as the row that needs most can use, while no row is fed more tokens than its positions allow."""
        needed = max(most - answered for most, answered in zip(self.max_tokens, self._num_tokens, strict=True))
        room = min(self.model.max_length - len(tokens) for tokens in self.tokens)
        return max(min(self.model.block_size, needed, room) - 1, 0)

    def _block(self, length: int, verified: int) -> list[RowBlock]:
        """Draft ``length`` tokens a row, verify ``verified`` of them, answer what each row accepted."""
        self._settle()
        mx.eval(self._next_tokens)  # a plain step computes them ahead
        started = self.model.clock()
        target, drafter, (of_target, of_drafter) = self.model.target, self.model.drafter, self._layers()
        anchors_B = self._next_tokens.astype(mx.uint32)
        proposed = drafter.propose_rows(anchors_B, length, of_drafter).tokens
        drafts_BK = proposed[:, :verified].astype(mx.int32)
        length, verified = proposed.shape[1], drafts_BK.shape[1]  # there may be fewer
        mx.async_eval(drafts_BK)
        inputs_BL = mx.concatenate([anchors_B[:, None], self._embeddable(drafts_BK)], axis=1)
        logits_BLV, features_BLF, target_pass = target.forward_rows(inputs_BL, of_target, drafter.target_layer_ids)
        own_BL = self._own_tokens(inputs_BL, logits_BLV)
        mx.eval(drafts_BK, own_BL, features_BLF)

        anchors, drafts, own = (cast(list[Any], tokens.tolist()) for tokens in (anchors_B, drafts_BK, own_BL))
        blocks, reasons, kept, following, errors = [], [], [], [], []
        for row, anchor in enumerate(anchors):
            joins = self._num_tokens[row] == JOINING  # its anchor is its prompt's last token, which is not answered
            drafted = [] if joins else drafts_of_row(drafter, drafts[row], target.vocab_size)
            accepted = accepted_length(drafted, own[row])
            errors.append(self._error(row, own[row][: accepted + 1]))
            tokens, reason = self._until_end(row, [anchor, *drafted[:accepted]])
            kept.append(len(tokens))
            following.append(max(own[row][len(tokens) - 1], 0))  # NO_TOKEN ends the row
            if joins:
                self._begin(row)
                tokens = []
            if reason is None and (reason := self._ends_with(row, following[row])):
                tokens.append(following[row])
            blocks.append(Block(drafted, tokens, accepted, proposed=length))
            reasons.append(reason)
        self._keep(kept, inputs_BL, features_BLF, target_pass)
        self._next_tokens, self._next_logprobs = mx.array(following, mx.uint32), [None] * len(following)
        mx.async_eval([cache.state for cache in self.prompt_cache])
        self.model.policy.observe(_record(blocks, length, verified, self.model.clock() - started))
        return self._answer(blocks, reasons, errors)

    def _own_tokens(self, inputs_BL: mx.array, logits_BLV: mx.array) -> mx.array:
        """The target's choice ``[B, L]`` at each position, by each row's own processors and sampler."""
        if not any(self.logits_processors) and all(sampler is self.samplers[0] for sampler in self.samplers):
            rows, length, vocab_size = logits_BLV.shape
            return _choose(logits_BLV.reshape(-1, vocab_size), self.samplers[0]).reshape(rows, length)
        chosen = []
        for row, processors in enumerate(self.logits_processors):
            text = mx.concatenate([mx.array(self.tokens[row], mx.uint32), inputs_BL[row]])
            chosen.append(_choose(process_logits(processors, text, logits_BLV[row]), self.samplers[row]))
        return mx.stack(chosen)

    def _begin(self, row: int) -> None:
        """The row has joined: its stops hold for what follows."""
        self._matchers[row] = self.stop_sequences[row].matcher()

    def _until_end(self, row: int, tokens: list[int]) -> tuple[list[int], str | None]:
        """The tokens up to where the row ends, and why it ends there."""
        for count, token in enumerate(tokens, start=1):
            self._num_tokens[row] += 1
            if self._matchers[row].advance(token):
                return tokens[:count], "stop"
            if self._num_tokens[row] >= self.max_tokens[row]:
                return tokens[:count], "length"
        return tokens, None

    def _ends_with(self, row: int, token: int) -> str | None:
        """Why the row ends with ``token``, its next one; then no pass has to read it."""
        if copy.copy(self._matchers[row]).advance(token):
            return "stop"
        return "length" if self._num_tokens[row] + 1 >= self.max_tokens[row] else None

    def _keep(self, kept: list[int], inputs_BL: mx.array, features_BLF: mx.array, target_pass: Any) -> None:
        """Bring both models' caches to the first ``kept[row]`` inputs of each row, and the rows' texts too."""
        target_pass.keep(kept)
        self.model.drafter.extend_rows(features_BLF, self._layers()[1], inputs_BL, kept)
        for row, (inputs, count) in enumerate(zip(cast(list[Any], inputs_BL.tolist()), kept, strict=True)):
            self.tokens[row] += inputs[:count]
            if self.logits_processors[row]:  # plain steps show it to them
                self._token_context[row] = TokenBuffer(self.tokens[row])

    def _error(self, row: int, tokens: Sequence[int] = ()) -> Exception | None:
        """What is wrong with a row that would answer ``tokens``."""
        for part in (self.samplers[row], *self.logits_processors[row]):
            if isinstance(part, Guarded) and part.error is not None:
                return part.error
        try:
            check_committed(self.model.target, tokens)
        except GenerationError as error:
            return error
        return None

    def _answer(self, blocks: list[Block], reasons: list[str | None], errors: list[Exception | None]) -> list[RowBlock]:
        """The blocks of the rows that answer; those that end leave the batch with their caches."""
        answers, left = [], []
        for row, (uid, block, reason, error) in enumerate(zip(self.uids, blocks, reasons, errors, strict=True)):
            if error is not None:
                answers.append(_failed(uid, error))
            elif reason is not None:
                answers.append(RowBlock(uid, block, reason, self.extract_cache(row), self.tokens[row]))
            else:
                left.append(row)
                if block.tokens:
                    answers.append(RowBlock(uid, block))
        if len(left) < len(self.uids):
            self.filter(left)
        return answers

    def _plain_step(self) -> list[RowBlock]:
        """mlx-lm's own step, one token a row. The drafter's context gets several steps' tokens at once, later."""
        started, rows, self.model.waiting = self.model.clock(), len(self.uids), self._waiting
        joining = {uid for uid, answered in zip(self.uids, self._num_tokens, strict=True) if answered == JOINING}
        try:
            answers = [a for a in super().next() if a.uid not in joining]
            if self.model.reads_prompts:  # while they are read this step's pass ends, and the next one would seem short
                mx.eval(self._next_tokens)
        finally:
            self.model.waiting = None
        for row, uid in enumerate(self.uids):
            if uid in joining:
                self._begin(row)
        if answers:
            seconds = self.model.clock() - started
            self.model.policy.observe(BlockRecord(0, 0, 0, 0, None, seconds, asleep=True, rows=rows))
        if len(self._waiting) >= WAITING:
            self._settle()
        found = []
        for a in answers:
            # NaN stays NaN, so its last step tells of it; a look at every step would make the host wait.
            nan = a.finish_reason and a.logprobs is not None and mx.isnan(a.logprobs[0]).item()
            block = Block([], [a.token], 0, asleep=True)
            found.append(
                _failed(a.uid, not_a_number())
                if nan
                else RowBlock(a.uid, block, a.finish_reason, a.prompt_cache, a.all_tokens)
            )
        return found

    def _settle(self) -> None:
        """Give the drafter the tokens of the plain steps. Called before a block, and before rows change."""
        if self._waiting:
            features, tokens = (mx.concatenate(list(steps), axis=1) for steps in zip(*self._waiting, strict=True))
            self._waiting.clear()
            self.model.drafter.extend_rows(features, self._layers()[1], tokens)

    def _layers(self) -> tuple[list[Any], list[Any]]:
        """The target's caches and the drafter's."""
        return self.prompt_cache[: self.model.target_layers], self.prompt_cache[self.model.target_layers :]

    def _embeddable(self, drafts_BK: mx.array) -> mx.array:
        """Ids are checked once they are known. Until then none may index outside the embedding."""
        return mx.clip(drafts_BK, 0, self.model.target.vocab_size - 1).astype(mx.uint32)

    def extend(self, batch: GenerationBatch) -> None:
        """Take in the rows of another batch."""
        self._settle()
        super().extend(batch)

    def filter(self, keep: list[int]) -> None:
        """Keep these rows."""
        self._settle()
        super().filter(keep)

    def extract_cache(self, idx: int) -> list[Any]:
        """The caches of one row, as it would have them alone."""
        self._settle()
        return super().extract_cache(idx)


def _failed(uid: int, error: Exception) -> RowBlock:
    return RowBlock(uid, Block([], [], 0), "error", error=error)


def _choose(logits_NV: mx.array, sampler: Sampler) -> mx.array:
    """:func:`sample_target`, without the random states that one text alone returns to."""
    if not isinstance(sampler, DrawingSampler):
        return sample_target(logits_NV, sampler)
    total_N1 = mx.logsumexp(logits_NV, axis=-1, keepdims=True)
    return mx.where(mx.isnan(total_N1[:, 0]), NO_TOKEN, sampler(logits_NV - total_N1).astype(mx.int32))


def _record(blocks: Sequence[Block], drafted: int, verified: int, seconds: float) -> BlockRecord:
    """The rows' blocks as one: its drafts were right in the share of rows in which those before were."""
    right, tried = [0] * verified, [0] * verified
    answered = [block for block in blocks if block.tokens]
    for block in answered:
        for i in range(min(block.accepted + 1, len(block.drafted))):
            tried[i] += 1
            right[i] += i < block.accepted
    accepted = [block.accepted for block in answered]
    return BlockRecord(
        drafted=drafted,
        verified=verified,
        accepted=max(accepted),
        matched=min(accepted),
        confidence=None,
        seconds=seconds,
        outcomes={i: r / t for i, (r, t) in enumerate(zip(right, tried, strict=True)) if t},
        rows=len(blocks),
    )
