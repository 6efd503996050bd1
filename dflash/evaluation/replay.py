"""Drafters scored on finished texts: the blocks that decoding would verify, found without decoding.

At temperature 0 the text does not depend on the drafter, and a block depends on the text before its anchor only. So a
text is read once for features, and each drafter is asked for the blocks of the walk that decoding takes when every
draft is verified (policy ``full``): from an anchor over the drafts that are the text's to the token after them. Or it
is asked for the block after every token, which says more of a drafter than the walk, whose anchors follow surprises.

Shapes: S tokens, F features, A anchors, L drafts.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx_lm.generate import wired_limit

from ..core.errors import GenerationError
from ..decoding.loop import PREFILL_STEP_SIZE
from ..drafters.autoregressive import agreeing
from ..drafters.blocks import draft_hidden
from ..drafters.checks import check_drafted, proposed_tokens
from ..drafters.dflash import DFlashDraftModel
from ..generate import DFlashSpeculativeDecoder
from ..target import LoadedTargetModel
from .acceptance import Acceptance
from .texts import Text

_ANCHORS = 64  # blocks of one pass over a text


@dataclass(frozen=True)
class Drafted:
    """The block after one token of an answer.

    Args:
        at: The anchor's number in the answer, from 0.
        verified: Drafts that count: all, but none after a stop token.
        right: Leading drafts that are the text's.
        committed: Tokens of the text that the block would commit.
        chances: The drafter's own acceptance probability of each draft, if it was asked for and has some.
    """

    at: int
    verified: int
    right: int
    committed: int
    chances: list[float] | None = None


def counts(blocks: Iterable[Drafted], block_size: int) -> Acceptance:
    """Counts as those of decoding; ``block_size - 1`` positions."""
    committed, found = 0, list(blocks)
    verified, accepted = (np.zeros(block_size - 1, dtype=np.int64) for _ in range(2))
    for block in found:
        committed += block.committed
        verified[: block.verified] += 1
        accepted[: block.right] += 1
    return Acceptance(len(found), committed, verified, accepted)


def replay(
    decoders: Sequence[DFlashSpeculativeDecoder], texts: Iterable[Text], every_anchor: bool = False
) -> Iterator[list[list[Drafted]]]:
    """For each text, the blocks of each decoder's drafter: those of the walk, or after every token but the last.

    The decoders share a target, which reads a text once for all. With ``every_anchor`` there are probabilities too.

    Raises ``GenerationError`` for what a drafter returns that cannot be verified.
    """
    target = decoders[0].loaded_target
    layer_ids = sorted({i for decoder in decoders for i in decoder.draft_model.target_layer_ids})
    with wired_limit(target.model):
        for text in texts:
            features = read(target, text.tokens[:-1], layer_ids)
            found = []
            for decoder in decoders:
                layers = [layer_ids.index(i) for i in decoder.draft_model.target_layer_ids]
                own = _columns(features, layers, len(layer_ids))
                found.append(list((_every if every_anchor else _walk)(decoder, text, own)))
            yield found


def read(target: LoadedTargetModel, tokens: list[int], layer_ids: Sequence[int]) -> mx.array:
    """Features ``[1, S, F]`` of a text, read in chunks as prompts are."""
    if not layer_ids:
        return mx.zeros((1, len(tokens), 0))
    tokens_1S, cache, parts = mx.array([tokens]), target.make_cache(), []
    for start in range(0, len(tokens), PREFILL_STEP_SIZE):
        _, features = target.forward_hidden(tokens_1S[:, start : start + PREFILL_STEP_SIZE], cache, layer_ids)
        mx.eval(features, [layer.state for layer in cache])
        parts.append(features)
    return mx.concatenate(parts, axis=1)


def _columns(features: mx.array, layers: list[int], count: int) -> mx.array:
    """The features of some of ``count`` layers, in this order."""
    if layers == list(range(count)):
        return features
    parts = mx.split(features, count, axis=-1)
    return mx.concatenate([parts[i] for i in layers], axis=-1) if layers else features[..., :0]


def _walk(decoder: DFlashSpeculativeDecoder, text: Text, features: mx.array) -> Iterator[Drafted]:
    """The blocks that decoding verifies."""
    context, at = _Context(decoder, text, features), 0
    while (left := len(text.answer) - at - 1) > 0:
        length = min(decoder.block_size, text.max_tokens - at - 1) - 1
        drafted, _ = context.propose(at, length)
        right = agreeing(drafted, text.answer[at + 1 :])
        committed = min(right + 1, left)
        cut = text.ended and committed == left
        yield Drafted(at, min(committed, len(drafted)) if cut else len(drafted), right, committed)
        at += committed


def _every(decoder: DFlashSpeculativeDecoder, text: Text, features: mx.array) -> Iterator[Drafted]:
    """The blocks after every token but the last; drafts after the text's end do not count."""
    drafter, length = decoder.draft_model, decoder.block_size - 1
    if isinstance(drafter, DFlashDraftModel) and not _limited(drafter):
        rows = _in_passes(drafter, text, features, length)
    else:
        context = _Context(decoder, text, features)
        rows = (context.propose(at, length, chances=True) for at in range(len(text.answer) - 1))
    for at, (drafted, chances) in enumerate(rows):
        rest = text.answer[at + 1 :]
        right, verified = agreeing(drafted, rest), min(len(drafted), len(rest))
        yield Drafted(at, verified, right, min(right + 1, len(rest)), chances and chances[:verified])


