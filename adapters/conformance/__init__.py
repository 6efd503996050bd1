"""Conformance: does a target decode exactly, and would a drafter fit it? One call checks everything they rely on."""

from collections.abc import Callable, Iterator
from typing import Any

import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from dflash.core.errors import DFlashError, IncompatibleModelsError, one_line
from dflash.target import LoadedTargetModel
from dflash.target.rewind import describe
from dflash.target.trial import run

from .checks import CHECKS, FullTrial
from .report import Check, Report

__all__ = ["Check", "Report", "check", "run_checks"]


def check(
    model: nn.Module | LoadedTargetModel,
    rounds: int = 300,
    seed: int = 0,
    *,
    on_check: Callable[[Check], None] | None = None,
    show: bool = False,
    **cache_options: Any,
) -> Report:
    """Check that ``model`` (from mlx-lm, or a :class:`~dflash.LoadedTargetModel`) decodes exactly.

    Args:
        model: The target; its weights are only read.
        rounds: Blocks of random length and acceptance to verify and rewind, at least 1.
        seed: Seed for tokens, block lengths and acceptances.
        on_check: Called with each check as it ends.
        show: Whether the rounds show their progress.
        cache_options: As in :meth:`~dflash.LoadedTargetModel.make_cache` (``max_kv_size``, ``kv_bits``).

    Raises ``DFlashError`` for fewer than one round. Faults of the target are reported, not raised.
    """
    if rounds < 1:
        raise DFlashError(f"rounds must be at least 1, got {rounds}.")
    tell = on_check or (lambda _: None)
    module = model.model if isinstance(model, LoadedTargetModel) else model
    model_type = str(getattr(module, "model_type", "?"))
    try:
        target = model if isinstance(model, LoadedTargetModel) else LoadedTargetModel(model)
    except IncompatibleModelsError as error:
        found = Check("adapter", one_line(error, limit=1000))
        tell(found)
        return Report(model_type, "", describe(make_prompt_cache(module)), [found])
    checks = []
    for found in run_checks(FullTrial(target, rounds, seed, cache_options, wrap=True, show=show)):
        tell(found)
        checks.append(found)
    try:
        caches = describe(target.make_cache(**cache_options))
    except DFlashError:
        caches = describe(make_prompt_cache(module))
    return Report(model_type, type(target.adapter).__name__, caches, checks)


def run_checks(trial: FullTrial) -> Iterator[Check]:
    """Each check as it ends. If the first fails, there are no caches, and no other check can run."""
    for number, (name, step) in enumerate(CHECKS.items()):
        trial.skipped = ""
        found = Check(name, run(step, trial), trial.skipped)
        yield found
        if number == 0 and not found.passed:
            return
