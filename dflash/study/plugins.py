"""The parts of plug-ins that a study's cells use, and their sources: a changed part makes new cells.

A source is a hash of the file that registered the part and of what that imports from beside it. It is in the keys of
the cells that use the part. Cells without parts of plug-ins have keys without sources.
"""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..adapters.registry import ADAPTERS, detect_model_architecture
from ..core.files import read_json, remove_unfinished, resolve_checkpoint, write_json
from ..core.registry import Registry
from ..decoding.sampling import LOGITS_PROCESSORS, SAMPLERS
from ..decoding.verify import VERIFY_RULES
from ..drafters.combined import PREFIX as COMBINED
from ..drafters.kinds import drafters, kind_of_files, needs_no_files
from ..policies.base import POLICIES
from ..target import LoadedTargetModel
from ..training.drafters.objectives import OBJECTIVES
from ..training.recipe import Recipe
from .settings import BUNDLED, TRAINED

FILE = "plugins.json"
"""In a study's folder, the source of each part that it used last."""

logger = logging.getLogger(__name__)

Sources = dict[str, str]
"""The source of each part of a plug-in by its kind and name, such as ``verification rule typical``."""


def sources(used: Iterable[tuple[Registry[Any], str]]) -> Sources:
    """The sources of those parts ``used``, named with options or without, that are none of this package."""
    found = {}
    for registry, text in used:
        name = text.partition(":")[0]
        source = registry.source(name)
        if source is not None:
            found[f"{registry.what} {name}"] = source
    return found


def sources_of_options(options: Mapping[str, Any]) -> Sources:
    """Of options of decoding."""
    single: dict[str, Registry[Any]] = {"verify": VERIFY_RULES, "policy": POLICIES, "sampler": SAMPLERS}
    used = [(registry, options.get(name)) for name, registry in single.items()]
    used += [(LOGITS_PROCESSORS, name) for name in options.get("logits_processors", ())]
    return sources((registry, text) for registry, text in used if isinstance(text, str))


def sources_of_drafter(name: str) -> Sources:
    """Of a drafter by its name or folder; what a recipe trains is told by :func:`sources_of_recipe`."""
    name = name.removeprefix(COMBINED)
    if name in (BUNDLED, TRAINED):
        return {}
    if not needs_no_files(name):
        folder = resolve_checkpoint(name)
        name = kind_of_files(folder, read_json(folder / "config.json"))
    return sources([(drafters, name)])


def sources_of_recipe(recipe: Recipe) -> Sources:
    """Of a recipe's objective and drafter."""
    start = {} if recipe.drafter.from_ is None else sources_of_drafter(recipe.drafter.from_)
    return start | sources([(OBJECTIVES, recipe.objective.kind), (drafters, recipe.drafter.kind)])


def sources_of_target(target: LoadedTargetModel) -> Sources:
    """Of the adapter of a target."""
    return sources([(ADAPTERS, detect_model_architecture(target.model))])


def tell_changes(folder: Path, used: Sources) -> None:
    """Warn of each part that has changed since the study in ``folder`` used it last, or whose source is not known."""
    path = folder / FILE
    before = read_json(path) if path.exists() else {}
    for part, source in used.items():
        if not source:
            logger.warning("The %s has no source file: if you change it, remove its answers from %s.", part, folder)
        elif before.get(part, source) != source:
            logger.warning("The %s has changed: its cells are new ones; the old answers stay in %s.", part, folder)


def keep(folder: Path, used: Sources) -> None:
    """Write which sources the study uses now."""
    path = folder / FILE
    known = read_json(path) if path.exists() else {}
    if used and known | used != known:
        remove_unfinished(path)
        write_json(path, known | used)
