"""DFlash writes what the target writes: the same tokens, greedily, and the same distribution, sampled.

The properties drive ``prefill`` and ``decode_block`` directly, so that both caches can be looked at after every
block: they must equal caches which were fed the committed tokens only.
"""

import itertools
from collections import Counter

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.models import (
    ScriptedCache,
    ScriptedDrafter,
    bound_drafter,
    plain_greedy,
    qwen3_model,
    random_drafter,
    target,
)
from support.statistics import chi_square, chi_square_limit

from dflash import DFlashSpeculativeDecoder, LoadedTargetModel, Proposal
from dflash.decoding.block import DecodeState, Decoding
from dflash.decoding.loop import decode, decode_block, prefill
from dflash.decoding.sampling import DrawingSampler
from dflash.decoding.speculative import speculative_sampling
from dflash.drafters.context import ContextCache
from dflash.drafters.protocol import Drafter
from dflash.target.compare import assert_same_caches

VOCAB = 32
# Blocks and single tokens are summed in different orders. A best token that leads by less than this may
# lose its lead to rounding, in plain decoding with another prefill chunk too; such examples say nothing.
NEAR_TIE = 1e-4

KINDS = st.sampled_from(["qwen3", "llama", "sliding"])
SEEDS = st.integers(0, 5)
PROMPTS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40)
LENGTHS = st.integers(1, 32)
BLOCK_SIZES = st.integers(1, 16)
RIGHT = st.sampled_from([0.0, 0.3, 0.7, 0.9, 1.0, None])
"""How often a scripted drafter is right; ``None`` for a real one with random weights."""


def plain(kind: str, seed: int, prompt: list[int], max_tokens: int) -> list[int]:
    tokens, lead = plain_greedy(target(kind, seed).model, prompt, max_tokens)
    assume(lead > NEAR_TIE)
    return tokens


def drafter_that_is(right: float | None, kind: str, seed: int, text: list[int], **options) -> Drafter:
    return bound_drafter(kind, seed) if right is None else ScriptedDrafter(text, VOCAB, right, seed=seed, **options)


def assert_caches_hold_committed_tokens_only(loaded: LoadedTargetModel, drafter: Drafter, state: DecodeState) -> None:
    """Compare both caches with ones that were fed everything but the anchor at once, in a plain pass."""
    committed = mx.array([state.tokens[:-1]])
    fresh = loaded.make_cache()
    _, features = loaded.forward_with_hidden_states(committed, fresh, drafter.target_layer_ids)
    assert_same_caches(state.target_cache, fresh)
    assert state.draft_cache.offset == committed.shape[1]
    if isinstance(state.draft_cache, ContextCache):
        fresh_context = drafter.make_cache()
        drafter.extend_context(features, fresh_context, committed)
        for layer, fresh_layer in zip(state.draft_cache.layers, fresh_context.layers, strict=True):
            for ours, fresh_rows in zip(layer.state, fresh_layer.state, strict=True):
                np.testing.assert_allclose(ours, fresh_rows, atol=1e-4, rtol=1e-4)
    if isinstance(state.draft_cache, ScriptedCache):
        assert state.draft_cache.tokens == state.tokens[:-1]
        told = np.array(mx.concatenate(state.draft_cache.features, axis=1))
        np.testing.assert_allclose(told, np.array(features), atol=1e-3, rtol=1e-3)


def run_and_check_every_block(loaded, drafter, prompt: list[int], max_tokens: int, block_size: int) -> DecodeState:
    run = Decoding(loaded, drafter)
    state = prefill(run, prompt)
    assert_caches_hold_committed_tokens_only(loaded, drafter, state)
    for block in decode(run, state, max_tokens, block_size):
        assert 1 <= len(block.tokens) <= block_size
        assert block.tokens[:-1] == block.drafted[: block.accepted]
        assert block.accepted == len(block.drafted) or block.tokens[-1] != block.drafted[block.accepted]
        assert state.tokens[-len(block.tokens) :] == block.tokens
        assert_caches_hold_committed_tokens_only(loaded, drafter, state)
    return state


@settings(max_examples=45)
@given(KINDS, SEEDS, PROMPTS, LENGTHS, BLOCK_SIZES, RIGHT)
def test_tokens_and_caches_equal_plain_decoding_for_drafters_of_any_skill(
    kind, seed, prompt, max_tokens, block_size, right
):
    expected = plain(kind, seed, prompt, max_tokens)
    drafter = drafter_that_is(right, kind, seed, prompt + expected, layer_ids=(0, 2))
    state = run_and_check_every_block(target(kind, seed), drafter, prompt, max_tokens, block_size)
    assert state.tokens == prompt + expected


