"""Every architecture of the installed mlx-lm, small, through the conformance check, into a table.

``make architectures`` runs all of it and rewrites ``adapters/ARCHITECTURES.md`` where the outcome changed;
the ordinary run reads the table, and decodes a little with every kind of cache.
"""

import contextlib
import importlib.metadata
import io
import re
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import ConcatenateKVCache
from support.models import ScriptedDrafter

from dflash import LoadedTargetModel
from dflash.adapters import registered_adapters
from dflash.adapters.conformance import check
from dflash.adapters.conformance import small_models as small
from dflash.decoding.block import Decoding
from dflash.decoding.loop import decode, prefill
from dflash.target.rewind import TargetCache, describe

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


def concatenated(target: LoadedTargetModel, **_: object) -> TargetCache:
    return TargetCache(ConcatenateKVCache() for _ in range(target.num_layers))


# Seeds whose plain text has no near tie, at which a rounding of either decoding would decide.
KINDS: dict[str, tuple[Callable[[], nn.Module], dict[str, int]]] = {
    "KVCache": (lambda: small.build("qwen3"), {}),
    "QuantizedKVCache": (lambda: small.build("qwen3", seed=3, head_dim=32), {"kv_bits": 8, "kv_group_size": 32}),
    "RotatingKVCache": (lambda: small.build("llama"), {}),
    "KeptWindowCache": (lambda: small.build("qwen3", seed=3), {"max_kv_size": 13}),
    "ChunkedKVCache": (lambda: small.build("llama4"), {}),
    "ConcatenateKVCache": (lambda: small.build("qwen3"), {}),
    "ArraysCache": (lambda: small.build("qwen3_5", seed=5), {}),
    "CacheList(KVCache, KVCache)": (lambda: small.build("deepseek_v32"), {}),
    "CacheList(ArraysCache, KVCache)": (lambda: small.build("falcon_h1"), {}),
}


def assert_identical(kind: str, count: int, right: float) -> None:
    build, options = KINDS[kind]
    target = LoadedTargetModel(build())
    if kind == "ConcatenateKVCache":
        target.make_cache = lambda **_: concatenated(target)  # type: ignore[method-assign]
    prompt = [3, 1, 4, 1, 5]
    text, lead = plain(target, prompt, count, options)
    assert lead > NEAR_TIE
    drafter = ScriptedDrafter(prompt + text, target.vocab_size, right)
    run = Decoding(target, drafter)
    state = prefill(run, prompt, target_cache=target.make_cache(**options))
    assert any(kind in name for name, _ in describe(state.target_cache))
    accepted = [len(block.tokens) for block in decode(run, state, count, 16)]
    assert state.tokens == prompt + text
    assert min(accepted) < 8 < max(accepted), "acceptance should vary"


def plain(target: LoadedTargetModel, prompt: list[int], count: int, options: dict[str, int]) -> tuple[list[int], float]:
    """Tokens one by one from the model's own call, and the smallest lead of a best token over the second best."""
    cache, inputs, tokens, lead = target.make_cache(**options), mx.array([prompt]), [], float("inf")
    for _ in range(count):
        logits = target.model(inputs, cache=cache)[0, -1]
        second, best = mx.sort(logits)[-2:].tolist()
        lead = min(lead, best - second)
        tokens.append(int(mx.argmax(logits)))
        inputs = mx.array([tokens[-1:]])
    return tokens, lead


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_equals_plain_decoding_with_every_kind_of_cache(kind):
    assert_identical(kind, 150, right=0.9)


@pytest.mark.architectures
@pytest.mark.parametrize("kind", KINDS)
def test_2000_tokens_equal_plain_decoding_with_every_kind_of_cache(kind):
    assert_identical(kind, 2000, right=0.9)
