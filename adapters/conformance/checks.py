"""The checks that decode, and all checks in order."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from dflash.adapters.base import DRAFTER_SIZES
from dflash.core.errors import IncompatibleModelsError, one_line
from dflash.core.files import flat
from dflash.decoding.block import Decoding
from dflash.decoding.loop import decode, prefill
from dflash.drafters.protocol import Drafter, Proposal
from dflash.drafters.tree import TreeDrafter
from dflash.target import LoadedTargetModel
from dflash.target.compare import Mismatch, assert_close, assert_same_caches, windows
from dflash.target.trial import BLOCK, LENGTH, TRIAL, Trial

NODES = 12  # drafts of a tree
DECODED = 64  # tokens decoded with a scripted drafter
NEAR_TIE = 1e-3  # a best token that leads by less may lose its lead to rounding


def _chunks(trial: Trial) -> None:
    """A prompt that fills the longest window, fed in chunks, gives the same caches and last hidden state as at once."""
    target = trial.target
    whole, pieces = (target.make_cache(**trial.cache_options) for _ in range(2))
    tokens = trial.tokens(LENGTH + max(windows(whole), default=0), trial.seed)
    chunk = max(7, tokens.shape[1] // 4)
    expected, _ = target.forward_hidden(tokens, whole, ())
    for start in range(0, tokens.shape[1], chunk):
        last, _ = target.forward_hidden(tokens[:, start : start + chunk], pieces, ())
    assert_close("last hidden state", last[:, -1], expected[:, -1])
    assert_same_caches(pieces, whole)


# --- decoding --------------------------------------------------------------------------------------------


@dataclass
class TokenCount:
    """A drafter's cache that only counts tokens."""

    offset: int = 0


class ScriptedDrafter:
    """Drafts the plain greedy text, each token correct with probability ``right``."""

    block_size = BLOCK
    target_layer_ids: tuple[int, ...] = ()

    def __init__(self, text: list[int], vocab: int, right: float):
        self.text, self.vocab, self.right, self.chance = text, vocab, right, random.Random(0)

    def bind(self, target: LoadedTargetModel) -> None:
        """Nothing of the target is used."""

    def make_cache(self) -> "TokenCount":
        return TokenCount()

    def extend_context(self, features: mx.array, cache: "TokenCount", tokens: mx.array) -> None:
        cache.offset += tokens.shape[1]

    def propose(self, anchor: mx.array, length: int, cache: "TokenCount") -> Proposal:
        planned = self.text[cache.offset + 1 :][:length]
        planned += [0] * (length - len(planned))
        wrong = [self.chance.random() >= self.right for _ in planned]
        return Proposal(mx.array([[(t + w) % self.vocab for t, w in zip(planned, wrong, strict=True)]]))


class UnsureDrafter(ScriptedDrafter):
    """The same with logits: where the first choice is wrong, the correct token is the second."""

    def propose(self, anchor: mx.array, length: int, cache: TokenCount) -> Proposal:
        """Drafts with logits, from which a tree can be grown."""
        drafts_1N = super().propose(anchor, length, cache).tokens
        right_1N = mx.array([(self.text[cache.offset + 1 :][:length] + [0] * length)[:length]])
        ids_V = mx.arange(self.vocab)
        logits = mx.where(drafts_1N[..., None] == ids_V, 5.0, mx.where(right_1N[..., None] == ids_V, 4.0, 0.0))
        return Proposal(drafts_1N, logits)


def _decoding(trial: Trial) -> None:
    """Speculative decoding gives plain greedy decoding's text, whether drafts are never, mostly or always right."""
    prompt = cast(list[int], trial.tokens(LENGTH, trial.seed)[0].tolist())
    text, leads = _plain_greedy(trial.target, prompt, trial.cache_options)
    for right in (0.0, 0.8, 1.0):
        drafter = ScriptedDrafter(prompt + text, trial.target.vocab_size, right)
        _compare_text(trial, drafter, prompt, text, leads, f"drafter right {right:.0%}")