def _in_passes(
    drafter: DFlashDraftModel, text: Text, features: mx.array, length: int
) -> Iterator[tuple[list[int], list[float] | None]]:
    """Drafts and probabilities after every token but the last, many blocks to a pass."""
    tokens_1S, first = mx.array([text.tokens]), 0 if drafter.config.sample_from_anchor else 1
    filled = length if drafter.config.elastic_blocks else drafter.block_size - 1
    anchors = np.arange(len(text.prompt), len(text.tokens) - 1)
    for start in range(0, len(anchors), _ANCHORS):
        anchors_A = mx.array(anchors[start : start + _ANCHORS])
        hidden_ALE = draft_hidden(drafter, features, tokens_1S, anchors_A[None], filled)[0, :, first : first + length]
        proposal = drafter.proposal(tokens_1S[0, anchors_A], hidden_ALE)
        chances = [proposal.row(row).acceptance_chances() for row in range(anchors_A.size)]
        mx.eval(proposal.tokens, chances)
        yield from zip(cast("list[list[int]]", proposal.tokens.tolist()), map(_listed, chances), strict=True)


def _limited(drafter: DFlashDraftModel) -> bool:
    """Whether full attention sees only the newest tokens (``limit_context``), which passes over a text cannot show."""
    layers = enumerate(drafter.make_cache().layers)
    return any(layer.limit is not None and drafter.config.window(i) is None for i, layer in layers)


class _Context:
    """A drafter's cache that follows a text."""

    def __init__(self, decoder: DFlashSpeculativeDecoder, text: Text, features: mx.array):
        self._drafter, self._vocab_size = decoder.draft_model, decoder.loaded_target.vocab_size
        self._tokens, self._features, self._prompt = mx.array([text.tokens], mx.uint32), features, len(text.prompt)
        self._cache, self._held = self._drafter.make_cache(), 0

    def propose(self, at: int, length: int, chances: bool = False) -> tuple[list[int], list[float] | None]:
        """Drafts, and if asked for their probabilities, after the answer's token ``at``; later than the last call's."""
        anchor = self._prompt + at
        while self._held < anchor:
            new = slice(self._held, min(self._held + PREFILL_STEP_SIZE, anchor))
            self._drafter.extend_context(self._features[:, new], self._cache, self._tokens[:, new])
            self._held = new.stop
        if length < 1:
            return [], None
        proposal = self._drafter.propose(self._tokens[:, anchor : anchor + 1], length, self._cache)
        tokens = proposed_tokens(self._drafter, proposal, length)
        if proposal.parents is not None:
            raise GenerationError(f"{type(self._drafter).__name__} drafts trees, which need decoding (--decode).")
        found = proposal.acceptance_chances() if chances else None
        mx.eval(tokens, found)
        drafted: Any = tokens.tolist()
        check_drafted(self._drafter, drafted[0], self._vocab_size)
        return drafted[0], _listed(found)


def _listed(array: mx.array | None) -> list[float] | None:
    return None if array is None else cast("list[float]", array.tolist())
