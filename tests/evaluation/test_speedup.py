"""The arithmetic limit is measured from the parts of decoding, each alone."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from mlx_lm.sample_utils import make_sampler
from support.bench import result, run
from support.models import ScriptedDrafter, bound_drafter, target

from dflash import DFlashSpeculativeDecoder
from dflash.evaluation import speedup
from dflash.evaluation.speedup import limit_of, measure_limit


@pytest.mark.parametrize(("kind", "block_size", "tau"), [("qwen3", 16, 3.4), ("sliding", 4, 4.0), ("llama", 1, 1.0)])
def test_the_parts_of_decoding_can_be_replayed_alone(kind, block_size, tau):
    decoder = DFlashSpeculativeDecoder(target(kind, 1), bound_drafter(kind, 1), block_size=block_size)
    limit = measure_limit(decoder, [1, 2, 3], [4, 5, 6, 7, 8], tau, make_sampler(temp=0.0))
    assert min(limit.plain, limit.draft, limit.verify) > 0
    assert limit.speedup == pytest.approx(tau * limit.plain / (limit.draft + limit.verify))


@pytest.mark.parametrize(
    ("tau", "blocks", "one_by_one", "rows"),
    [(1.0, 8, False, 8), (3.4, 3, True, 3), (4.0, 2, False, 8), (99.0, 1, True, 8)],
)
def test_the_replay_commits_tau_tokens_a_block_and_samples_as_the_rule_does(tau, blocks, one_by_one, rows, monkeypatch):
    monkeypatch.setattr(speedup, "PASSES", 1)
    monkeypatch.setattr(speedup, "samples_one_by_one", lambda sampler: one_by_one)
    drafter, sampled, sampler = ScriptedDrafter(range(40), 32, block_size=8), [], make_sampler(temp=1.0)
    decoder = DFlashSpeculativeDecoder(target("qwen3", 1), drafter)
    answer = [4, 5, 6, 7, 8, 9, 10, 11]
    measure_limit(decoder, [1, 2, 3], answer, tau, lambda row: sampled.append(row) or sampler(row))
    # Two passes, a warm-up and one that counts; a drafter computes the prompt's part of the cache in each.
    assert len(drafter.asked) == 2 * (1 + blocks)
    assert sum(len(row) for row in sampled) == 2 * (len(answer) + rows * blocks)


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
