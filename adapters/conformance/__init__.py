"""Does a target decode exactly here? One call that tries everything the decoder relies on.

Knows how to compare: features with the layers' own outputs, rewound caches with caches that were fed the
committed tokens only, decoding with plain greedy decoding. Must not know any one architecture.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache
from rich.markup import escape
from rich.table import Table

from ..base import TargetAdapter
from .compare import Mismatch, assert_close, assert_same_caches, named_arrays, windows

LENGTH = 24  # tokens of the checks that do not decode
BLOCK = 16  # most tokens in a verified block
DECODED = 64  # tokens decoded with a scripted drafter


@dataclass(frozen=True)
class Check:
    """One row of the report; ``difference`` is the first one found, empty where the check passed."""

    name: str
    difference: str = ""

    @property
    def passed(self) -> bool:
        """Whether nothing differed."""
        return not self.difference


@dataclass(frozen=True)
class Report:
    """What :func:`check` found.

    Args:
        model_type: The model's architecture.
        adapter: Name of its adapter class; empty if none fits.
        caches: Cache class of each layer with its rewind rule, ``None`` where there is none.
        checks: One entry a check, in the order in which they ran.
    """

    model_type: str
    adapter: str
    caches: list[tuple[str, str | None]] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether the target decodes exactly, as far as the checks can tell."""
        return bool(self.checks) and all(c.passed for c in self.checks)

    @property
    def failure(self) -> str:
        """The first failed check and its difference on one line; empty if all passed."""
        return next((f"{c.name}: {c.difference}" for c in self.checks if not c.passed), "")

    @property
    def cache_kinds(self) -> str:
        """Distinct cache classes, in the order of their layers."""
        return ", ".join(dict.fromkeys(name for name, _ in self.caches))

    def table(self) -> Table:
        """For a terminal: check, verdict, first difference."""
        title = f"{self.model_type}: {self.adapter or 'no adapter'}; caches: {self.cache_kinds or 'unknown'}"
        table = Table("check", "verdict", "first difference", title=title, title_justify="left")
        for c in self.checks:
            table.add_row(c.name, "[green]pass[/]" if c.passed else "[red]fail[/]", escape(c.difference))
        return table


def check(model: Any, rounds: int = 300, seed: int = 0, **cache_options: Any) -> Report:
    """Check that ``model`` (from mlx-lm, or a :class:`~dflash.LoadedTargetModel`) decodes exactly here.

    Args:
        model: The target; its weights are only read.
        rounds: Blocks of random length and acceptance that are verified and rewound.
        seed: Of tokens, lengths and acceptances.
        cache_options: As in :meth:`~dflash.LoadedTargetModel.make_cache` (``max_kv_size``, ``kv_bits``).
    """
    from dflash.errors import IncompatibleModelsError
    from dflash.target import LoadedTargetModel
    from dflash.target.rewind import describe

    if isinstance(model, LoadedTargetModel):
        target = model
    else:
        try:
            target = LoadedTargetModel(model)
        except IncompatibleModelsError as error:
            caches = describe(make_prompt_cache(model))
            return Report(str(getattr(model, "model_type", "?")), "", caches, [Check("adapter", _one_line(error))])
    before = _objects(target.model)
    checks = _run(_checks(target, rounds, seed, cache_options))
    checks += _run([("same module objects afterwards", lambda: _same_objects(before, target.model))])
    try:
        caches = describe(target.make_cache(**cache_options))
    except IncompatibleModelsError:
        caches = describe(make_prompt_cache(target.model))
    model_type = str(getattr(target.model, "model_type", "?"))
    return Report(model_type, type(target.adapter).__name__, caches, checks)


def quick_failure(adapter: TargetAdapter) -> str | None:
    """The first difference that a few forward passes show, or ``None``: whether to trust a generic adapter."""
    from dflash.target import LoadedTargetModel

    target = LoadedTargetModel(adapter.model, adapter=adapter)
    checks = _checks(target, rounds=6, seed=0, cache_options={}, wrap=False)[:4]
    failed = next((c for c in _run(checks, stop=True) if not c.passed), None)
    return None if failed is None else f"{failed.name}: {failed.difference}"


_Step = tuple[str, Callable[[], None]]


