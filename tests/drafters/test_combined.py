"""N-gram copies combined with a model: both caches stay exact, and the better source is chosen."""

import mlx.core as mx
import pytest
from support.cli import invoke
from support.models import (
    TEXT_VOCAB,
    ScriptedDrafter,
    ScriptModel,
    bound_drafter,
    plain_greedy,
    qwen3_model,
    random_drafter,
    save_target,
    target,
)

import dflash
from dflash import DFlashSpeculativeDecoder, LoadedTargetModel
from dflash.decoding.block import Decoding
from dflash.decoding.loop import decode, prefill
from dflash.drafters.combined import Chance, CombinedDrafter
from dflash.drafters.ngram import RESUMING, NgramDrafter
from dflash.policies.base import Policy
from dflash.target.compare import assert_close

NEAR_TIE = 1e-4
UNIT = [*range(40, 80)]  # no two tokens of it agree, so that copies come from its first appearance
FRESH = [*range(100, 140)]


class Pausing(Policy):
    """Falls back to ``pause`` plain tokens after every block, unless the drafter ends the pause."""

    def __init__(self, pause: int):
        self.pause, self.left, self.woken = pause, pause, 0

    def sleep(self) -> int:
        return self.left

    def wake(self) -> None:
        self.left, self.woken = 0, self.woken + 1

    def observe(self, block) -> None:
        self.left = max(self.left - 1, 0) if block.asleep else self.pause


def written(prompt: list[int], answer: list[int], drafter, policy=None):
    """The blocks in which a target that writes ``answer`` is decoded."""
    loaded = LoadedTargetModel(ScriptModel([*prompt, *answer], TEXT_VOCAB))
    drafter.bind(loaded)
    run = Decoding(loaded, drafter, policy=policy or Policy())
    state = prefill(run, prompt)
    blocks = list(decode(run, state, len(answer), drafter.block_size))
    assert state.tokens == [*prompt, *answer]
    return blocks, state


def model_that_knows(text: list[int], p: float, block_size: int = 8) -> ScriptedDrafter:
    return ScriptedDrafter(text, TEXT_VOCAB, p, block_size, layer_ids=(0,))


@pytest.mark.parametrize("pause", [0, 3])
def test_copied_text_is_copied_and_new_text_is_the_models(pause):
    prompt, answer = UNIT, [1, *FRESH, *UNIT, 2, *FRESH[::-1]]
    drafter = CombinedDrafter(model_that_knows([*prompt, *answer], 0.9))
    blocks, state = written(prompt, answer, drafter, Pausing(pause) if pause else None)
    places, at = {"ngram": [], "model": [], "": []}, len(prompt) + 1
    for block in blocks:
        places[block.source] += [at]
        at += len(block.tokens)
    repeated = range(len(prompt) + 1 + len(FRESH), len(prompt) + 1 + len(FRESH) + len(UNIT))
    assert all(place in repeated for place in places["ngram"])
    assert len(places["ngram"]) >= 2
    assert len([place for place in places["model"] if place not in repeated]) >= 8 - pause
    if not pause:
        assert max(len(block.tokens) for block in blocks if block.source == "ngram") > drafter.model.block_size
    assert state.draft_cache.offset == len(state.tokens) - 1
    assert state.draft_cache.model.tokens == state.draft_cache.copies.tokens == state.tokens[:-1]


