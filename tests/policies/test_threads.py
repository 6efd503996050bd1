"""BLAS threads for decoding: the fewest that are worth it by a few passes, chosen once, with the same bits."""

import os
from dataclasses import dataclass, field

import mlx.core as mx
import pytest
from support.models import ScriptedDrafter, plain_greedy, qwen3_model

from dflash import DFlashSpeculativeDecoder
from dflash.core import backend
from dflash.core.backend import on_cpu
from dflash.policies.threads import ROUNDS, DecodeThreads

QUIET, BUSY = {1: 0.014, 2: 0.010}, {1: 0.014, 2: 0.040}


@dataclass
class Machine:
    """A clock that passes move on by the time that the BLAS's present count makes them take."""

    seconds: dict[int, float]
    count: int | None = 2
    now: float = 0.0
    passes: list[tuple[int, int]] = field(default_factory=list)
    """Threads and tokens of each pass."""
    bits: dict[tuple[int, int], float] = field(default_factory=dict)
    stall: int | None = None
    """Number of a pass that takes a second more."""

    def run_pass(self, tokens: int) -> mx.array:
        self.now += self.seconds[self.count] * tokens / 16 + (len(self.passes) == self.stall)
        self.passes.append((self.count, tokens))
        return mx.array([self.bits.get((self.count, tokens), 0.0)])

    def set(self, count: int) -> bool:
        self.count = count
        return True

    def choose(self) -> DecodeThreads:
        return DecodeThreads(self.run_pass, 16, lambda: self.now)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine(dict(QUIET))
    monkeypatch.setattr(backend, "on_cpu", lambda: True)
    monkeypatch.setattr(backend, "blas_threads", lambda: machine.count)
    monkeypatch.setattr(backend, "set_blas_threads", machine.set)
    for name in backend.BLAS_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return machine


def test_logits_that_are_not_a_number_do_not_stop_a_decoder_from_being_made(machine):
    machine.bits = dict.fromkeys([(count, tokens) for count in (1, 2) for tokens in (1, 16)], float("nan"))
    assert machine.choose().count == 2


@pytest.mark.parametrize(("seconds", "count"), [(QUIET, 2), (BUSY, 1)], ids=["quiet", "busy"])
def test_decoding_runs_with_the_quickest_count_and_the_process_gets_its_own_back(machine, seconds, count):
    machine.seconds = seconds
    choice = machine.choose()
    assert (choice.count, machine.count) == (count, 2)
    with choice.in_use():
        assert machine.count == count
    assert machine.count == 2
    assert str(choice) == f"{count}: a pass of 16 tokens takes 14 ms with 1, {1000 * seconds[2]:.3g} ms with 2"


@pytest.mark.parametrize(("one", "count"), [(0.8, 1), (1.01, 1), (1.16, 1), (1.19, 2)])
def test_more_threads_must_be_worth_the_cores_that_they_take_from_the_host(machine, one, count):
    machine.seconds = {1: one * 0.01, 2: 0.01}
    assert machine.choose().count == count


def test_all_half_and_one_are_measured_on_many_cores(machine):
    machine.count, machine.seconds = 16, {1: 0.08, 8: 0.01, 16: 0.03}
    assert machine.choose().count == 8
    assert sorted(machine.passes) == sorted([(n, 1) for n in (1, 8, 16)] + (1 + ROUNDS) * [(n, 16) for n in (1, 8, 16)])


@pytest.mark.parametrize("stall", range(4 + 2 * ROUNDS))
def test_one_slow_pass_is_no_reason(machine, stall):
    machine.stall = stall
    assert machine.choose().count == 2


@pytest.mark.parametrize("tokens", [1, 16])
def test_a_count_that_changes_a_bit_is_never_chosen(machine, tokens):
    machine.seconds, machine.bits = BUSY, {(1, tokens): 1e-30}
    assert machine.choose().count == 2


def test_one_use_decides_for_those_inside_it(machine):
    outer = machine.choose()
    machine.seconds = BUSY
    inner = machine.choose()
    with outer.in_use(), inner.in_use():
        assert machine.count == 2
    with inner.in_use():
        assert machine.count == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m, p: p.setenv("OMP_NUM_THREADS", "2"), "2: OMP_NUM_THREADS is set"),
        (lambda m, p: p.setenv("MKL_NUM_THREADS", "2"), "2: MKL_NUM_THREADS is set"),
        (lambda m, p: p.setattr(backend, "on_cpu", lambda: False), "not compute on the CPU"),
        (lambda m, p: m.set(None), "no such setting"),
        (lambda m, p: m.set(1), "1: only one thread is available"),
    ],
    ids=["OMP_NUM_THREADS", "MKL_NUM_THREADS", "GPU", "no BLAS", "one thread"],
)
def test_where_there_is_nothing_to_choose_nothing_is_measured_or_set(machine, monkeypatch, change, said):
    change(machine, monkeypatch)
    monkeypatch.setattr(backend, "set_blas_threads", lambda count: pytest.fail("was set"))
    choice = machine.choose()
    with choice.in_use():
        assert (choice.count, machine.passes) == (None, [])
    assert said in str(choice)


def test_setting_threads_changes_what_the_blas_reports():
    if not on_cpu() or backend.blas_threads() is None:
        pytest.skip("neither MKL nor OpenBLAS is loaded")
    for count in (1, 2):
        backend.set_blas_threads(count)
        assert backend.blas_threads() == min(count, os.cpu_count())


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
    model = qwen3_model(0)
    expected, _ = plain_greedy(model, [1, 2, 3], 8)
    decoder = DFlashSpeculativeDecoder(model, Counting([1, 2, 3, *expected], 32), policy="full")
    decoder.threads = machine.choose()
    assert decoder.spec_generate([1, 2, 3], 8).tolist() == [[1, 2, 3, *expected]]
    decoder.cache_prompt([1, 2, 3], decoder.make_prompt_cache())
    assert reads == [2, 2]
    assert set(drafts) == {1}
    assert machine.count == 2