def _checks(target: Any, rounds: int, seed: int, cache_options: dict[str, Any], wrap: bool = True) -> list[_Step]:
    tokens = _random_tokens(target, LENGTH, seed)
    return [
        ("every cache can be rewound", lambda: target.make_cache(**cache_options) and None),
        ("features are the layers' outputs", lambda: _features(target, tokens)),
        ("backbone, then head, is the model", lambda: _logits(target, tokens)),
        ("rewound is never seen", lambda: _rewinds(target, rounds, seed, cache_options, wrap)),
        ("prefill in chunks is prefill at once", lambda: _chunks(target, tokens, cache_options)),
        ("decoding is plain greedy decoding", lambda: _decoding(target, seed, cache_options)),
    ]


def _run(steps: Sequence[_Step], stop: bool = False) -> list[Check]:
    checks: list[Check] = []
    for name, step in steps:
        try:
            step()
            checks.append(Check(name))
        except Exception as error:  # whatever a stranger's model raises is a finding
            checks.append(Check(name, _one_line(error)))
            if stop or len(checks) == 1:  # without caches nothing below can run
                break
    return checks


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    known = isinstance(error, Mismatch) or type(error).__module__.startswith("dflash")
    return text if known else f"{type(error).__name__}: {text}"


def _random_tokens(target: Any, length: int, seed: int) -> mx.array:
    return mx.random.randint(0, target.vocab_size, (1, length), key=mx.random.key(seed))


# --- one pass --------------------------------------------------------------------------------------------


def _features(target: Any, tokens: mx.array) -> None:
    layers = range(target.num_layers)
    with _outputs_of_layers(target.adapter.layers) as outputs:
        target.model(tokens, cache=make_prompt_cache(target.model))
    _, features = target.forward_hidden(tokens, target.make_cache(), layers)
    found = mx.split(features, target.num_layers, axis=-1)
    for i in layers:
        if id(target.adapter.layers[i]) not in outputs:
            raise Mismatch(f"layer {i} is not called by the model")
        assert_close(f"layer {i}", found[i], target.adapter.feature(outputs[id(target.adapter.layers[i])]))
    if found[0].shape != (*tokens.shape, target.hidden_size):
        raise Mismatch(f"features of a layer have shape {found[0].shape}, hidden_size is {target.hidden_size}")


