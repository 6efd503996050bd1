"""What ``dflash doctor`` shows: this machine, what a target would use, what a drafter is, and what its blocks cost."""

import dataclasses
import json
import platform
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from ..core import backend
from ..core.environment import PACKAGES, device_name, package_version
from ..core.files import flat
from ..decoding.block import Decoding
from ..decoding.loop import decode, prefill
from ..drafters.checkpoints.config import DFlashConfig
from ..drafters.checkpoints.quantized import description
from ..drafters.kinds import drafters
from ..generate import DFlashSpeculativeDecoder
from ..policies.adaptive import LENGTHS
from ..policies.base import BlockRecord, Policy
from ..policies.threads import threads_for
from ..target import LoadedTargetModel
from ..target.rewind import describe

_MATMUL_SIZE = 1024  # a fraction of a second with the slowest BLAS
_REPEATS = 5
_BLOCK_SIZE = 16  # tokens of a pass, as published drafters have them
_ROUNDS, _PLAIN_STEPS = 7, 4  # blocks of each length; plain steps in a round
_CONTEXT = 64  # tokens before the timed blocks
RATES = (0.3, 0.5, 0.7, 0.9)
"""Acceptance rates for which :func:`costs_report` gives speed-ups."""


# --- machine and target ------------------------------------------------------------------------------------


def machine_report() -> dict[str, str]:
    """Versions, device and measured speed of this machine, in the order in which to show them."""
    report = {name: package_version(name) for name in PACKAGES}
    report["python"] = platform.python_version()
    report["platform"] = platform.platform()
    report["device"] = device_name()
    report["BLAS (CPU)"] = backend.blas
    choice = f"up to {backend.blas_threads()}; each decoder takes the fewest that are about as quick"
    report["BLAS threads"] = backend.why_blas_threads_stay() or choice
    report["float32 product"] = f"{matmul_gflops():.0f} GFLOP/s at {_MATMUL_SIZE} x {_MATMUL_SIZE} on this device"
    return report


def target_report(target: LoadedTargetModel, name: str) -> dict[str, str]:
    """What ``target``, loaded from ``name``, is and would use.

    A cache without an exact rewind is reported, not raised.
    """
    caches, weights = make_prompt_cache(target.model), flat(target.model.parameters()).values()
    threads = threads_for(target, min(_BLOCK_SIZE, target.max_length or _BLOCK_SIZE))
    return {
        "target": name,
        "adapter": type(target.adapter).__name__,
        "layers": str(target.num_layers),
        "hidden size": str(target.hidden_size),
        "vocabulary": str(target.vocab_size),
        "longest sequence": str(target.max_length or "not given"),
        "caches and rewind": describe_caches(caches),
        "compute dtype": _dtypes(w for w in weights if mx.issubdtype(w.dtype, mx.floating)),
        "BLAS threads": str(threads),
    }


def describe_caches(caches: list[Any]) -> str:
    """Cache kinds with their counts and rewind rules, such as ``28 KVCache (trim)``."""
    counts = Counter(describe(caches))
    kinds = [f"{n} {kind} ({rule or 'no exact rewind: cannot be decoded'})" for (kind, rule), n in counts.items()]
    return ", ".join(kinds)


def matmul_gflops(size: int = _MATMUL_SIZE) -> float:
    """Best rate of a few float32 matrix products ``[size, size] @ [size, size]`` in GFLOP/s."""
    a = mx.random.uniform(shape=(size, size), key=mx.random.key(0))
    mx.eval(a, a @ a)
    seconds = []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        mx.eval(a @ a)
        seconds.append(time.perf_counter() - begin)
    return 2 * size**3 / min(seconds) / 1e9


# --- a drafter ---------------------------------------------------------------------------------------------

