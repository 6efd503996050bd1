"""BLAS threads for decoding: the quickest count by measured passes and by blocks, no flapping, the same bits."""

import os
from dataclasses import dataclass, field
from math import exp
from random import Random

import mlx.core as mx
import pytest
from support.models import ScriptedDrafter, plain_greedy, qwen3_model

from dflash import DFlashSpeculativeDecoder, backend, thread_trials, threads
from dflash.backend import on_cpu
from dflash.block import Block
from dflash.policies.thread_trials import Trials, UsualSeconds
from dflash.policies.threads import DecodeThreads, best_count, candidates

QUIET, BUSY = {1: 0.014, 2: 0.010}, {1: 0.014, 2: 0.040}
VERY_BUSY = {1: 0.010, 2: 0.080}
SIXTEEN_CORES = {1: 0.080, 8: 0.015, 15: 0.011, 16: 0.010}


@dataclass
class Machine:
    """A clock that passes move on by the time that the BLAS's present count makes them take."""

    seconds: dict[int, float]
    count: int | None = 2
    now: float = 0.0
    counts: list[int] = field(default_factory=list)
    """With which each pass was computed."""
    bits: dict[int, float] = field(default_factory=dict)
    noise: float = 0.0
    """Standard deviation of a pass's logarithm of seconds."""
    random: Random = field(default_factory=lambda: Random(0))

    @property
    def passes(self) -> int:
        return len(self.counts)

    def run_pass(self, tokens: int) -> mx.array:
        self.counts.append(self.count)
        self.now += self.seconds[self.count] * tokens / 16 * exp(self.random.gauss(0, self.noise))
        return mx.array([self.bits.get(self.count, 0.0)])

    def set(self, count: int) -> bool:
        self.count = count
        return True

    def blocks(self, count: int, length: int = 15):
        """Decoded blocks, each a pass long."""
        for _ in range(count):
            self.run_pass(length + 1)
            yield Block([0] * length, [0], 0)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine(dict(QUIET))
    monkeypatch.setattr(backend, "on_cpu", lambda: True)
    monkeypatch.setattr(backend, "blas_threads", lambda: machine.count)
    monkeypatch.setattr(backend, "set_blas_threads", machine.set)
    for name in threads.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return machine


def chooser(machine: Machine) -> DecodeThreads:
    return DecodeThreads(machine.run_pass, 16, lambda: machine.now)


def decode(machine: Machine, choice: DecodeThreads, count: int, decides: bool = True) -> list[int]:
    """The counts with which so many blocks were decoded; what measures runs no other pass, and leaves its count set."""
    first, measuring = machine.passes, choice.measuring
    for done, _ in enumerate(choice.watch(machine.blocks(count), decides), 1):
        assert machine.passes == first + done
        assert machine.count == choice.count
    assert choice.measuring == measuring
    assert machine.count == choice.count
    return machine.counts[first:]


def changes(counts: list[int]) -> int:
    """How often a count stayed for longer than a few trials."""
    kept = [counts[0]]
    for i in range(len(counts) - 4):
        if counts[i] != kept[-1] and len(set(counts[i : i + 5])) == 1:
            kept.append(counts[i])
    return len(kept) - 1


@pytest.mark.parametrize(("seconds", "count"), [(QUIET, 2), (BUSY, 1)], ids=["quiet", "busy"])
def test_decoding_runs_with_the_quickest_count_and_the_process_gets_its_own_back(machine, seconds, count):
    machine.seconds = seconds
    choice = chooser(machine)
    with choice.in_use() as decides:
        assert (decides, machine.count) == (True, count)
    assert machine.count == 2
    assert choice.seconds == pytest.approx(seconds)
    assert str(choice).startswith(f"{count} of 2: a pass of 16 tokens takes 14 ms with 1, ")


def test_more_threads_must_be_clearly_quicker_and_fewer_only_as_quick():
    assert best_count({1: 9.0, 2: 10.0}, now=2) == 1
    assert best_count({1: 10.0, 2: 9.0}, now=1) == 1
    assert best_count({1: 10.0, 2: 9.0}, now=2) == 2
    assert best_count({1: 10.0, 3: 9.9, 4: 10.0}, now=4) == 1
    assert best_count({1: 8.0, 2: 10.0}, now=2) == 1
    assert best_count({1: 10.0, 2: 8.0}, now=1) == 2