@contextmanager
def _outputs_of_layers(layers: Sequence[nn.Module]) -> Iterator[dict[int, Any]]:
    """Layers' outputs by ``id``, taken at their classes: a way of looking that adapters do not use."""
    outputs: dict[int, Any] = {}
    wanted = {id(layer) for layer in layers}
    originals = {cls: cls.__call__ for cls in {type(layer) for layer in layers}}

    def spying(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            output = original(self, *args, **kwargs)
            if id(self) in wanted:
                outputs[id(self)] = output
            return output

        return call

    for cls, original in originals.items():
        cls.__call__ = spying(original)  # type: ignore[method-assign]
    try:
        yield outputs
    finally:
        for cls, original in originals.items():
            cls.__call__ = original  # type: ignore[method-assign]


def _logits(target: Any, tokens: mx.array) -> None:
    stock = target.model(tokens, cache=make_prompt_cache(target.model))
    logits, _ = target.forward_with_hidden_states(tokens, target.make_cache(), ())
    assert_close("logits", logits, stock)


def _chunks(target: Any, tokens: mx.array, cache_options: dict[str, Any]) -> None:
    whole, pieces = target.make_cache(**cache_options), target.make_cache(**cache_options)
    expected, _ = target.forward_hidden(tokens, whole, ())
    for start in range(0, tokens.shape[1], 7):
        last, _ = target.forward_hidden(tokens[:, start : start + 7], pieces, ())
    assert_close("last hidden state", last[:, -1], expected[:, -1])
    assert_same_caches(pieces, whole)


# --- blocks and rewinds ----------------------------------------------------------------------------------


def _rewinds(target: Any, rounds: int, seed: int, cache_options: dict[str, Any], wrap: bool) -> None:
    """Verify blocks of which some tokens are rejected; beside it, a cache is fed the accepted ones only.

    With ``wrap``, a prompt first fills windows that the rounds alone would not.
    """
    chance = random.Random(seed)
    rewound, fed = target.make_cache(**cache_options), target.make_cache(**cache_options)
    window = max(windows(rewound), default=0)
    if wrap and window > 4 * BLOCK:
        prompt = _random_tokens(target, 2 * window + 1, seed)
        for cache in (rewound, fed):
            for start in range(0, prompt.shape[1], window):
                target.forward_hidden(prompt[:, start : start + window], cache, ())
    for round_number in range(rounds):
        block = chance.randint(1, BLOCK)
        kept = chance.randint(1, block)
        tokens = _random_tokens(target, block, chance.getrandbits(32))
        logits, _ = target.forward_with_hidden_states(tokens, rewound, ())
        held = rewound.offset
        target.rewind_kv_caches(rewound, held - (block - kept))
        expected, _ = target.forward_with_hidden_states(tokens[:, :kept], fed, ())
        where = f"after {fed.offset} tokens (round {round_number}, {kept} of {block} kept)"
        assert_close(f"logits {where}", logits[:, :kept], expected)
        assert_same_caches(rewound, fed, where)


# --- decoding --------------------------------------------------------------------------------------------


class _Scripted:
    """Drafts the plain greedy text, each token rightly with probability ``right``."""

    block_size, target_layer_ids = BLOCK, ()

    def __init__(self, text: list[int], vocab: int, right: float):
        self.text, self.vocab, self.right, self.chance = text, vocab, right, random.Random(0)

    def make_cache(self) -> Any:
        return _Count()

    def extend_context(self, features: mx.array, cache: Any, tokens: mx.array) -> None:
        cache.offset += tokens.shape[1]

    def propose(self, anchor: mx.array, length: int, cache: Any) -> Any:
        from dflash.drafters.protocol import Proposal

        planned = self.text[cache.offset + 1 :][:length]
        planned += [0] * (length - len(planned))
        wrong = [self.chance.random() >= self.right for _ in planned]
        return Proposal(mx.array([[(t + w) % self.vocab for t, w in zip(planned, wrong, strict=True)]]))


class _Count:
    offset = 0


def _decoding(target: Any, seed: int, cache_options: dict[str, Any]) -> None:
    from mlx_lm.sample_utils import make_sampler

    from dflash.decode import decode, prefill

    prompt = cast(list[int], _random_tokens(target, LENGTH, seed)[0].tolist())
    text, leads = _plain_greedy(target, prompt, cache_options)
    greedy = make_sampler(temp=0.0)
    for right in (0.0, 0.8, 1.0):
        drafter: Any = _Scripted(prompt + text, target.vocab_size, right)
        state = prefill(target, drafter, prompt, greedy, cache_options=cache_options)
        for _ in decode(target, drafter, state, DECODED, BLOCK, greedy):
            pass
        for i, (ours, plain, lead) in enumerate(zip(state.tokens[len(prompt) :], text, leads, strict=True)):
            if ours != plain and lead < 1e-3:
                break  # two tokens were equally good: plain decoding itself depends on rounding here
            if ours != plain:
                raise Mismatch(f"token {i} is {ours}, plain decoding writes {plain} (drafter right {right:.0%})")


def _plain_greedy(target: Any, prompt: list[int], cache_options: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Tokens one by one from the model's own call, and by how much each leads over the second best."""
    cache = target.make_cache(**cache_options)
    tokens: list[int] = []
    leads: list[float] = []
    inputs = mx.array([prompt])
    for _ in range(DECODED):
        logits = target.model(inputs, cache=cache)[0, -1].astype(mx.float32)
        second, best = cast(list[float], mx.sort(logits)[-2:].tolist())
        tokens.append(int(mx.argmax(logits)))
        leads.append(best - second)
        inputs = mx.array([tokens[-1:]])
    return tokens, leads


# --- the model itself ------------------------------------------------------------------------------------


def _objects(model: nn.Module) -> list[tuple[str, int]]:
    """Every module and array of the model by name, in order, with its identity."""
    modules = [(name, id(module)) for name, module in model.named_modules()]
    return modules + [(name, id(array)) for name, array in named_arrays(model)]


def _same_objects(before: list[tuple[str, int]], model: nn.Module) -> None:
    after = _objects(model)
    changed = next((name for (name, _), new in zip(before, after, strict=False) if (name, _) != new), None)
    if changed is not None or len(before) != len(after):
        raise Mismatch(f"{changed or 'the number of modules'} changed")