MEANINGS = {
    "hidden_size": "width of drafter and target",
    "intermediate_size": "width of the MLP",
    "num_hidden_layers": "layers of the drafter",
    "num_attention_heads": "query heads",
    "num_key_value_heads": "key-value heads",
    "vocab_size": "tokens of the target",
    "mask_token_id": "the token that stands for what is not yet drafted",
    "head_dim": "size of a head",
    "num_target_layers": "layers of the target that it was trained for",
    "block_size": "positions that one pass fills",
    "target_layer_ids": "target layers whose outputs it reads, from 0",
    "max_position_embeddings": "longest sequence that it was made for",
    "rope_theta": "base of the rotary positions",
    "rope_scaling": "how rotary positions are stretched, on all layers",
    "rope_parameters": "rotary positions of each layer type",
    "rope_is_neox_style": "false: rotary positions turn neighbouring pairs",
    "rms_norm_eps": "added to the mean square in norms",
    "layer_types": "which layers see all of the context, and which a window of it",
    "sliding_window": "tokens that a sliding layer sees, its own among them",
    "is_causal": "whether a position sees the block after it (false) or not (true); null: not on sliding layers",
    "input_embedding_scale": "factor on the target's embeddings",
    "output_multiplier": "factor on the target's logits",
    "final_logit_softcapping": "cap c of logits, c * tanh(x / c)",
    "attention_bias": "biases in the attention's projections",
    "sample_from_anchor": "whether the anchor's position predicts the first draft",
    "elastic_blocks": "whether it has learned blocks of every length, and fills only what is asked for",
    "draft_vocab_size": "tokens that it can draft, if not all",
    "target_fingerprint": "the target that it was trained for",
    "model_type": "the layers' family",
    # DFlash 2
    "conv_kernel_size": "rows of the block that a convolution mixes",
    "conv_group_size": "channels that share a convolution's dynamic coefficients",
    "selector_rank": "numbers for each token in the selector's tables",
    "selector_top_k": "candidates at each position, among which the selector chooses",
    "selector_vocab_size": "ids below it can be candidates; larger ones are padding",
    # DSpark
    "markov_rank": "numbers for each token in the Markov head's tables; 0: no such head",
    "markov_head_type": "how the token before changes the logits: vanilla, gated or rnn",
    "enable_confidence_head": "whether a head says how likely each draft is accepted",
    "confidence_head_with_markov": "whether that head reads the token before too",
    "confidence_temperatures": "divisors of that head's logits, one a draft",
    # Domino
    "gru_hidden_dim": "numbers in the state that remembers the block's tokens",
    "emb_dim": "rank of what that state adds to the logits",
    "pure_draft_prefix_len": "drafts at the start of a block to which it adds nothing",
}
"""Meanings of the keys of published configs."""


def drafter_report(drafter: Any, name: str) -> dict[str, str]:
    """What ``drafter``, loaded from ``name``, is and reads, in the order in which to show it.

    Keys of another package's kind are shown without a meaning, unless that package adds one to :data:`MEANINGS`.
    """
    kind = next((kind for kind, known in drafters.all().items() if known is type(drafter)), None)
    about = (type(drafter).__doc__ or "").strip().partition("\n")[0]
    report = {
        "drafter": name,
        "kind": f"{kind or type(drafter).__name__}: {about}",
        "drafts": f"up to {drafter.block_size - 1} tokens a block",
        "reads": _features(drafter.target_layer_ids),
    }
    if isinstance(drafter, nn.Module):
        report["weights"] = _weights(drafter)
    config = getattr(drafter, "config", None)
    if isinstance(config, DFlashConfig):
        for field in dataclasses.fields(config):
            meaning = MEANINGS.get(field.name)
            report[field.name] = f"{_shown(getattr(config, field.name))}{f': {meaning}' if meaning else ''}"
    return report


def _features(layer_ids: tuple[int, ...]) -> str:
    if not layer_ids:
        return "the tokens alone"
    return f"the outputs of the target's layers {', '.join(map(str, layer_ids))}"