def test_few_counts_are_measured_on_many_cores():
    assert candidates(1) == {1}
    assert candidates(2) == {1, 2}
    assert candidates(16) == {1, 8, 15, 16}


@pytest.mark.parametrize(
    ("seconds", "passes"),
    [
        ({1: 0.014, 2: 0.010}, 2 * (2 + 2)),
        ({1: 0.010, 2: 0.016}, 2 * 2),
        ({1: 2.5, 2: 2.0}, 2 * 2),
        (SIXTEEN_CORES, 4 * 2 + 2 * 2),
    ],
    ids=["close", "clear", "long", "two of four close"],
)
def test_only_counts_that_are_close_are_timed_more_than_once(machine, seconds, passes):
    machine.seconds, machine.count = seconds, max(seconds)
    choice = chooser(machine)
    if machine.count == 16:
        seconds[8] = 0.020
    choice.measure()
    assert machine.passes == passes
    assert choice.seconds == pytest.approx(seconds)
    assert choice.measuring == pytest.approx(machine.now)


def test_noise_of_the_first_pass_is_no_reason(machine):
    """The first pass of a block, with one thread, is disturbed."""
    machine.seconds = {1: 0.010, 2: 0.0101}
    choice, run_pass = chooser(machine), machine.run_pass

    def disturbed(tokens: int) -> mx.array:
        machine.now += 0.004 if machine.passes == 1 else 0
        return run_pass(tokens)

    choice._run_pass = disturbed
    choice.measure()
    assert choice.count == 1
    assert choice.seconds == pytest.approx(machine.seconds)


def test_a_machine_that_becomes_busy_is_noticed_within_a_few_blocks(machine):
    choice = chooser(machine)
    with choice.in_use():
        assert decode(machine, choice, 20) == [2] * 20
        machine.seconds = BUSY
        assert decode(machine, choice, 50) == [2] * 4 + [1] * 46
    assert machine.count == 2
    assert str(choice) == (
        "1 of 2: blocks became quicker with it; before the first text a pass of 16 tokens took 14 ms with 1, "
        "10 ms with 2"
    )


def test_a_machine_that_becomes_quiet_is_noticed_with_time(machine):
    machine.seconds = BUSY
    choice = chooser(machine)
    with choice.in_use():
        decode(machine, choice, 100)
        machine.seconds = QUIET
        counts = decode(machine, choice, 200)
    assert 2 not in counts[-201:-180]
    assert counts[-50:].count(2) >= 49  # the other count is tried once


def test_a_core_that_is_taken_costs_many_cores_one_thread(machine):
    machine.seconds, machine.count = SIXTEEN_CORES, 16
    choice = chooser(machine)
    with choice.in_use():
        decode(machine, choice, 300)
        assert choice.count == 16
        machine.seconds = SIXTEEN_CORES | {16: 0.030}
        assert decode(machine, choice, 50) == [16] * 4 + [15] * 46


@pytest.mark.parametrize("noise", [0.0, 0.25])
@pytest.mark.parametrize(
    "seconds", [QUIET, VERY_BUSY, SIXTEEN_CORES, SIXTEEN_CORES | {15: 0.080}], ids=["quiet", "busy", "16", "16 alike"]
)
def test_trials_take_a_small_part_of_the_time(machine, seconds, noise):
    machine.seconds, machine.count = seconds, max(seconds)
    choice = chooser(machine)
    with choice.in_use():
        machine.noise, best = noise, choice.count
        counts = decode(machine, choice, 5000)
    extra = sum(max(seconds[count] - seconds[best], 0.0) for count in counts)
    assert set(counts) == set(seconds)
    assert extra < 0.03 * 5000 * seconds[best]


def test_trials_take_a_small_part_of_the_time_where_every_other_text_has_slow_blocks(machine):
    """A long context after a short one looks like a machine that has become busy."""
    machine.seconds = VERY_BUSY
    choice = chooser(machine)
    with choice.in_use():
        counts = []
        for text in range(300):
            machine.seconds = {n: s * (1 + text % 2) for n, s in VERY_BUSY.items()}
            counts += decode(machine, choice, 15)
    assert choice.count == 1
    assert 2 in counts
    assert counts.count(2) * 7 < 0.03 * len(counts) * 1.5


