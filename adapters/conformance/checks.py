"""The checks that decode, and all checks in order."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
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
RIGHT = 16 * (0.0,) + 24 * (0.8,) + 24 * (1.0,)  # the chances that drafts are right: never, mostly, always
NEAR_TIE = 1e-3  # a best token that leads by less may lose its lead to rounding


@dataclass
class FullTrial(Trial):
    """A trial that also decodes, knows the model's objects from before it, and says why a check was skipped.

    Args:
        right: For each token that is decoded, the chance that it is drafted rightly.
    """

    right: Sequence[float] = RIGHT
    skipped: str = ""

    def __post_init__(self) -> None:
        self.objects = model_objects(self.target.model)

    @cached_property
    def prompt(self) -> list[int]:
        """Random token ids."""
        return cast(list[int], self.tokens(LENGTH, self.seed)[0].tolist())

    @cached_property
    def plain(self) -> tuple[list[int], list[float]]:
        """What the model's own call writes after :attr:`prompt`, and each token's lead over the second best."""
        model, cache = self.target.model, self.target.make_cache(**self.cache_options)
        tokens: list[int] = []
        leads: list[float] = []
        cache.set_in_prompt(True)
        model(mx.array([self.prompt[:-1]]), cache=cache)
        cache.set_in_prompt(False)
        inputs = mx.array([self.prompt[-1:]])
        for _ in self.right:
            logits = model(inputs, cache=cache)[0, -1].astype(mx.float32)
            second, best = cast(list[float], mx.sort(logits)[-2:].tolist())
            tokens.append(int(mx.argmax(logits)))
            leads.append(best - second)
            inputs = mx.array([tokens[-1:]])
        return tokens, leads


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


class ScriptedDrafter:
    """Drafts the plain greedy text, each token rightly with its own chance; if not, the right one comes second."""

    block_size = BLOCK
    target_layer_ids: tuple[int, ...] = ()

    def __init__(self, trial: FullTrial):
        plain, _ = trial.plain
        self.text = [*trial.prompt, *plain, *[0] * BLOCK]
        self.right = [*[0.0] * len(trial.prompt), *trial.right, *[0.0] * BLOCK]
        self.vocab, self.chance = trial.target.vocab_size, random.Random(0)

    def bind(self, target: LoadedTargetModel) -> None:
        """Nothing of the target is used."""

    def make_cache(self) -> SimpleNamespace:
        return SimpleNamespace(offset=0)

    def extend_context(self, features: mx.array, cache: SimpleNamespace, tokens: mx.array) -> None:
        cache.offset += tokens.shape[1]

    def propose(self, anchor: mx.array, length: int, cache: SimpleNamespace) -> Proposal:
        """Drafts with logits, from which a tree can be grown."""
        drafted = slice(cache.offset + 1, cache.offset + 1 + length)
        right_1N = mx.array([self.text[drafted]])
        wrong_1N = mx.array([[self.chance.random() >= right for right in self.right[drafted]]])
        drafts_1N = (right_1N + wrong_1N) % self.vocab
        ids_V = mx.arange(self.vocab)
        logits = mx.where(drafts_1N[..., None] == ids_V, 5.0, mx.where(right_1N[..., None] == ids_V, 4.0, 0.0))
        return Proposal(drafts_1N, logits)


def decoding_is_plain(trial: FullTrial) -> None:
    """Speculative decoding gives plain greedy decoding's text, while drafts are never, mostly and always right."""
    _compare_text(trial, ScriptedDrafter(trial), "drafts")


def _trees(trial: FullTrial) -> None:
    """The same with trees of drafts; skipped, with the reason, if the target cannot verify trees."""
    try:
        trial.target.check_trees(trial.target.make_cache(**trial.cache_options))
    except IncompatibleModelsError as error:
        trial.skipped = one_line(error, limit=1000)
        return
    drafter = TreeDrafter(ScriptedDrafter(trial), NODES)
    _compare_text(trial, cast(Drafter, drafter), f"trees of {NODES} drafts")


def _compare_text(trial: FullTrial, drafter: Drafter, what: str) -> None:
    run = Decoding(trial.target, drafter)
    state = prefill(run, trial.prompt, target_cache=trial.target.make_cache(**trial.cache_options))
    for _ in decode(run, state, len(trial.right), BLOCK):
        pass
    text = state.tokens[len(trial.prompt) :]
    for i, (ours, plain, lead) in enumerate(zip(text, *trial.plain, strict=True)):
        if ours != plain and lead < NEAR_TIE:
            break  # a near tie: plain decoding itself depends on rounding here
        if ours != plain:
            raise Mismatch(f"token {i} is {ours}, plain decoding writes {plain} ({what})")


# --- the model itself ------------------------------------------------------------------------------------


def model_objects(model: nn.Module) -> dict[str, Any]:
    """Every module and array of ``model`` by name."""
    return dict(model.named_modules()) | flat(model.parameters())


def _same_objects(trial: FullTrial) -> None:
    """The model has the modules from before the checks, and equal weights: some models replace their own in a pass."""
    before, after = trial.objects, model_objects(trial.target.model)
    for name in before | after:
        new, old = after.get(name), before.get(name)
        if new is old:
            continue
        if not (isinstance(new, mx.array) and isinstance(old, mx.array) and mx.array_equal(new, old).item()):
            raise Mismatch(f"{name} changed")


def _drafter_sizes(trial: FullTrial) -> None:
    """The config has the sizes of a new drafter; if not, a recipe must set them, and the check is skipped."""
    config = trial.target.adapter.config
    missing = [name for name in DRAFTER_SIZES if not isinstance(getattr(config, name, None), int)]
    if missing:
        trial.skipped = (
            f"the config gives no {', '.join(missing)}; override config to give them, or set them in the recipe, "
            f"as drafter.{missing[0]}"
        )


CHECKS: dict[str, Callable[[FullTrial], None]] = {
    **TRIAL,
    "prefill in chunks equals prefill at once": _chunks,
    "decoding equals plain greedy decoding": decoding_is_plain,
    "decoding trees equals plain greedy decoding": _trees,
    "a drafter's sizes follow from the config": _drafter_sizes,
    "the model's own objects are unchanged": _same_objects,
}
"""All checks in order: first those of a few passes, then those that decode."""