def _weights(model: nn.Module) -> str:
    weights = flat(model.parameters())
    count = sum(w.size for w in weights.values() if mx.issubdtype(w.dtype, mx.floating))
    quantised = description(model)
    bits = f", quantised to {quantised['bits']} bits" if quantised else ""
    return f"{len(weights)} tensors, {count:,} floating-point numbers, {_dtypes(weights.values())}{bits}"


def _dtypes(weights: Iterable[mx.array]) -> str:
    """Dtypes of the weights, the most frequent first."""
    return ", ".join(name for name, _ in Counter(str(w.dtype).removeprefix("mlx.core.") for w in weights).most_common())


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        parts = [str(part) for part in value]
        return f"{len(parts)} x {parts[0]}" if len(parts) > 1 and len(set(parts)) == 1 else ", ".join(parts) or "none"
    return value if isinstance(value, str) else json.dumps(value)


# --- the cost of blocks ------------------------------------------------------------------------------------


class EachLength(Policy):
    """Plain steps, then a block of each length, again and again: load on the machine affects all of them alike."""

    def __init__(self, lengths: Sequence[int]):
        self.times: dict[int, list[float]] = {0: [], **{length: [] for length in lengths}}
        self._todo = [length for _ in range(_ROUNDS) for length in (*[0] * _PLAIN_STEPS, *lengths)]

    @property
    def done(self) -> bool:
        return not self._todo

    def sleep(self) -> int:
        # All of a round at once: a single step could not overlap with the previous one.
        return next((i for i, length in enumerate(self._todo) if length), len(self._todo))

    def draft_length(self, most: int) -> int:
        return min(self._todo[0] if self._todo else most, most)

    def observe(self, block: BlockRecord) -> None:
        length = 0 if block.asleep else block.verified
        if self._todo and self._todo[0] == length:
            self.times[self._todo.pop(0)].append(block.seconds)


def costs(decoder: DFlashSpeculativeDecoder, context: int = _CONTEXT) -> dict[int, float]:
    """Median seconds of a block by the number of tokens that it drafts and verifies, after ``context`` tokens.

    0 stands for a plain step. A drafter that proposes fewer tokens than asked for has no time for those lengths.
    """
    context = min(context, decoder.max_seq_length // 2)
    lengths = [k for k in LENGTHS if k < decoder.block_size]
    policy = EachLength(lengths)
    run = Decoding(decoder.loaded_target, decoder.draft_model, policy=policy)
    with decoder.threads.in_use():
        state = prefill(run, [i % decoder.loaded_target.vocab_size for i in range(context)])
        room = min(decoder.max_seq_length - context, _ROUNDS * (_PLAIN_STEPS + sum(lengths) + len(lengths)))
        for _ in decode(run, state, room, decoder.block_size):
            if policy.done:
                break
    return {length: statistics.median(times) for length, times in policy.times.items() if times}


def costs_report(costs: dict[int, float]) -> list[tuple[str, ...]]:
    """Rows of text: each length with its time, the acceptance rate from which it beats plain decoding, and speed-ups.

    A rate is that of every draft whose predecessors were accepted, so the default policy aims at the best of these
    speed-ups. The first row is plain decoding.
    """
    plain = costs[0]

    def speedup(length: int, rate: float) -> float:
        return sum(rate**i for i in range(length + 1)) * plain / costs[length]

    best = {rate: max(costs, key=lambda length: speedup(length, rate)) for rate in RATES}
    rows = []
    for length, seconds in costs.items():
        pays = next((f"{rate / 100:.2f}" for rate in range(101) if speedup(length, rate / 100) >= 1), "never")
        gains = (f"{speedup(length, rate):.2f}{'*' if best[rate] == length else ''}" for rate in RATES)
        rows.append((str(length), f"{1000 * seconds:.2f}", f"{seconds / plain:.2f}", pays if length else "", *gains))
    return rows
