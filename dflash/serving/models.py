"""A model that is served: how it is loaded, and what is told of it."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path

from ..core.errors import DFlashError, GenerationError, one_line
from ..generate import DFlashSpeculativeDecoder
from ..models import ModelOptions
from ..options import DecodeOptions, option_names
from ..target import LoadedTargetModel
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
        return replace(self, models=replace(self.models, drafter=drafter or self.models.drafter or "bundled"))


def by_name(models: ModelOptions, decoding: DecodeOptions, serving: ServeOptions) -> dict[str, Served]:
    """Every model by the name that requests give, the first one first. Raises ``GenerationError`` for two of a name."""
    found = {serving.served_model_name or Path(models.target or "bundled").name: models}
    for also in serving.also:
        target, _, drafter = also.partition(",")
        if (name := Path(target).name) in found:
            raise GenerationError(f"Two models are called {name!r}; rename the folder of one of them.")
        found[name] = replace(models, target=target, drafter=drafter or None, adapter_path=None)
    return {name: Served(model, decoding, serving.max_seq_length) for name, model in found.items()}
