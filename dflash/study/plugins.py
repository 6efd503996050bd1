"""The parts of plug-ins that a study's cells use, and their sources: a changed part makes new cells.

A source is a hash of the file that registered the part and of what that imports from beside it. It is in the keys of
the cells that use the part. Cells without parts of plug-ins have keys without sources.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core.files import read_json, remove_unfinished, resolve_checkpoint, write_json
from ..core.registry import Registry
from ..decoding.sampling import LOGITS_PROCESSORS, SAMPLERS
from ..decoding.verify import VERIFY_RULES
from ..drafters.combined import own_name
from ..drafters.kinds import drafter_class, drafters, kind_in, needs_no_files
from ..policies.base import POLICIES
from ..training.drafters.objectives import OBJECTIVES
from ..training.recipe import Recipe
from .settings import BUNDLED, TRAINED

FILE = "plugins.json"
"""In a study's folder, the source of each part that it used last."""

logger = logging.getLogger(__name__)

Sources = dict[str, str]
"""The source of each part of a plug-in by its kind and name, such as ``verification rule typical``."""


def sources(*used: tuple[Registry[Any], Any]) -> Sources:
    """The sources of the parts of plug-ins among those ``used``, named with options or without."""
    named = [(registry, text.partition(":")[0]) for registry, text in used if isinstance(text, str)]
    found = {f"{registry.what} {name}": registry.source(name) for registry, name in named}
    return {part: source for part, source in found.items() if source is not None}


def sources_of_options(options: Mapping[str, Any]) -> Sources:
    """Of options of decoding."""
    single: dict[str, Registry[Any]] = {"verify": VERIFY_RULES, "policy": POLICIES, "sampler": SAMPLERS}
    processors = [(LOGITS_PROCESSORS, name) for name in options.get("logits_processors", ())]
    return sources(*((registry, options.get(name)) for name, registry in single.items()), *processors)


def sources_of_drafter(name: str) -> Sources:
    """Of a drafter by its name or folder; what a recipe trains is told by :func:`sources_of_recipe`."""
    name = own_name(name)
    if name not in (BUNDLED, TRAINED) and not needs_no_files(name):
        name = kind_in(read_json(resolve_checkpoint(name) / "config.json"))
        drafter_class(name)  # one that needs no files is refused
    return sources((drafters, name))


def sources_of_recipe(recipe: Recipe) -> Sources:
    """Of a recipe's objective and drafter."""
    start = sources_of_drafter(recipe.drafter.from_ or BUNDLED)
    return start | sources((OBJECTIVES, recipe.objective.kind), (drafters, recipe.drafter.kind))


def tell_changes(folder: Path, used: Sources) -> None:
    """Warn of each part that has changed since the study in ``folder`` used it last, or whose source is not known."""
    before = _last(folder)
    for part, source in used.items():
        if not source:
            logger.warning("The %s has no source file: if you change it, remove its answers from %s.", part, folder)
        elif before.get(part, source) != source:
            logger.warning("The %s has changed: its cells are new ones; the old answers stay in %s.", part, folder)


def keep(folder: Path, used: Sources) -> None:
    """Write which sources the study uses now."""
    if used:
        remove_unfinished(folder / FILE)
        write_json(folder / FILE, _last(folder) | used)


def _last(folder: Path) -> Sources:
    return read_json(folder / FILE) if (folder / FILE).exists() else {}
