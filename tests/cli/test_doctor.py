"""``dflash doctor``: this machine, a target, and what its blocks cost and bring."""

import re

import pytest
from mlx_lm.models.cache import BatchKVCache, KVCache
from support.cli import invoke
from support.models import TEXT_VOCAB

from dflash.core import backend
from dflash.evaluation import doctor


def test_doctor_shows_this_machine_a_target_and_what_a_block_costs(pair):
    result = invoke("doctor", *pair)
    assert result.exit_code == 0, result.output
    for expected in ("dflash-research", "mlx-lm", "GFLOP/s", backend.blas, "QwenAdapter", "4 KVCache (trim)"):
        assert expected in result.stdout
    assert "what a block costs and brings" in result.stdout
    assert doctor.EachLength([1, 3]).sleep() == 4
    (line,) = [x for x in result.stdout.splitlines() if x.startswith("unused tokens")]
    assert "'<|mask|>' (261)" in line
    assert f"{TEXT_VOCAB - 1} (no text)" in line  # a row of the table without a token


@pytest.mark.skipif(not backend.on_cpu() or not backend.blas_threads(), reason="no BLAS whose threads can be set")
def test_doctor_shows_how_many_threads_decode_and_why(pair, monkeypatch):
    for name in backend.BLAS_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(backend, "blas_threads", lambda: 2)
    monkeypatch.setattr(backend, "set_blas_threads", lambda count: True)  # or other tests would compute with two
    shown = invoke("doctor", *pair[:2]).stdout
    assert re.search(r"BLAS threads .*up to 2; each decoder takes the fewest that are about as quick", shown)
    assert re.search(r"[12]: a pass of 16 tokens takes .* ms with 1, .* ms with 2", shown)
    monkeypatch.setenv("MKL_NUM_THREADS", "2")
    assert invoke("doctor").stdout.count("2: MKL_NUM_THREADS is set") == 1


def test_doctor_says_from_which_acceptance_a_length_pays_and_which_one_is_best():
    rows = doctor.costs_report({0: 0.010, 1: 0.012, 3: 0.025})
    assert rows[1] == ("1", "12.00", "1.20", "0.20", "1.08*", "1.25*", "1.42*", "1.58*")
    assert rows[2] == ("3", "25.00", "2.50", "0.70", "0.57", "0.75", "1.01", "1.38")


def test_doctor_reports_a_cache_that_cannot_be_rewound():
    shown = doctor.describe_caches([KVCache(), BatchKVCache([0]), KVCache()])
    assert shown == "2 KVCache (trim), 1 BatchKVCache (no exact rewind: cannot be decoded)"
