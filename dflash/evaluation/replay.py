"""Drafters scored on finished texts: the blocks that decoding would verify, found without decoding.

At temperature 0 the text does not depend on the drafter, and a block depends on the text before its anchor only. So a
text is read once for features, and each drafter is asked for the blocks of the walk that decoding takes when every
draft is verified (policy ``full``): from an anchor over the drafts that are the text's to the token after them. Or it
is asked for the block after every token, which says more of a drafter than the walk, whose anchors follow surprises.

Shapes: S tokens, F features, A anchors, L drafts.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from sys import maxsize
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import wired_limit

from ..drafters.autoregressive import agreeing
from ..drafters.blocks import draft_hidden
from ..drafters.dflash import DFlashDraftModel
from ..drafters.protocol import Drafter, Proposal
from ..drafters.rows import TextByText, drafts_of_row, for_batches
from ..generate import DFlashSpeculativeDecoder
from ..target import LoadedTargetModel
from .acceptance import Acceptance, Drafted, counts, judged
from .features import Features
from .texts import Text

_TEXTS = 16  # held at a time
_ANCHORS = 64  # blocks of one pass over a text


def measure_on(
    target: LoadedTargetModel, drafters: Sequence[Drafter], texts: Iterable[Text], features: Features | None = None
) -> Iterator[list[Acceptance]]:
    """For each text the counts of each drafter: those that ``acceptance.measure_one`` finds by decoding."""
    decoders = [DFlashSpeculativeDecoder(target, drafter, max_seq_length=maxsize) for drafter in drafters]
    for found in replay(decoders, texts, features=features):
        yield [counts(blocks, decoder.block_size) for blocks, decoder in zip(found, decoders, strict=True)]


def replay(
    decoders: Sequence[DFlashSpeculativeDecoder],
    texts: Iterable[Text],
    every_anchor: bool = False,
    features: Features | None = None,
) -> Iterator[list[list[Drafted]]]:
    """For each text, the blocks of each decoder's drafter: those of the walk, or after every token but the last.

    The decoders share a target, which reads a text once for all, or not at all if ``features`` have it from another
    call. With ``every_anchor`` there are probabilities too.

    Raises ``GenerationError`` for what a drafter returns that cannot be verified.
    """
    target = decoders[0].loaded_target
    layer_ids = sorted({i for decoder in decoders for i in decoder.draft_model.target_layer_ids})
    features = features or Features(most_bytes=0)
    with wired_limit(target.model):
        for group in _groups(texts):
            whole = [features.of(target, text, layer_ids) for text in group]
            found = []
            for decoder in decoders:
                layers = [layer_ids.index(i) for i in decoder.draft_model.target_layer_ids]
                own = [_columns(each, layers, len(layer_ids)) for each in whole]
                found.append((_every if every_anchor else _walk)(decoder, group, own))
            yield from map(list, zip(*found, strict=True))


def _groups(texts: Iterable[Text]) -> Iterator[list[Text]]:
    waiting = iter(texts)
    while group := list(islice(waiting, _TEXTS)):
        yield group


def _columns(features: mx.array, layers: list[int], count: int) -> mx.array:
    """The features of some of ``count`` layers, in this order."""
    if layers == list(range(count)):
        return features
    parts = mx.split(features, count, axis=-1)
    return mx.concatenate([parts[i] for i in layers], axis=-1) if layers else features[..., :0]


def _walk(
    decoder: DFlashSpeculativeDecoder, texts: Sequence[Text], features: Sequence[mx.array]
) -> list[list[Drafted]]:
    """The blocks that decoding verifies in each text: a pass of the drafter over the present ones of all at a time."""
    drafter, vocab_size = for_batches(decoder.draft_model), decoder.loaded_target.vocab_size
    # An elastic drafter's tokens depend on their number, and what drafts text by text may learn from one for the next.
    elastic = isinstance(drafter, DFlashDraftModel) and drafter.config.elastic_blocks
    if len(texts) > 1 and (elastic or isinstance(drafter, TextByText)):
        return [_walk(decoder, [text], [own])[0] for text, own in zip(texts, features, strict=True)]
    ids = [mx.array([text.tokens], mx.uint32) for text in texts]
    layers: list[Any] = []
    for text, tokens_1S, own in zip(texts, ids, features, strict=True):
        alone, prompt = [layer.merge([layer]) for layer in drafter.make_layers()], len(text.prompt)
        drafter.extend_rows(own[:, :prompt], alone, tokens_1S[:, :prompt])
        mx.eval([layer.state for layer in alone])
        for layer, other in zip(layers, alone, strict=False):
            layer.extend(other)
        layers = layers or alone
    rows, at, found = list(range(len(texts))), [0] * len(texts), [list[Drafted]() for _ in texts]
    while left := [i for i, row in enumerate(rows) if at[row] + 1 < len(texts[row].answer)]:
        if len(left) < len(rows):
            rows = [rows[i] for i in left]
            for layer in layers:
                layer.filter(left)
        starts = [len(texts[row].prompt) + at[row] for row in rows]
        lengths = [min(decoder.block_size, texts[row].max_tokens - at[row] - 1) - 1 for row in rows]
        drafts: Any = [[]] * len(rows)
        if max(lengths):
            anchors_B = _spans(ids, rows, starts, 1)[:, 0]
            drafts = drafter.propose_rows(anchors_B, max(lengths), layers).tokens.tolist()
        counts = []
        for row, length, drafted in zip(rows, lengths, drafts, strict=True):
            known = drafts_of_row(drafter, drafted[:length], vocab_size)
            found[row].append(block := judged(texts[row].answer, texts[row].ended, at[row], known))
            counts.append(block.committed)
            at[row] += block.committed
        new, tokens = (_spans(arrays, rows, starts, max(counts)) for arrays in (features, ids))
        drafter.extend_rows(new, layers, tokens, counts)
    return found


def _spans(arrays: Sequence[mx.array], rows: Sequence[int], starts: Sequence[int], length: int) -> mx.array:
    """``length`` entries of each of the ``rows`` from its start on, with zeros after its end: ``[B, length, ..]``."""
    parts = [arrays[row][:, start : start + length] for row, start in zip(rows, starts, strict=True)]
    widths = [[(0, 0), (0, length - part.shape[1]), (0, 0)][: part.ndim] for part in parts]
    return mx.concatenate([mx.pad(part, width) for part, width in zip(parts, widths, strict=True)])


def _every(
    decoder: DFlashSpeculativeDecoder, texts: Sequence[Text], features: Sequence[mx.array]
) -> list[list[Drafted]]:
    """The blocks after every token but the last; drafts after the text's end do not count."""
    drafter, length, found = decoder.draft_model, decoder.block_size - 1, []
    for text, own in zip(texts, features, strict=True):
        if isinstance(drafter, DFlashDraftModel) and for_batches(drafter) is drafter and not _limited(drafter):
            proposals = _in_passes(drafter, text, own, length)
        else:
            proposals = _one_by_one(drafter, text, own, length)
        blocks = []
        for at, proposal in enumerate(proposals):
            chances, rest = proposal.acceptance_chances(), text.answer[at + 1 :]
            mx.eval(proposal.tokens, chances)
            drafted: Any = proposal.tokens[0].tolist()
            right, verified = agreeing(drafted, rest), min(len(drafted), len(rest))
            stated: Any = None if chances is None else chances[:verified].tolist()
            blocks.append(Drafted(at, len(drafted), verified, right, min(right + 1, len(rest)), stated))
        found.append(blocks)
    return found


