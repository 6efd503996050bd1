"""Trees of drafts: the best paths are found, their rows are those of the paths alone, and the text stays plain."""

import itertools
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from support.errors import refused
from support.models import ScriptedDrafter, llama_model, plain_greedy, qwen3_model, target

from dflash import DFlashSpeculativeDecoder, LoadedTargetModel, Proposal
from dflash.adapters.conformance import small_models as small
from dflash.core.errors import DFlashError
from dflash.core.trees import best_first, chain, outcomes, rows_before, walk
from dflash.decoding.block import Decoding
from dflash.decoding.loop import decode, prefill
from dflash.drafters.tree import MOST, TreeDrafter, likeliest
from dflash.policies.adaptive import Adaptive
from dflash.policies.base import BlockRecord, Drafts
from dflash.target import tree as tree_pass
from dflash.target.compare import Mismatch, assert_same_caches
from dflash.target.rewind import MOVES
from dflash.target.trial import Trial, tree_equals_its_paths

VOCAB, PROMPT = 32, [3, 1, 4, 1, 5]


# --- which tree ------------------------------------------------------------------------------------------


def test_the_best_tree_holds_the_likeliest_paths_and_so_does_each_beginning_of_it():
    scores = np.random.default_rng(0).normal(size=(4, 3)) * 2
    log_p = -np.sort(-(scores - np.log(np.exp(scores).sum(-1, keepdims=True))), axis=-1)
    tree = best_first(np.arange(12).reshape(4, 3), log_p, 40)
    ranks = [ranks for depth in range(1, 5) for ranks in itertools.product(range(3), repeat=depth)]
    brute = sorted((float(sum(log_p[d, r] for d, r in enumerate(path))) for path in ranks), reverse=True)[:40]
    ways = [[row - 1 for row in rows[1:]] for rows in rows_before(tree.parents)[1:]]
    ours = [sum(np.log(tree.chances[node]) for node in way) for way in ways]
    np.testing.assert_allclose(ours, brute, rtol=1e-5)
    assert len({tuple(tree.tokens[node] for node in way) for way in ways}) == 40, "no path twice"
    assert all(tree.depths[node] == depth for way in ways for depth, node in enumerate(way))
    certain = np.array([[0.0, -np.inf]] * 5)
    assert best_first(np.zeros((5, 2), int), certain, 9).parents == chain(5), "what cannot be is no node"


def test_the_walk_follows_the_target_and_tells_what_became_known():
    tokens, parents = [7, 8, 9, 7, 5], [-1, -1, 0, 1, 3]
    after = {-1: 8, 1: 7, 3: 6, 0: 1}
    assert walk(tokens, parents, after.__getitem__) == ([1, 3], [8, 7, 6])
    assert outcomes(tokens, parents, [8, 7, 6]) == {0: False, 1: True, 3: True, 4: False}
    assert outcomes([4, 5, 6], chain(3), [4, 5]) == {0: True, 1: True}, "nothing is known of the third"


def test_likeliest_tokens_of_sparse_logits_are_their_candidates():
    logits = mx.random.normal((1, 5, 9), key=mx.random.key(0))
    candidates = mx.argsort(mx.random.normal((1, 5, 9), key=mx.random.key(1)), axis=-1)
    ids, log_p = likeliest(Proposal(mx.zeros((1, 5), mx.int32), logits, candidates), 4)
    order = np.argsort(-np.array(logits[0]), axis=-1)[:, :4]
    np.testing.assert_array_equal(ids, np.take_along_axis(np.array(candidates[0]), order, axis=-1))
    expected = np.array(logits[0] - mx.logsumexp(logits[0], axis=-1, keepdims=True))
    np.testing.assert_allclose(log_p, np.take_along_axis(expected, order, axis=-1), rtol=1e-5)


# --- one pass over it ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options"), [("qwen3", {}), ("deepseek_v3", {}), ("qwen3", {"kv_bits": 8, "kv_group_size": 32})]
)
def test_every_row_is_that_of_its_path(name, options):
    """The trial compares logits and caches of every path; ``gemma2`` and ``llama`` decode below."""
    loaded = LoadedTargetModel(small.build(name, head_dim=32) if options else small.build(name))
    tree_equals_its_paths(Trial(loaded, cache_options=options))


@pytest.mark.parametrize("options", [{}, {"kv_bits": 4, "kv_group_size": 32}])
@pytest.mark.parametrize("broken", ["mask", "depth", "kept rows"])
def test_the_trial_finds_what_is_wrong(broken, options, monkeypatch):
    """Also where quantised caches allow logits to differ by a quantisation level."""
    loaded = LoadedTargetModel(qwen3_model(0, head_dim=32))
    if broken == "mask":
        monkeypatch.setattr(tree_pass, "ancestors", lambda parents: np.tri(len(parents) + 1, dtype=bool))
    elif broken == "depth":
        monkeypatch.setattr(tree_pass, "depths_of_rows", lambda parents: list(range(len(parents) + 1)))
    else:
        monkeypatch.setitem(MOVES, type(loaded.make_cache(**options)[0]), lambda cache, begun, rows: None)
    with pytest.raises(Mismatch, match="of the path"):
        tree_equals_its_paths(Trial(loaded, cache_options=options))