@settings(max_examples=20)
@given(KINDS, SEEDS, PROMPTS, LENGTHS, BLOCK_SIZES, RIGHT, st.sets(st.integers(0, VOCAB - 1), max_size=4))
def test_tokens_end_at_the_first_stop_token_wherever_it_falls(kind, seed, prompt, max_tokens, block_size, right, stops):
    expected = plain(kind, seed, prompt, max_tokens)
    end = next((i + 1 for i, token in enumerate(expected) if token in stops), len(expected))
    drafter = drafter_that_is(right, kind, seed, prompt + expected)
    decoder = DFlashSpeculativeDecoder(target(kind, seed), drafter, block_size=block_size)
    steps: list[list[int]] = []
    ids = decoder.spec_generate(mx.array([prompt]), max_tokens, stop_token_ids=stops, stream_callback=steps.append)
    assert ids.tolist() == [prompt + expected[:end]]
    assert [t for step in steps for t in step] == expected[:end]


def test_a_drafter_that_is_always_right_fills_blocks_and_one_that_is_wrong_never_slows_to_zero():
    """Else every property above could hold with nothing ever accepted."""
    kind = "sliding"
    prompt, count = [3, 1, 4, 1, 5], 49
    expected, lead = plain_greedy(target(kind, 3).model, prompt, count)
    assert lead > NEAR_TIE
    accepted = {}
    for right in (1.0, 0.0):
        drafter = ScriptedDrafter(prompt + expected, VOCAB, right)
        state = prefill(Decoding(target(kind, 3), drafter), prompt)
        blocks = list(decode(Decoding(target(kind, 3), drafter), state, count, 16))
        accepted[right] = [len(block.tokens) for block in blocks]
    assert accepted == {1.0: [16, 16, 16], 0.0: [1] * 48}


def test_no_more_tokens_are_drafted_than_may_be_committed():
    prompt, count = [3, 1, 4], 20
    expected, _ = plain_greedy(target("qwen3", 3).model, prompt, count)
    drafter = ScriptedDrafter(prompt + expected, VOCAB)
    state = prefill(Decoding(target("qwen3", 3), drafter), prompt)
    list(decode(Decoding(target("qwen3", 3), drafter), state, count, 8))
    assert len(state.tokens) == len(prompt) + count
    assert drafter.asked == [7, 7, 2]  # 1 from the prompt, 8, 8, 3


@settings(max_examples=20)
@given(KINDS, SEEDS, PROMPTS, st.integers(1, 41), RIGHT)
def test_chunked_prefill_equals_prefill_at_once(kind, seed, prompt, step_size, right):
    plain(kind, seed, prompt, 1)
    drafter = drafter_that_is(right, kind, seed, prompt, layer_ids=(1, 3))
    whole = prefill(Decoding(target(kind, seed), drafter), prompt)
    chunked = prefill(Decoding(target(kind, seed), drafter), prompt, step_size=step_size)
    assert chunked.tokens == whole.tokens
    assert len(whole.tokens) == whole.prompt_length + 1 == len(prompt) + 1
    assert_caches_hold_committed_tokens_only(target(kind, seed), drafter, chunked)


def test_a_prefill_holds_no_more_than_its_pass_the_caches_and_one_chunk_of_features():
    """Peaks of whole passes vary with threads, so memory is read where the drafter gets the features."""
    loaded, chunk = LoadedTargetModel(qwen3_model(0, max_position_embeddings=4096)), 256
    drafter = random_drafter(0, num_key_value_heads=1, target_layer_ids=(0, 1, 2, 3))
    drafter.bind(loaded)
    caches, extend_context = (loaded.make_cache(), drafter.make_cache()), drafter.extend_context
    held, joined = [], []

    def measured(features: mx.array, *rest) -> None:
        mx.synchronize()
        before = mx.get_active_memory()
        of_caches = sum(c.nbytes for c in (*caches[0], *caches[1].layers))
        held.append((before - began - of_caches) / features.nbytes)
        mx.reset_peak_memory()
        mx.eval(features)
        joined.append((mx.get_peak_memory() - before) / features.nbytes)
        extend_context(features, *rest)

    drafter.extend_context = measured
    mx.synchronize()
    mx.clear_cache()
    began = mx.get_active_memory()
    prefill(Decoding(loaded, drafter), [1] * 4 * chunk, chunk, *caches)
    assert len(held) == 4
    assert max(held) < 1.3  # with the final hidden states, which plain decoding has too
    assert max(joined) < 1.05


