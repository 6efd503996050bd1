"""Training a drafter, in stages: each room knows those before it only through what they hand on.

1. ``data``: conversations become shards of tokens.
2. ``features``: what the frozen target makes of them.
3. ``batches``: which sequences and which anchors make a batch.
4. ``drafters``: from a drafter to the loss of a batch.
5. ``loop``: from a loss to weights, in a run that can be stopped at any moment.
6. ``evaluate`` and ``export``: acceptance by decoding; the published format.

``recipe`` says what a run is made of and ``train`` carries it out; ``pipeline`` does all stages. Public names load on
first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .callbacks import RunInfo as RunInfo
    from .callbacks import register_callback as register_callback
    from .drafters.objectives import Predictions as Predictions
    from .drafters.objectives import register_objective as register_objective
    from .loop.fit import fit as fit
    from .loop.run_folder import read_log as read_log
    from .loop.settings import FitSettings as FitSettings
    from .recipe import Recipe as Recipe
    from .recipe import load_recipe as load_recipe

_MODULE_OF = {
    "FitSettings": "loop.settings",
    "Predictions": "drafters.objectives",
    "Recipe": "recipe",
    "RunInfo": "callbacks",
    "fit": "loop.fit",
    "load_recipe": "recipe",
    "read_log": "loop.run_folder",
    "register_callback": "callbacks",
    "register_objective": "drafters.objectives",
}

__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
    return value
