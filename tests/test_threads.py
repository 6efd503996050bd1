"""BLAS threads for decoding: the quickest count by measured passes, no flapping, users' settings win, the same bits."""

import os
from dataclasses import dataclass, field

import mlx.core as mx
import pytest
from support.models import ScriptedDrafter, plain_greedy, qwen3_model

from dflash import DFlashSpeculativeDecoder, backend, threads
from dflash.backend import on_cpu
from dflash.block import Block
from dflash.threads import DecodeThreads, best_count, candidates

QUIET, BUSY = {1: 0.014, 2: 0.010}, {1: 0.014, 2: 0.040}


@dataclass
class Machine:
    """A clock that passes move on by the time that the BLAS's present count makes them take."""

    seconds: dict[int, float]
    count: int | None = 2
    now: float = 0.0
    passes: int = 0
    bits: dict[int, float] = field(default_factory=dict)

    def run_pass(self, tokens: int) -> mx.array:
        self.passes += 1
        self.now += self.seconds[self.count] * tokens / 16
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


def test_passes_that_became_slow_are_measured_again_in_the_middle_of_a_text(machine):
    choice = chooser(machine)
    with choice.in_use():
        blocks = choice.watch(machine.blocks(200))
        for _ in range(20):
            next(blocks)
        assert machine.count == 2
        machine.seconds = BUSY
        began = machine.now
        while machine.count == 2 and machine.now - began < 100:
            next(blocks)
        assert machine.now - began < 2  # ten times what the measurement took, not forty times


def test_a_short_text_of_passes_shorter_than_the_one_timed_is_not_interrupted(machine):
    choice = chooser(machine)
    with choice.in_use():
        passes = machine.passes
        for _ in choice.watch(machine.blocks(50, 1)):
            pass
        assert machine.passes == passes + 50


def test_a_machine_that_became_quiet_is_noticed_with_time(machine):
    machine.seconds = BUSY
    choice = chooser(machine)
    with choice.in_use():
        machine.seconds = QUIET
        for _ in choice.watch(machine.blocks(2000)):
            if machine.count == 2:
                break
    assert choice.count == 2


def test_measurements_take_a_small_part_of_the_time_and_noise_does_not_add_threads(machine):
    choice, counts = chooser(machine), []
    with choice.in_use():
        first, began = machine.passes, machine.now
        for i, _ in enumerate(choice.watch(machine.blocks(3000))):
            machine.seconds = {1: 0.0100 + 0.0005 * (i % 3), 2: 0.0105 - 0.0005 * (i % 3)}
            counts.append(machine.count)
    measured = machine.passes - first - 3000
    assert 0 < measured < 0.03 * 3000
    assert machine.now - began < 1.03 * 3000 * 0.0105
    assert counts == sorted(counts, reverse=True)


def test_long_passes_are_measured_once_each(machine):
    machine.seconds = {1: 3.0, 2: 2.0}
    chooser(machine).measure()
    assert machine.passes == 4  # of one token and of a block, with each count


def test_what_is_timed_is_a_pass_as_long_as_most_and_the_longest_must_have_the_same_bits(machine):
    """One thread is as quick for a few tokens; for a whole block, which is rare, two are quicker."""
    choice, few, many = chooser(machine), {1: 0.16, 2: 0.16}, QUIET

    def run_pass(tokens: int) -> mx.array:
        machine.seconds = many if tokens == 16 else few
        return machine.run_pass(tokens)

    choice._run_pass = run_pass
    with choice.in_use():
        assert (machine.count, choice.timed) == (2, 16)
        machine.seconds = few
        for _ in choice.watch(machine.blocks(100, 1)):
            machine.seconds = few
    assert (choice.count, choice.timed) == (1, 2)
    assert choice.seconds == pytest.approx({1: 0.02, 2: 0.02})
    choice._run_pass = lambda tokens: mx.array([machine.count if tokens == 16 else 0])
    choice.measure()
    assert choice.count == 2
    assert str(choice).endswith("; logits differ with 1")


def test_a_count_that_changes_a_bit_is_never_chosen(machine):
    machine.seconds, machine.bits = BUSY, {1: 1e-30}
    choice = chooser(machine)
    with choice.in_use():
        assert machine.count == 2
    assert str(choice).endswith("; logits differ with 1")


def test_a_use_inside_another_tells_what_passes_are_like_and_changes_nothing(machine):
    choice = chooser(machine)
    with choice.in_use(), choice.in_use() as decides:
        passes = machine.passes
        for _ in choice.watch(machine.blocks(2000, 1), decides):
            pass
        assert machine.passes == passes + 2000
    with choice.in_use():
        assert choice.timed == 2


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
    monkeypatch.setattr(threads, "_PERIOD", 0)  # measured before every block
    monkeypatch.setattr(threads, "best_count", lambda seconds, now: 3 - now)
    model, prompt = qwen3_model(0), [1, 2, 3]
    expected, _ = plain_greedy(model, prompt, 24)
    decoder = DFlashSpeculativeDecoder(model, ScriptedDrafter(prompt + expected, 32, 0.75))
    before = backend._call_blas("MKL_Get_Max_Threads", "openblas_get_num_threads")
    try:
        assert decoder.spec_generate(prompt, 24).tolist() == [prompt + expected]
        assert set(decoder.threads.seconds) == {1, 2}
        assert len(counts) > 9
        assert counts[-1] == 2
    finally:
        record(before)