def test_a_token_equal_to_the_mask_is_legitimate_output():
    """The mask id is an ordinary row of the vocabulary; what the target chose is what is written."""
    prompt, count = [3, 1, 4, 1, 5], 40
    expected, lead = plain_greedy(target("llama", 1).model, prompt, count)
    assert lead > NEAR_TIE
    mask = Counter(expected).most_common(1)[0][0]
    assert expected.count(mask) > 2
    drafter = random_drafter(1, VOCAB, mask_token_id=mask)
    decoder = DFlashSpeculativeDecoder(target("llama", 1), drafter, policy="full")
    assert decoder.spec_generate(mx.array([prompt]), count).tolist() == [prompt + expected]


@pytest.mark.parametrize(("count", "dtype"), [(0, mx.int64), (1, mx.uint8), (5, mx.uint32)])
def test_fewer_proposals_than_asked_for_in_any_integer_type_are_taken(count, dtype):
    prompt = [3, 1, 4]
    expected, _ = plain_greedy(target("qwen3", 3).model, prompt, 30)

    class Short(ScriptedDrafter):
        def propose(self, anchor, length, cache):
            return Proposal(super().propose(anchor, length, cache).tokens[:, :count].astype(dtype))

    drafter = Short(prompt + expected, VOCAB)
    state = prefill(Decoding(target("qwen3", 3), drafter), prompt)
    blocks = list(decode(Decoding(target("qwen3", 3), drafter), state, 30, 16))
    assert state.tokens == prompt + expected
    assert [block.accepted for block in blocks[:4]] == [count] * 4
    assert_caches_hold_committed_tokens_only(target("qwen3", 3), drafter, state)


# --- sampling ---------------------------------------------------------------------------------------------

FEW = 6  # tokens of vocabulary, so that all sequences of three can be counted


def exact_probabilities(loaded: LoadedTargetModel, prompt: list[int], temperature: float) -> dict[tuple, float]:
    """Probability of every continuation of three tokens, by the chain rule on plain forward passes."""
    prefixes = list(itertools.product(range(FEW), repeat=2))
    logits = loaded.model(mx.array([[*prompt, *prefix] for prefix in prefixes]))[:, -3:]
    p = np.array(mx.softmax(logits / temperature, axis=-1), np.float64)
    return {
        (*prefix, last): p[i, 0, prefix[0]] * p[i, 1, prefix[1]] * p[i, 2, last]
        for i, prefix in enumerate(prefixes)
        for last in range(FEW)
    }


def sampled_triples(loaded, drafter, prompt: list[int], temperature: float, draws: int) -> Counter:
    run, counts = Decoding(loaded, drafter, DrawingSampler(temperature), speculative_sampling), Counter()
    for _ in range(draws):
        state = prefill(run, prompt)
        while len(state.tokens) < len(prompt) + 3:
            decode_block(run, state, 2)
        counts[tuple(state.tokens[len(prompt) :][:3])] += 1
    return counts


def test_sampled_tokens_are_distributed_as_the_target_samples():
    """By the rule that draws the drafts; first mismatch writes plain decoding's text for a seed (``test_seed.py``)."""
    loaded = LoadedTargetModel(qwen3_model(2, FEW, layers=1, tied=False))
    loaded.model.lm_head.weight = loaded.model.lm_head.weight * 0.4  # no token is out of reach
    prompt, draws = [1, 4], 400
    probabilities = exact_probabilities(loaded, prompt, 1.0)
    assert sum(probabilities.values()) == pytest.approx(1, abs=1e-5)
    # Its distribution is far from the target's: drafts that are accepted too often show.
    drafter = random_drafter(3, FEW, num_hidden_layers=1, num_target_layers=1, target_layer_ids=(0,))
    drafter.bind(loaded)
    mx.random.seed(11)
    counts = sampled_triples(loaded, drafter, prompt, 1.0, draws)
    statistic, freedom = chi_square(counts, probabilities, draws)
    assert freedom >= 10, "the target is too certain for this to be a test of sampling"
    assert statistic < chi_square_limit(freedom)
    # The test can fail: against the distribution at another temperature the same counts are far off.
    other, other_freedom = chi_square(counts, exact_probabilities(loaded, prompt, 1.4), draws)
    assert other > chi_square_limit(other_freedom)
