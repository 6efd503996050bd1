"""Acceptance by decoding, over all and by position."""

import pytest
from support.models import ScriptedDrafter, plain_greedy
from support.runs import read_log, recipe

import dflash
from dflash.training import evaluate
from dflash.training.train import train


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_acceptance_by_position_adds_up_to_the_acceptance_length(folder, seed):
    target, prompt = dflash.load_target(folder / "target"), [65, 66, 67]
    text, _ = plain_greedy(target.model, prompt, 60)
    drafter = ScriptedDrafter([*prompt, *text], 264, p=0.7, block_size=5, seed=seed)
    found = evaluate.measure(target, drafter, [prompt], 41)
    assert found.committed == 40
    assert found.blocks < 40
    assert found.committed == found.blocks + found.accepted.sum()
    assert found.length == pytest.approx(1 + sum(found.accepted) / found.blocks)
    assert found.by_position == pytest.approx((found.accepted / found.verified).tolist())
    assert found.by_position == sorted(found.by_position, reverse=True)


def test_a_drafter_that_is_always_right_fills_every_block(folder):
    target, prompt = dflash.load_target(folder / "target"), [65, 66, 67]
    text, _ = plain_greedy(target.model, prompt, 60)
    found = evaluate.measure(target, ScriptedDrafter([*prompt, *text], 264, block_size=5), [prompt], 41)
    assert (found.blocks, found.length, found.by_position) == (8, 5.0, [1.0] * 4)


def test_answers_without_a_block_have_no_acceptance_and_do_not_stop_a_run(folder):
    train(recipe(folder, "short", "run.steps=2", "run.evaluate_every=1", "run.evaluate_tokens=1"))
    assert [line["acceptance_length"] for line in read_log(folder / "short") if "blocks" in line] == [None, None]
    assert dflash.load_drafter(folder / "short" / "drafter").block_size == 4