def test_copies_that_fail_give_way_to_the_model_and_are_tried_again_when_they_would_succeed():
    """The text returns to a phrase of five tokens and goes on otherwise each time; later it repeats what it said."""
    phrase, endings = [40, 41, 42, 43, 44], [[100 + 3 * i, 101 + 3 * i, 102 + 3 * i] for i in range(20)]
    prompt = [token for ending in endings[:2] for token in (*phrase, *ending)]
    turning = [token for ending in endings[2:] for token in (*phrase, *ending)]
    answer = [1, *turning, *turning]
    blocks, _ = written(prompt, answer, CombinedDrafter(model_that_knows([*prompt, *answer], 0.8)))
    at, early, late = 0, [], []
    for block in blocks:
        (early if at < len(turning) else late).append(block.source)
        at += len(block.tokens)
    assert early[len(early) // 2 :].count("ngram") <= 2
    assert late[len(late) // 2 :].count("ngram") > len(late) / 4


def test_what_one_text_taught_of_copies_serves_the_next():
    """In the first text no copy is right; of the second, which repeats itself, the model then drafts more."""
    drafter, sources = CombinedDrafter(model_that_knows([*UNIT, 1, *UNIT, 2, *UNIT], 1.0, block_size=2)), []
    for _ in range(2):
        blocks, _ = written([*UNIT, 1], UNIT, drafter)
        sources.append([block.source for block in blocks].count("ngram"))
        for chance in drafter.of_copies:
            for _ in range(90):
                chance.learn([1], [2])
    assert sources[1] < sources[0], sources


@pytest.mark.parametrize("kind", ["qwen3", "sliding"])
def test_the_text_is_the_targets_own_and_the_models_context_equals_its_own_alone(kind):
    loaded, model = target(kind, 3), bound_drafter(kind, 3)
    prompt, count = [3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4], 40
    expected, lead = plain_greedy(loaded.model, prompt, count)
    assert lead > NEAR_TIE
    drafter = CombinedDrafter(model)
    drafter.bind(loaded)
    for policy in (Policy(), Pausing(2)):
        run = Decoding(loaded, drafter, policy=policy)
        state = prefill(run, prompt)
        sources = {block.source for block in decode(run, state, count, drafter.block_size)}
        assert {"ngram", "model"} <= sources
        assert state.tokens == prompt + expected
        alone = prefill(Decoding(loaded, model), state.tokens[:-1]).draft_cache
        ours, theirs = (model.propose(mx.array([[7]]), 5, c) for c in (state.draft_cache.model, alone))
        assert_close("logits", ours.logits, theirs.logits)


@pytest.mark.parametrize("rule", ["first_mismatch", "speculative_sampling"])
def test_it_samples_with_both_rules(rule):
    loaded = target("llama", 2)
    decoder = DFlashSpeculativeDecoder(loaded, CombinedDrafter(random_drafter(0)), verify=rule, policy="full")
    first, again, other = (decoder.spec_generate([3, 1, 4, 3, 1], 20, 1.0, seed=seed).tolist() for seed in (1, 1, 2))
    assert first == again != other


def test_only_a_model_that_draws_makes_it_draw():
    model = random_drafter(0)
    assert not hasattr(CombinedDrafter(model), "draw")
    model.draw = lambda anchor, length, cache, sampler: model.propose(anchor, length, cache)
    assert hasattr(CombinedDrafter(model), "draw")


@pytest.mark.parametrize("drafter", [NgramDrafter(), CombinedDrafter(model_that_knows([], 0.0))], ids=["ngram", "both"])
def test_a_copy_ends_a_fallback_to_plain_decoding(drafter):
    prompt, answer = UNIT, [1, *FRESH, *UNIT, 2, *FRESH[:9]]
    policy = Pausing(100)
    blocks, state = written(prompt, answer, drafter, policy)
    assert policy.woken >= 1
    asked = [i for i, block in enumerate(blocks) if not block.asleep]
    begins = 1 + len(FRESH) + RESUMING
    assert asked[0] in (begins, begins + 1), "as soon as the match is long enough; one pass was under way"
    assert blocks[asked[0]].accepted >= 10
    index = getattr(state.draft_cache, "copies", state.draft_cache)
    assert index.tokens == state.tokens[:-1]
    assert state.draft_cache.offset == len(state.tokens) - 1


def test_chances_follow_what_is_accepted():
    chance = Chance(0.5)
    chance.learn([1, 2, 3], [1, 2, 3, 9])  # all right, and what comes after them tells nothing
    assert chance.chance > 0.5
    assert chance.expected(2) == pytest.approx(chance.chance + chance.chance**2)
    before = chance.chance
    chance.learn([1, 2, 3], [7])
    assert chance.chance < before
    known = chance.chance
    chance.learn([], [7])
    chance.learn([4], [])
    assert chance.chance == known
    for _ in range(200):
        chance.learn([1], [2])
    assert chance.chance < 0.05


def test_it_is_loaded_by_name_in_python_and_on_the_command_line(tmp_path):
    dflash.save_drafter(random_drafter(3, TEXT_VOCAB), tmp_path / "drafter")
    name = f"ngram+{tmp_path / 'drafter'}"
    drafter = dflash.load_drafter(name, window=9)
    assert isinstance(drafter, CombinedDrafter)
    assert (drafter.block_size, drafter.model.block_size) == (16, 8)
    assert drafter.make_cache().model.layers[0].limit == 9
    folder = save_target(qwen3_model(1, vocab=TEXT_VOCAB), tmp_path / "target")
    result = invoke("generate", "hello", "--target", folder, "--drafter", name, "--max-tokens", 12)
    assert result.exit_code == 0, result.output
    assert DFlashSpeculativeDecoder.from_pretrained(folder, name).generate("hello", max_tokens=12) in result.stdout
    for twice in ("ngram+ngram", f"ngram+{name}"):
        with pytest.raises(dflash.DFlashError, match="ngram alone copies already"):
            dflash.load_drafter(twice)
