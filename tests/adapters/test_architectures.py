"""Every architecture of the installed mlx-lm, small, through the conformance check, into a table.

``make architectures`` runs all of it and rewrites ``adapters/ARCHITECTURES.md`` where the outcome changed;
the ordinary run reads the table.
"""

import contextlib
import importlib.metadata
import io
import re
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.models.cache import ConcatenateKVCache

from dflash import LoadedTargetModel
from dflash.adapters import registered_adapters
from dflash.adapters.conformance import check
from dflash.adapters.conformance import small_models as small
from dflash.adapters.conformance.checks import FullTrial, decoding_is_plain
from dflash.target.rewind import describe

TABLE = Path(__file__).parents[2] / "adapters" / "ARCHITECTURES.md"
HEADER = """# Architectures

What `dflash.adapters.conformance.check` finds for a small random model of every architecture module of
mlx-lm {version}, on the CPU. Written by `make architectures` (`tests/adapters/test_architectures.py`); do not edit.

| architecture | adapter | caches | verdict |
|---|---|---|---|
"""
HYBRIDS = "qwen3_next qwen3_5 mamba2 jamba falcon_h1 nemotron_h granitemoehybrid lfm2 recurrent_gemma kimi_linear rwkv7"
ROUNDS = 300  # blocks to verify and rewind; together they wrap windows of 12 tokens some hundred times
CAUSES = {
    "phi3small": "mlx-lm's block-sparse mask for a token depends on the length of the pass that it is in",
    "plamo3": "mlx-lm masks for a window of one token more than the cache keeps, so that chunks change the output",
}
"""Why an architecture fails, where the first difference does not say it."""
NEAR_TIE = 1e-4  # a best token that leads by less may lose its lead to rounding


def row(name: str) -> str:
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # some modules print what they miss
            model = small.build(name)
    except (Exception, SystemExit) as error:
        return f"| {name} | | | not built: {type(error).__name__}: {' '.join(str(error).split())} |\n"
    report = check(model, ROUNDS)
    reason = report.failure.partition("does not fit: ")[2] or report.failure
    reason = reason.removesuffix("Write an adapter with dflash.adapters.register_adapter.").rstrip(" .")
    reason = re.sub(r"differs by \d\.\d(e-\d+)", r"differs by more than 1\1", reason)  # digits vary between runs
    cause = f"; cause: {CAUSES[name]}" if name in CAUSES else ""
    verdict = "pass" if report.passed else f"fail: {reason}{cause}"
    return f"| {name} | {report.adapter} | {report.cache_kinds} | {verdict} |\n"


@pytest.mark.architectures
def test_the_table_is_what_the_check_finds():
    version = importlib.metadata.version("mlx-lm")
    found = HEADER.format(version=version) + "".join(row(name) for name in small.architecture_names())
    written = TABLE.read_text() if TABLE.exists() else ""
    TABLE.write_text(found)
    assert found == written, f"{TABLE} was rewritten; look at the difference and commit it"


def passed() -> set[str]:
    rows = [line.split(" | ") for line in TABLE.read_text().splitlines()]
    return {cells[0].removeprefix("| ") for cells in rows if cells[-1] == "pass |"}


def test_the_table_has_every_architecture_and_what_must_pass_does():
    text = TABLE.read_text()
    assert all(f"| {name} |" in text for name in small.architecture_names())
    assert set(HYBRIDS.split()) <= passed()
    assert set(registered_adapters()) - {"mistral"} <= passed()  # mlx-lm loads mistral as llama
    assert len(passed()) > 100


# --- long texts, one model for each kind of cache ------------------------------------------------------

# None of their plain texts has a near tie, at which a rounding of either decoding would decide.
KINDS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "KVCache": ({"name": "qwen3"}, {}),
    "QuantizedKVCache": ({"name": "qwen3", "head_dim": 32}, {"kv_bits": 8, "kv_group_size": 32}),
    "RotatingKVCache": ({"name": "llama"}, {}),
    "KeptWindowCache": ({"name": "qwen3"}, {"max_kv_size": 13}),
    "ChunkedKVCache": ({"name": "llama4"}, {}),
    "ConcatenateKVCache": ({"name": "qwen3"}, {}),
    "ArraysCache": ({"name": "qwen3_5"}, {}),
    "CacheList(KVCache, KVCache)": ({"name": "deepseek_v32"}, {}),
    "CacheList(ArraysCache, KVCache)": ({"name": "falcon_h1"}, {}),
}


@pytest.mark.architectures
@pytest.mark.parametrize("kind", KINDS)
def test_2000_tokens_equal_plain_decoding_with_every_kind_of_cache(kind):
    sizes, options = KINDS[kind]
    model = small.build(**sizes)
    if kind == "ConcatenateKVCache":
        model.make_cache = lambda: [ConcatenateKVCache() for _ in model.layers]
    trial = FullTrial(LoadedTargetModel(model), cache_options=options, right=2000 * [0.9])
    assert kind in {name for name, _ in describe(trial.target.make_cache(**options))}
    _, leads = trial.plain
    assert min(leads) > NEAR_TIE
    decoding_is_plain(trial)