def _trees(trial: Trial) -> None:
    """The same with trees of drafts; skipped, with the reason, if the target cannot verify trees."""
    assert isinstance(trial, FullTrial)
    try:
        trial.target.check_trees(trial.target.make_cache(**trial.cache_options))
    except IncompatibleModelsError as error:
        trial.skipped = one_line(error, limit=1000)
        return
    prompt = cast(list[int], trial.tokens(LENGTH, trial.seed)[0].tolist())
    text, leads = _plain_greedy(trial.target, prompt, trial.cache_options)
    drafter = TreeDrafter(UnsureDrafter(prompt + text, trial.target.vocab_size, 0.6), NODES)
    _compare_text(trial, cast(Drafter, drafter), prompt, text, leads, f"trees of {NODES} drafts")


def _compare_text(
    trial: Trial, drafter: Drafter, prompt: list[int], text: list[int], leads: list[float], what: str
) -> None:
    run = Decoding(trial.target, drafter)
    state = prefill(run, prompt, target_cache=trial.target.make_cache(**trial.cache_options))
    for _ in decode(run, state, DECODED, BLOCK):
        pass
    for i, (ours, plain, lead) in enumerate(zip(state.tokens[len(prompt) :], text, leads, strict=True)):
        if ours != plain and lead < NEAR_TIE:
            break  # a near tie: plain decoding itself depends on rounding here
        if ours != plain:
            raise Mismatch(f"token {i} is {ours}, plain decoding writes {plain} ({what})")


def _plain_greedy(
    target: LoadedTargetModel, prompt: list[int], cache_options: dict[str, Any]
) -> tuple[list[int], list[float]]:
    """Tokens one by one from the model's own call, and each token's lead over the second best."""
    cache = target.make_cache(**cache_options)
    tokens: list[int] = []
    leads: list[float] = []
    cache.set_in_prompt(True)
    target.model(mx.array([prompt[:-1]]), cache=cache)
    cache.set_in_prompt(False)
    inputs = mx.array([prompt[-1:]])
    for _ in range(DECODED):
        logits = target.model(inputs, cache=cache)[0, -1].astype(mx.float32)
        second, best = cast(list[float], mx.sort(logits)[-2:].tolist())
        tokens.append(int(mx.argmax(logits)))
        leads.append(best - second)
        inputs = mx.array([tokens[-1:]])
    return tokens, leads


# --- the model itself ------------------------------------------------------------------------------------


@dataclass
class FullTrial(Trial):
    """A trial that also records the model's objects at the start, and why a check was skipped."""

    skipped: str = ""

    @cached_property
    def objects(self) -> list[tuple[str, int]]:
        """:func:`model_objects` of the target, when first asked for."""
        return model_objects(self.target.model)


def model_objects(model: nn.Module) -> list[tuple[str, int]]:
    """Every module and array of ``model`` by name, in order, with its identity."""
    modules = [(name, id(module)) for name, module in model.named_modules()]
    return modules + [(name, id(array)) for name, array in flat(model.parameters()).items()]


def _same_objects(trial: Trial) -> None:
    """The model has the same module and array objects as before the checks."""
    assert isinstance(trial, FullTrial)
    before, after = trial.objects, model_objects(trial.target.model)
    changed = next((name for (name, _), new in zip(before, after, strict=False) if (name, _) != new), None)
    if changed is not None or len(before) != len(after):
        raise Mismatch(f"{changed or 'the number of modules'} changed")


def _drafter_sizes(trial: Trial) -> None:
    """The config has the sizes of a new drafter; if not, a recipe must set them, and the check is skipped."""
    assert isinstance(trial, FullTrial)
    config = trial.target.adapter.config
    missing = [name for name in DRAFTER_SIZES if not isinstance(getattr(config, name, None), int)]
    if missing:
        trial.skipped = (
            f"the config gives no {', '.join(missing)}; override config to give them, or set them in the recipe, "
            f"as drafter.{missing[0]}"
        )


CHECKS: dict[str, Callable[[Trial], None]] = TRIAL | {
    "prefill in chunks equals prefill at once": _chunks,
    "decoding equals plain greedy decoding": _decoding,
    "decoding trees equals plain greedy decoding": _trees,
    "a drafter's sizes follow from the config": _drafter_sizes,
    "the model's own objects are unchanged": _same_objects,
}
"""All checks in order: first those of a few passes, then those that decode."""
