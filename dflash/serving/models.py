"""A model that is served: how it is loaded, and what is told of it."""

import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path

from ..core.errors import DFlashError, GenerationError, one_line
from ..core.files import is_hub_name, read_json, resolve_checkpoint
from ..generate import DFlashSpeculativeDecoder
from ..models import ModelOptions
from ..options import DecodeOptions, option_names
from ..target import LoadedTargetModel
from ..target.load import BUNDLED
from .options import ServeOptions

logger = logging.getLogger(__name__)

UNLIMITED = 1 << 30
"""The context length of a target that tells none, in tokens."""


@dataclass(frozen=True)
class Served:
    """What loads a decoder; ``decoding`` has the defaults of requests, ``longest`` is a prompt with its answer."""

    models: ModelOptions
    decoding: DecodeOptions
    longest: int | None

    def check(self) -> None:
        """Raise ``CheckpointError`` if a folder of these models is missing; hub names are looked up as they load."""
        target = str(BUNDLED if self.models.target is None else self.models.target)
        if target != BUNDLED and (Path(target).is_dir() or not is_hub_name(target)):
            read_json(resolve_checkpoint(target) / "config.json")
        self.models.check_drafter()

    def load(self, target: LoadedTargetModel | None = None) -> tuple[DFlashSpeculativeDecoder, dict[str, str]]:
        """The decoder, plain if no drafter was named and none that fits is bundled; and what is told of it."""
        models, target = self.models, target or self.models.load_target()
        names = (*option_names("caches"), "policy", "tree", "prefill_step_size")
        options = {name: getattr(self.decoding, name) for name in names}
        options |= {"block_size": models.block_size, "max_seq_length": self.longest or target.max_length or UNLIMITED}
        try:
            about = {"engine": "speculative", "drafter": str(models.drafter or "bundled")}
            return DFlashSpeculativeDecoder(target, models.load_drafter(target), **options), about
        except DFlashError as error:
            if models.drafter is not None:
                raise
            reason = one_line(error)
        logger.warning("No drafter: %s", reason)
        drafter = replace(models, drafter="ngram").load_drafter(target)  # which a policy of 0 does not ask
        about = {"engine": "plain", "drafter": reason}
        return DFlashSpeculativeDecoder(target, drafter, **options | {"policy": 0, "tree": None}), about

    def with_drafter(self, drafter: str | None) -> "Served":
        """The same target with another drafter; ``None`` is the present one."""
        chosen = self.models.drafter or BUNDLED if drafter is None else drafter
        return replace(self, models=replace(self.models, drafter=chosen))


def by_name(models: ModelOptions, decoding: DecodeOptions, serving: ServeOptions) -> dict[str, Served]:
    """Every model by the name that requests give, the first one first.

    Raises ``GenerationError`` for two of a name, and ``CheckpointError`` for a missing folder of a further one.
    """
    first = serving.served_model_name or _name(models.target or BUNDLED)
    found = {first: Served(models, decoding, serving.max_seq_length)}
    for also in serving.also:
        target, _, drafter = also.partition(",")
        if (name := _name(target)) in found:
            raise GenerationError(f"Two models are called {name!r}; rename the folder of one of them.")
        model = replace(models, target=target, drafter=drafter or None, adapter_path=None)
        found[name] = replace(found[first], models=model)
        found[name].check()
    return found


def _name(target: str | Path) -> str:
    """The last part of a hub name or a path, that of ``.`` too; a link keeps its own name."""
    return os.path.basename(os.path.abspath(target))