def _in_passes(drafter: DFlashDraftModel, text: Text, features: mx.array, length: int) -> Iterator[Proposal]:
    """The blocks after every token but the last, many to a pass."""
    tokens_1S, first = mx.array([text.tokens]), 0 if drafter.config.sample_from_anchor else 1
    filled = length if drafter.config.elastic_blocks else drafter.block_size - 1
    anchors = np.arange(len(text.prompt), len(text.tokens) - 1)
    for start in range(0, len(anchors), _ANCHORS):
        anchors_A = mx.array(anchors[start : start + _ANCHORS])
        hidden_ALE = draft_hidden(drafter, features, tokens_1S, anchors_A[None], filled)[0, :, first : first + length]
        proposal = drafter.proposal(tokens_1S[0, anchors_A], hidden_ALE)
        mx.eval(proposal.tokens, proposal.logits, proposal.candidates, proposal.confidence)
        yield from map(proposal.row, range(anchors_A.size))


def _limited(drafter: DFlashDraftModel) -> bool:
    """Whether full attention sees only the newest tokens (``limit_context``), which passes over a text cannot show."""
    layers = enumerate(drafter.make_cache().layers)
    return any(layer.limit is not None and drafter.config.window(i) is None for i, layer in layers)


def _one_by_one(drafter: Drafter, text: Text, features: mx.array, length: int) -> Iterator[Proposal]:
    tokens_1S, cache, held = mx.array([text.tokens], mx.uint32), drafter.make_cache(), 0
    for anchor in range(len(text.prompt), len(text.tokens) - 1):
        drafter.extend_context(features[:, held:anchor], cache, tokens_1S[:, held:anchor])
        yield drafter.propose(tokens_1S[:, anchor : anchor + 1], length, cache)
        held = anchor