def test_a_target_that_computes_something_else_for_a_tree_is_refused(monkeypatch):
    monkeypatch.setattr(tree_pass, "ancestors", lambda parents: np.tri(len(parents) + 1, dtype=bool))
    loaded = LoadedTargetModel(qwen3_model(0))
    with pytest.raises(DFlashError, match="computes something else for a tree of drafts"):
        loaded.check_trees(loaded.make_cache())


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("llama", {}, "Layer 0 keeps a RotatingKVCache, of which no path of a tree"),
        ("qwen3_5", {}, "Layer 0 keeps a ArraysCache, of which no path of a tree"),
        ("qwen3", {"max_kv_size": 64}, "Layer 0 keeps a KeptWindowCache"),
        ("mistral4", {}, "Layer 0 is called with an array of shape (11, 1) that may depend on positions"),
        ("gpt2", {}, "computes something else for a tree of drafts than for its paths"),
    ],
)
def test_a_target_without_trees_is_refused_in_one_line(name, options, words):
    model = small.build(name)
    drafter = ScriptedDrafter([0] * 40, small.VOCAB)
    decoder = DFlashSpeculativeDecoder(model, drafter, **options)
    with pytest.raises(DFlashError) as error:
        decoder.spec_generate(PROMPT, 5, tree=4)
    refused(error, words)


def test_a_tree_needs_the_rule_that_walks_it():
    with pytest.raises(DFlashError) as error:
        DFlashSpeculativeDecoder(
            target("qwen3").model, ScriptedDrafter([], VOCAB), tree=4, verify="speculative_sampling"
        )
    refused(error, "A tree is verified by the rule 'first_mismatch'")


# --- decoding --------------------------------------------------------------------------------------------


class Unsure(ScriptedDrafter):
    """Knows the text, and ranks each right token first or, by chance, second."""

    def propose(self, anchor, length, cache):
        chain = super().propose(anchor, length, cache)
        right = (self.text + [0] * length)[cache.offset + 1 :][:length] + [0] * length
        scores = np.zeros((1, length, self.vocab), np.float32)
        for i, token in enumerate(chain.tokens[0].tolist()):
            scores[0, i, right[i]] = 4
            scores[0, i, token] = 5
        return replace(chain, logits=mx.array(scores))


def tau(decoder, prompt, count, **options) -> tuple[list[int], float]:
    steps: list[list[int]] = []
    ids = decoder.spec_generate(prompt, count, stream_callback=steps.append, policy="full", **options)
    return ids.tolist()[0], (len(ids.tolist()[0]) - len(prompt) - 1) / (len(steps) - 1)


