"""The benchmark of one training step compares like with like."""

import pytest

from dflash.training.bench import Shape, build, in_turns, step


def test_the_benchmark_takes_the_same_step_on_both_sides():
    tiny = Shape(hidden_size=32, layers=2, heads=4, kv_heads=2, head_dim=8, intermediate_size=48, vocab_size=50)
    ((ours, dense),) = in_turns(step(build(tiny), context=60, anchors=20, chunk=64), repeats=1)
    assert ours.loss == pytest.approx(dense.loss, rel=1e-5)
    assert ours.peak < dense.peak
    assert min(ours.seconds, dense.seconds) > 0
