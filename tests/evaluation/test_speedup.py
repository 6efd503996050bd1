"""The arithmetic limit is measured from the parts of decoding, each alone."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from mlx_lm.sample_utils import make_sampler
from support.bench import result, run
from support.models import ScriptedDrafter, bound_drafter, target

from dflash import DFlashSpeculativeDecoder
from dflash.evaluation import speedup
from dflash.evaluation.speedup import Limit, limit_of, measure_limit


def test_the_limit_is_tau_plain_steps_over_one_block():
    assert Limit(8.0, plain=0.004, draft=0.002, verify=0.006).speedup == pytest.approx(4.0)


@pytest.mark.parametrize(("kind", "block_size", "tau"), [("qwen3", 16, 3.4), ("sliding", 4, 4.0), ("llama", 1, 1.0)])
def test_the_parts_of_decoding_can_be_replayed_alone(kind, block_size, tau):
    decoder = DFlashSpeculativeDecoder(target(kind, 1), bound_drafter(kind, 1), block_size=block_size)
    limit = measure_limit(decoder, [1, 2, 3], [4, 5, 6, 7, 8], tau, make_sampler(temp=0.0))
    assert min(limit.plain, limit.draft, limit.verify) > 0
    assert limit.speedup == pytest.approx(tau * limit.plain / (limit.draft + limit.verify))


@pytest.mark.parametrize(("tau", "blocks"), [(1.0, 8), (3.4, 3), (4.0, 2), (99.0, 1)])
def test_the_replay_commits_tau_tokens_a_block(tau, blocks, monkeypatch):
    monkeypatch.setattr(speedup, "PASSES", 1)
    drafter = ScriptedDrafter(range(40), 32, block_size=8)
    decoder = DFlashSpeculativeDecoder(target("qwen3", 1), drafter)
    measure_limit(decoder, [1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11], tau, make_sampler(temp=0.0))
    a_pass = 1 + blocks  # the prompt's share of the cache, then a proposal a block
    assert len(drafter.asked) == 2 * a_pass  # a warm-up and one pass


@pytest.mark.parametrize(("reached", "rows"), [(True, 3), (False, 8)])
def test_the_replay_draws_as_many_tokens_a_block_as_the_rule_does(reached, rows, monkeypatch):
    monkeypatch.setattr(speedup, "PASSES", 1)
    monkeypatch.setattr(speedup, "samples_one_by_one", lambda sampler, vocab_size: reached)
    decoder = DFlashSpeculativeDecoder(target("qwen3", 1), ScriptedDrafter(range(40), 32, block_size=8))
    drawn = []
    sampler = make_sampler(temp=1.0)
    measure_limit(decoder, [1, 2, 3], [4, 5, 6, 7, 8, 9], 3.0, lambda row: drawn.append(row) or sampler(row))
    assert len(drawn) == 2 * (6 + 2 * rows)  # a warm-up and one pass: six plain steps, two blocks


@pytest.mark.parametrize(
    ("tokens", "blocks", "verified", "measured"),
    [(24, 50, 3, True), (23, 50, 3, False), (24, 49, 3, False), (24, 50, 2, False)],
)
def test_short_answers_few_blocks_and_parts_of_drafts_have_no_limit(tokens, blocks, verified, measured, monkeypatch):
    asked = []
    monkeypatch.setattr(speedup, "measure_limit", lambda *args: asked.append(args) or "the limit")
    answer = replace(run(range(tokens), committed=[2] * blocks), drafted=[verified] * blocks)
    decoder = SimpleNamespace(block_size=4)
    found = limit_of(decoder, [result([answer], [answer])], "sampler")
    assert (found == "the limit") == measured
    if measured:
        assert asked == [(decoder, [65, 66], list(range(tokens)), 2.0, "sampler")]