MODELS = {
    "qwen3": lambda: qwen3_model(1),
    "llama": lambda: llama_model(1),
    "gemma2": lambda: small.build("gemma2"),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_text_is_plain_decodings_and_more_is_accepted_where_the_second_choice_is_right(name):
    model = MODELS[name]()
    vocab = small.VOCAB if name == "gemma2" else VOCAB
    text, _ = plain_greedy(model, PROMPT, 36)
    decoder = DFlashSpeculativeDecoder(model, Unsure(PROMPT + text, vocab, 0.6, layer_ids=(0, 2)))
    plain, of_chain = tau(decoder, PROMPT, 36)
    with_tree, of_tree = tau(decoder, PROMPT, 36, tree=24)
    assert with_tree == plain == PROMPT + text
    assert of_tree > 1.3 * of_chain
    assert (
        tau(decoder, PROMPT, 36, tree=24, repetition_penalty=1.3)[0]
        == tau(decoder, PROMPT, 36, repetition_penalty=1.3)[0]
    )


def test_a_tree_beyond_all_use_is_lowered_with_a_warning(caplog):
    text, _ = plain_greedy(MODELS["llama"](), PROMPT, 9)
    decoder = DFlashSpeculativeDecoder(MODELS["llama"](), Unsure(PROMPT + text, VOCAB, 0.6), policy="full")
    steps = {}
    for nodes in (MOST, 10**6):
        steps[nodes] = decoder.spec_generate(PROMPT, 9, tree=nodes).tolist()
        assert caplog.messages == ([] if nodes == MOST else ["tree 1000000 is more than 512 drafts; 512 are used."])
    assert list(steps.values()) == [[PROMPT + text]] * 2


@pytest.mark.parametrize(
    ("options", "policy"),
    [
        ({"temperature": 0.7}, "full"),
        ({"temperature": 0.7}, 5),
        ({"temperature": 1.0, "top_p": 0.9}, "adaptive"),
        ({"kv_bits": 8}, "full"),
    ],
)
def test_a_seed_gives_the_text_of_a_chain_under_any_policy(options, policy):
    model = qwen3_model(1, head_dim=32)
    given = {"seed": 7, "kv_group_size": 32, "quantized_kv_start": 11} | options
    text, _ = plain_greedy(model, PROMPT, 40)
    decoder = DFlashSpeculativeDecoder(model, Unsure(PROMPT + text, VOCAB, 0.6))
    expected = decoder.spec_generate(PROMPT, 40, **given).tolist()
    after = mx.random.uniform().item()
    assert decoder.spec_generate(PROMPT, 40, **given, tree=20, policy=policy).tolist() == expected
    if "temperature" in options:
        assert mx.random.uniform().item() == after, "and leaves the same random state"


def test_caches_hold_the_committed_tokens_only_and_the_drafter_gets_the_features_of_the_path():
    loaded = target("qwen3", 1)
    text, _ = plain_greedy(loaded.model, PROMPT, 40)
    drafter = TreeDrafter(Unsure(PROMPT + text, VOCAB, 0.5, layer_ids=(0, 3)), 20)
    run = Decoding(loaded, drafter)
    state = prefill(run, PROMPT)
    branched = 0
    for block in decode(run, state, 40, 16):
        branched += block.order[: block.accepted] != list(range(block.accepted))
        assert block.drafted[: block.accepted] == block.tokens[:-1]
        fresh = loaded.make_cache()
        _, features = loaded.forward_with_hidden_states(mx.array([state.tokens[:-1]]), fresh, (0, 3))
        assert_same_caches(state.target_cache, fresh)
        assert state.draft_cache.tokens == state.tokens[:-1]
        np.testing.assert_allclose(mx.concatenate(state.draft_cache.features, axis=1), features, atol=1e-4)
    assert branched > 3


# --- policies and traces ---------------------------------------------------------------------------------


def test_adaptive_counts_each_path_by_itself_and_learns_from_siblings():
    """Of five blocks the anchor's first child is right in three, its second in two; the first one's own child in one.

    All of them take equally long, so that each draft that may be right is verified.
    """
    policy = Adaptive()
    for _ in range(policy.sleep()):
        policy.observe(BlockRecord(0, 0, 0, 0, None, 1.0, asleep=True))

    def tokens(*parents: int, chain: bool = False) -> float:
        drafts = Drafts(len(parents), parents=None if chain else parents)
        assert policy.verify_length(drafts) == len(parents)
        return policy.why()["tokens"]

    for i in range(100):
        grandchild = {2: i % 5 == 0} if i % 5 < 3 else {}
        known = {0: i % 5 < 3, 1: i % 5 >= 3} | grandchild
        right = sum(known.values())
        policy.observe(BlockRecord(3, 3, right, right, None, 1.0, outcomes=known))

    first = tokens(-1) - 1
    second = tokens(-1, -1) - 1 - first
    assert (first, second) == (pytest.approx(0.6, abs=0.05), pytest.approx(0.4, abs=0.05))
    third = (tokens(-1, -1, 0) - 1 - first - second) / first
    assert third == pytest.approx(1 / 3, abs=0.05)
    assert tokens(-1, -1, -1) == pytest.approx(1 + first + second + third)
    assert tokens(-1, -1, 1) == pytest.approx(1 + first + second + second * third)
    line = 1 + first + first * second + first * second * third
    assert tokens(-1, 0, 1, chain=True) == tokens(-1, 0, 1) == pytest.approx(line)


def test_a_trace_names_the_accepted_drafts_first(tmp_path):
    loaded = target("qwen3", 1)
    text, _ = plain_greedy(loaded.model, PROMPT, 30)
    from dflash.decoding.inspection import inspect
    from dflash.decoding.trace import TokenTexts, recording

    run = Decoding(loaded, TreeDrafter(Unsure(PROMPT + text, VOCAB, 0.5), 12), inspect=inspect)
    state, records = prefill(run, PROMPT), []
    with recording(records.append, False, TokenTexts(None), PROMPT, {}, {}) as recorder:
        for block in decode(run, state, 30, 8):
            recorder.block(block, block.tokens, {}, {"pieces": [], "text": "", "finish_reason": None})
    for record in records[1:]:
        accepted, best = record["accepted"], [row[0] for row in record["target_top"]["tokens"]]
        assert record["drafts"][:accepted] == record["tokens"][:-1] == best[:accepted]
        assert best[-1] == record["tokens"][-1]
        assert record["parents"][:accepted] == chain(accepted)
        assert len(record["target_probability"]) == record["verified"] == len(best) - 1
        siblings = [i for i, p in enumerate(record["parents"][: record["verified"]]) if p == -1]
        assert len({best[i] for i in siblings}) == 1, "one row checked them all"