@pytest.mark.parametrize(("other", "most"), [(1.0, 8), (1.3, 2)], ids=["equal", "the other is slower"])
def test_noise_seldom_changes_the_count(machine, other, most):
    machine.seconds = {1: 0.010 * other, 2: 0.010}
    choice = chooser(machine)
    found = []
    for seed in range(8):
        machine.noise, choice.count = 0.0, None
        with choice.in_use():
            machine.noise, machine.random = 0.25, Random(seed)
            found.append(changes(decode(machine, choice, 4000)))
    assert sum(found) / 8 <= most / 2
    assert max(found) <= most


def test_a_text_with_a_shorter_context_is_no_reason_to_change(machine):
    """Blocks take as long with either count; those of a text have their own length of context."""
    choice, texts, found = chooser(machine), Random(0), 0
    machine.noise = 0.05
    with choice.in_use():
        for _ in range(1500):
            context, before = exp(texts.gauss(0, 0.3)), choice.count
            machine.seconds = {1: 0.010 * context, 2: 0.010 * context}
            decode(machine, choice, 15)
            found += choice.count != before
    assert found <= 15


def test_one_thread_for_short_blocks_though_two_are_quicker_for_long_ones(machine):
    choice = chooser(machine)
    with choice.in_use():
        assert machine.count == 2
        machine.seconds = {1: 0.010, 2: 0.012}
        for _ in choice.watch(machine.blocks(200, 1)):
            pass
        assert machine.count == 1


def test_three_quick_trials_in_a_row_change_the_count_and_one_slow_one_ends_the_series():
    trials = Trials({1: 1.0, 2: 1.0}, 2)
    observe(trials, 100)
    for seconds in (0.8, 0.8, 0.9):
        assert trials.due() == 1
        trials.judge(1, 3, seconds)
    assert (trials.due(), trials.count) == (None, 2)
    observe(trials, 100)
    for seconds in (0.8, 0.8, 0.8):
        assert (trials.due(), trials.count) == (1, 2)
        trials.judge(1, 3, seconds)
    assert (trials.due(), trials.count) == (None, 1)


def test_a_trial_with_a_number_of_drafts_whose_usual_time_is_not_known_tells_nothing():
    trials = Trials({1: 1.0, 2: 1.0}, 2)
    observe(trials, 100)
    for seconds in (0.8, 0.8):
        trials.judge(1, 3, seconds)
    trials.judge(1, 7, 0.1)
    assert (trials.due(), trials.count) == (None, 2)  # the next block is probably as long
    observe(trials, 1)
    assert trials.due() == 1
    trials.judge(1, 3, 0.8)
    assert trials.count == 1


def test_a_trial_that_told_nothing_is_paid_for():
    trials = Trials({1: 9.0, 2: 1.0}, 2)
    observe(trials, 400)
    assert trials.due() == 1
    trials.judge(1, 7, 9.0)
    observe(trials, 300)
    assert trials.due() is None
    observe(trials, 100)
    assert trials.due() == 1


def test_what_a_trial_cost_decides_when_the_next_one_comes():
    trials = Trials({1: 1.0, 2: 1.0}, 2)
    observe(trials, 64)
    trials.judge(1, 3, 6.0)
    observe(trials, 40 * 5 - 1)
    assert trials.due() is None
    observe(trials, 1)
    assert trials.due() == 1


def test_a_count_that_was_left_is_tried_again_after_as_long_as_what_the_change_gained():
    trials = Trials({1: 1.0, 2: 1.0}, 2)
    observe(trials, 64)
    for _ in range(3):
        trials.judge(1, 3, 0.25)
    observe(trials, 119, 0.25)
    assert (trials.count, trials.due()) == (1, None)
    observe(trials, 1, 0.25)
    assert trials.due() == 2


def test_counts_are_tried_in_turn_and_an_expensive_one_does_not_hold_up_the_others():
    seconds = {1: 8.0, 8: 1.1, 15: 1.0, 16: 1.0}
    trials, tried = Trials(seconds, 16), []
    for _ in range(4000):
        if (count := trials.due()) is None:
            trials.observe(3, 1.0)
        else:
            tried.append(count)
            trials.judge(count, 3, seconds[count])
    assert 40 < len(tried) < 4000 / 64 + 1
    assert tried.count(1) == 4000 // (3 * 40 * 7)
    assert abs(tried.count(8) - tried.count(15)) <= 2


