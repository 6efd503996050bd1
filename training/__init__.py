"""Training a drafter, in stages. A stage uses only the results of the stages before it.

1. ``data``: conversations become shards of tokens.
2. ``features``: the frozen target's hidden states for them.
3. ``batches``: the sequences and anchors of each batch.
4. ``drafters``: from a drafter to the loss of a batch.
5. ``loop``: from a loss to weights, in a run that can be interrupted at any moment.
6. ``evaluate`` and ``export``: acceptance by decoding; the published format.

``recipe`` describes a run, ``train`` carries it out, and ``pipeline`` runs all stages.

A whole run     load_recipe, Recipe, run_recipe, read_log
Data            prepare, PrepareSettings, open_dataset
A loop          Batches, with_target_pass, new_drafter, drafter_loss; fit, FitSettings
An objective    register_objective, Predictions
A callback      register_callback, RunInfo, StopTraining

These names load on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .batches import Batches as Batches
    from .callbacks import RunInfo as RunInfo
    from .callbacks import StopTraining as StopTraining
    from .callbacks import register_callback as register_callback
    from .data.dataset import open_dataset as open_dataset
    from .data.prepare import PrepareSettings as PrepareSettings
    from .data.prepare import prepare as prepare
    from .drafters.init import new_drafter as new_drafter
    from .drafters.loss import drafter_loss as drafter_loss
    from .drafters.objectives import Predictions as Predictions
    from .drafters.objectives import register_objective as register_objective
    from .features import with_target_pass as with_target_pass
    from .loop.fit import fit as fit
    from .loop.run_folder import read_log as read_log
    from .loop.settings import FitSettings as FitSettings
    from .recipe import Recipe as Recipe
    from .recipe import load_recipe as load_recipe
    from .train import train as run_recipe  # noqa: F401

_MODULE_OF = {
    "Batches": "batches",
    "FitSettings": "loop.settings",
    "Predictions": "drafters.objectives",
    "PrepareSettings": "data.prepare",
    "Recipe": "recipe",
    "RunInfo": "callbacks",
    "StopTraining": "callbacks",
    "drafter_loss": "drafters.loss",
    "fit": "loop.fit",
    "load_recipe": "recipe",
    "new_drafter": "drafters.init",
    "open_dataset": "data.dataset",
    "prepare": "data.prepare",
    "read_log": "loop.run_folder",
    "register_callback": "callbacks",
    "register_objective": "drafters.objectives",
    "run_recipe": "train:train",  # `train` is the module: a package's attribute is its submodule, once imported
    "with_target_pass": "features",
}

__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, inside = _MODULE_OF[name].partition(":")
    value = globals()[name] = getattr(import_module(f".{module}", __name__), inside or name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
