"""Whether a drafter of the package and its reference agree: the same weights, prompts, acceptance and tokens."""

from dataclasses import asdict
from itertools import product
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest

from dflash import DFlashSpeculativeDecoder, LoadedTargetModel, Proposal
from dflash.core.files import flat
from dflash.decoding.sampling import DrawingSampler
from dflash.decoding.speculative import speculative_sampling
from dflash.decoding.verify import sample_target

from . import reference
from .kinds import random_drafter
from .models import qwen3_model
from .reference_kinds import DENSE
from .statistics import chi_square_limit


class Pair(NamedTuple):
    """The same target and drafter twice: for the package and for the reference."""

    target: LoadedTargetModel
    drafter: Any
    dense_target: reference.DenseTarget
    dense: reference.DenseDrafter


def pair_of(kind: str, seed: int, vocab: int = 24, target_changes: dict[str, Any] | None = None, **changes) -> Pair:
    """A random drafter, bound to a target, and its reference; even seeds tie the target's head."""
    drafter = random_drafter(kind, seed, vocab, **changes)
    model = qwen3_model(seed, vocab, tied=seed % 2 == 0, **target_changes or {})
    target = LoadedTargetModel(model)
    drafter.bind(target)
    dense_target = reference.DenseTarget(numpy_weights(model), asdict(model.args))
    return Pair(target, drafter, dense_target, dense_of(kind, drafter, dense_target))


def dense_of(kind: str, drafter, dense_target: reference.DenseTarget) -> reference.DenseDrafter:
    """The reference with the weights of ``drafter``."""
    known = None if drafter.token_ids is None else drafter.token_ids.tolist()
    return DENSE[kind](numpy_weights(drafter), asdict(drafter.config), dense_target, known)


def numpy_weights(model) -> dict[str, np.ndarray]:
    return {name: np.array(w).astype(np.float64) for name, w in flat(model.parameters()).items()}


def prompt_of(length: int, vocab: int) -> list[int]:
    return np.random.default_rng(length).integers(0, vocab, length).tolist()


def features_of(dense_target, drafter, tokens: list[int]) -> np.ndarray:
    """The reference's features ``[L, F]`` of ``tokens``."""
    outputs = dense_target(tokens)[1]
    return np.concatenate([outputs[i] for i in drafter.target_layer_ids], axis=-1)


def feed_in_pieces(target: LoadedTargetModel, drafter, tokens: list[int]) -> Any:
    """The drafter's cache after ``tokens``, which arrive in uneven pieces, with proposals in between."""
    caches, cache = target.make_cache(), drafter.make_cache()
    for start, stop in zip([0, 1, 4, 5, 20], [1, 4, 5, 20, 99], strict=True):
        piece = mx.array([tokens[start:stop]])
        if piece.size:
            _, features = target.forward_with_hidden_states(piece, caches, drafter.target_layer_ids)
            drafter.extend_context(features, cache, piece)
            drafter.propose(mx.array([[3]]), 2, cache)  # must leave no trace
    return cache


def context_of(pair: Pair, length: int) -> tuple[np.ndarray, Any]:
    """The reference's features of a prompt and the drafter's cache after it, fed in pieces."""
    tokens = prompt_of(length, pair.target.vocab_size)
    return features_of(pair.dense_target, pair.drafter, tokens), feed_in_pieces(pair.target, pair.drafter, tokens)


def assert_follows(proposal: Proposal, block: reference.Block, known: list[int] | None, tolerance: float) -> None:
    """Tokens, logits (or candidates and their scores) and confidences are the reference's."""
    logits = np.stack(block.scores or block.logits)
    candidates = block.candidates or (None if known is None else [known] * len(logits))
    assert proposal.tokens[0].tolist() == block.tokens
    assert (None if proposal.candidates is None else proposal.candidates[0].tolist()) == candidates
    logits = logits[:, known] if known is not None and not block.candidates else logits
    np.testing.assert_allclose(np.array(proposal.logits[0]), logits, atol=tolerance, rtol=1e-4)
    if proposal.log_q is not None:
        assert proposal.acceptance_chances() is None, "a confidence would read what was sampled"
        return
    assert (proposal.confidence is None) == (not block.confidence)
    if block.confidence:
        np.testing.assert_allclose(np.array(proposal.confidence[0]), block.confidence, atol=1e-4)


def assert_same_blocks(pair: Pair, prompt: int, count: int, block_size: int | None = None, kinds: int = 3) -> None:
    """``count`` tokens in the reference's blocks, with at least ``kinds`` different lengths among them."""
    target, drafter, dense_target, dense = pair
    tokens, block_size = prompt_of(prompt, target.vocab_size), block_size or drafter.block_size
    expected = reference.decode(dense_target, dense, tokens, count, block_size)
    assert len(set(expected.accepted)) >= kinds, "always right or always wrong; the comparison means nothing"
    assert expected.lead > 2e-4, "a near tie: float32 may fall on its other side"
    steps: list[list[int]] = []
    decoder = DFlashSpeculativeDecoder(target, drafter, block_size=block_size, policy="full")
    ids = decoder.spec_generate(mx.array([tokens]), count, stream_callback=steps.append)
    assert ids[0, len(tokens) :].tolist() == expected.tokens
    assert len(steps[0]) == 1, "the prompt's own pass commits one token"
    assert [len(step) for step in steps[1:]] == expected.accepted


def assert_pairs_are_exact(
    monkeypatch: pytest.MonkeyPatch, target: LoadedTargetModel, drafter, temp: float, flatter: float
) -> None:
    """Speculative sampling, chi-square over all pairs of next tokens, against the target's own probabilities.

    The target's logits are divided by ``flatter``, so that every pair occurs.
    """
    vocab, draws, sampler, anchor = target.vocab_size, 700, DrawingSampler(temp), 2
    prompt, cache = prompt_of(6, vocab), drafter.make_cache()
    _, features = target.forward_with_hidden_states(mx.array([prompt]), None, drafter.target_layer_ids)
    drafter.extend_context(features, cache, mx.array([prompt]))
    hidden = drafter.draft_hidden(mx.array([[anchor]]), 2, cache)
    mx.eval(hidden)  # the layers draw nothing, so once is enough
    monkeypatch.setattr(type(drafter), "draft_hidden", lambda *_: hidden)
    after = {
        drafts: target.forward_with_hidden_states(mx.array([[*prompt, anchor, *drafts]]), None, ())[0][0, -3:] / flatter
        for drafts in product(range(vocab), repeat=2)
    }
    first = reference.softmax(np.array(after[0, 0][0], np.float64) / temp)
    second = np.stack([reference.softmax(np.array(after[t, 0][1], np.float64) / temp) for t in range(vocab)])
    counts, accepted = np.zeros((vocab, vocab)), 0
    mx.random.seed(7)
    for _ in range(draws):
        proposal = drafter.draw(mx.array([[anchor]]), 2, cache, sampler)
        verified = speculative_sampling(proposal, after[tuple(proposal.tokens[0].tolist())], sampler)
        tokens, accepted = verified.tokens, accepted + verified.accepted
        if len(tokens) == 1:  # the next block begins: its first token is the target's too
            tokens = [*tokens, int(sample_target(after[tokens[0], 0][1:2], sampler).item())]
        counts[tokens[0], tokens[1]] += 1
    expected = draws * first[:, None] * second
    assert 0.2 * draws < accepted < 1.8 * draws, "always right or always wrong; the comparison means nothing"
    assert expected.min() > 5
    assert ((counts - expected) ** 2 / expected).sum() < chi_square_limit(vocab**2 - 1)