def test_a_count_that_disappoints_is_given_up_at_once():
    """It was quick for three blocks only, as the machine was quiet meanwhile."""
    trials = Trials({1: 1.0, 2: 3.0}, 1)
    observe(trials, 100)
    for _ in range(3):
        trials.judge(2, 3, 0.7)
    assert trials.count == 2
    observe(trials, 4, 3.0)
    assert trials.due() == 1


def test_slow_blocks_are_learned_when_it_is_known_whether_they_are_noise_or_a_change():
    usual = UsualSeconds()
    assert not any(usual.learn(3, 1.0) for _ in range(10))
    assert not any(usual.learn(3, 3.0) for _ in range(3))
    assert usual.expected(3) == pytest.approx(1.0)
    assert not usual.learn(3, 1.0)
    assert 1.2 < usual.expected(3) < 2.0
    usual = UsualSeconds()
    assert not any(usual.learn(drafts, 1.0 + drafts) for drafts in range(8) for _ in range(5))
    assert [usual.learn(drafts, 3.0 + 3 * drafts) for drafts in (1, 9, 3, 1, 0)] == [False] * 4 + [True]
    assert usual.expected(7) == pytest.approx(24.0)
    assert usual.expected(9) is None


def test_blocks_of_one_number_of_drafts_tell_what_others_take_now():
    usual = UsualSeconds()
    for _ in range(10):
        usual.learn(3, 1.0)
        usual.learn(7, 2.0)
    for _ in range(10):
        usual.learn(7, 1.2)
    assert usual.expected(3) < 0.87
    assert usual.expected(7) == pytest.approx(1.2, rel=0.1)


def test_a_drift_of_all_blocks_is_counted_once():
    usual = UsualSeconds()
    for _ in range(90):
        usual.learn(3, 1.0)
    for _ in range(20):
        usual.learn(3, 1.4)
    for _ in range(4):
        usual.learn(5, 1.4)
    assert usual.expected(3) == pytest.approx(1.4, rel=0.05)
    assert usual.expected(5) == pytest.approx(1.4, rel=0.05)


def observe(trials: Trials, blocks: int, seconds: float = 1.0) -> None:
    for _ in range(blocks):
        trials.observe(3, seconds)


def test_blocks_that_end_while_another_count_is_tried_leave_the_present_one_set(machine):
    choice = chooser(machine)
    with choice.in_use():
        while choice._trials.due() is None:
            choice.observe(3, 0.010)
        assert decode(machine, choice, 0) == []
        assert machine.count == 2


@pytest.mark.parametrize("longer", [1, 16])
def test_a_count_that_changes_a_bit_is_never_chosen_nor_tried(machine, longer):
    machine.seconds = BUSY
    choice = chooser(machine)
    choice._run_pass = lambda tokens: machine.run_pass(tokens) + (1e-30 * machine.count if tokens == longer else 0)
    with choice.in_use():
        assert machine.count == 2
        machine.seconds = QUIET
        decode(machine, choice, 100)
        machine.seconds = BUSY
        assert set(decode(machine, choice, 500)) == {2}
    assert str(choice).endswith("; logits differ with 1")


def test_a_use_inside_another_learns_what_blocks_take_and_changes_nothing(machine):
    choice = chooser(machine)
    with choice.in_use(), choice.in_use() as decides:
        assert set(decode(machine, choice, 500, decides)) == {2}
        machine.seconds = BUSY
        assert set(decode(machine, choice, 500, decides)) == {2}
    with choice.in_use():
        assert decode(machine, choice, 50) == [1] * 50


def test_what_is_known_is_measured_again_on_request_and_where_the_process_has_another_count(machine):
    choice = chooser(machine)
    with choice.in_use():
        assert choice.count == 2
        decode(machine, choice, 20)
        machine.seconds = BUSY
        decode(machine, choice, 20)
    passes = machine.passes
    with choice.in_use():
        assert (choice.count, machine.passes) == (1, passes)
    machine.seconds = QUIET
    passes = machine.passes
    choice.measure()
    assert (choice.count, machine.passes) == (2, passes + 8)
    assert str(choice) == "2 of 2: a pass of 16 tokens takes 14 ms with 1, 10 ms with 2"
    machine.seconds = BUSY | {3: 0.010, 4: 0.040}
    machine.count = 4
    with choice.in_use():
        assert machine.count == 3
    assert machine.count == 4
    assert str(choice).startswith("3 of 4: a pass of 16 tokens takes 14 ms with 1, ")


def test_one_use_decides_for_those_inside_it(machine):
    outer, inner = chooser(machine), chooser(machine)
    with outer.in_use():
        machine.seconds = BUSY
        passes = machine.passes
        with inner.in_use() as decides:
            assert (decides, machine.count, machine.passes) == (False, 2, passes)
    with inner.in_use() as decides:
        assert (decides, machine.count) == (True, 1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m, p: p.setenv("OMP_NUM_THREADS", "2"), "2: OMP_NUM_THREADS is set"),
        (lambda m, p: p.setenv("MKL_NUM_THREADS", "2"), "2: MKL_NUM_THREADS is set"),
        (lambda m, p: p.setattr(backend, "on_cpu", lambda: False), "not compute on the CPU"),
        (lambda m, p: m.set(None), "no such setting"),
        (lambda m, p: m.set(1), "1: this process has no more"),
    ],
    ids=["OMP_NUM_THREADS", "MKL_NUM_THREADS", "GPU", "no BLAS", "one thread"],
)
def test_where_there_is_nothing_to_choose_nothing_is_measured_or_set(machine, monkeypatch, change, said):
    change(machine, monkeypatch)
    count, choice = machine.count, chooser(machine)
    monkeypatch.setattr(backend, "set_blas_threads", lambda count: pytest.fail("was set"))
    with choice.in_use() as decides:
        assert (decides, machine.count, machine.passes) == (False, count, 0)
    assert said in str(choice)


def test_setting_threads_changes_what_the_blas_reports():
    if not on_cpu() or backend.blas_threads() is None:
        pytest.skip("neither MKL nor OpenBLAS is loaded")
    before = backend.blas_threads()
    try:
        for count in (1, 2):
            backend.set_blas_threads(count)
            assert backend.blas_threads() == min(count, os.cpu_count())
    finally:
        backend.set_blas_threads(before)


def test_a_prompt_is_read_with_the_own_count_of_the_process_and_blocks_are_decoded_with_the_chosen_one(machine):
    reads, drafts = [], []

    class Counting(ScriptedDrafter):
        def extend_context(self, features, cache, tokens):
            if cache.offset == 0:
                reads.append(machine.count)
            super().extend_context(features, cache, tokens)

        def propose(self, *args):
            drafts.append(machine.count)
            return super().propose(*args)

    machine.seconds = BUSY
    decoder = DFlashSpeculativeDecoder(qwen3_model(0), Counting([], 32))
    decoder.threads = chooser(machine)
    for _ in range(2):  # measured, then known
        decoder.spec_generate([1, 2, 3], 8)
    decoder.cache_prompt([1, 2, 3], decoder.make_prompt_cache())
    assert reads == [2, 2, 2]
    assert set(drafts) == {1}
    assert machine.count == 2


def test_a_text_stays_the_same_while_its_threads_change_and_the_count_is_given_back(machine, monkeypatch):
    set_count, counts = backend._call_blas, []

    def record(count: int) -> None:
        set_count("MKL_Set_Num_Threads", "openblas_set_num_threads", count)
        counts.append(count)

    monkeypatch.setattr(backend, "set_blas_threads", record)
    for name, value in (("GAIN", float("inf")), ("_BLOCKS", 0), ("_PERIOD", 0)):  # a change after every third block
        monkeypatch.setattr(thread_trials, name, value)
    model, prompt = qwen3_model(0), [1, 2, 3]
    expected, _ = plain_greedy(model, prompt, 48)
    decoder = DFlashSpeculativeDecoder(model, ScriptedDrafter(prompt + expected, 32, 0.75), block_size=3)
    before = backend._call_blas("MKL_Get_Max_Threads", "openblas_get_num_threads")
    try:
        assert decoder.spec_generate(prompt, 48).tolist() == [prompt + expected]
        assert set(decoder.threads.seconds) == {1, 2}
        assert len(counts) > 9
        assert counts[-1] == 2
    finally:
        record(before)
