"""What loads a target and its drafter: one record for Python and the command line."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .core.errors import GenerationError, IncompatibleModelsError
from .core.option import check_limits, option
from .core.values import short

if TYPE_CHECKING:
    from .drafters.protocol import Drafter
    from .target import LoadedTargetModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelOptions:
    """What loads a target and its drafter: folders, hub names, or by default the bundled models.

    A target alone gets the bundled drafter that was made for it, at whatever precision it is kept. A drafter alone
    gets the bundled target, if it was trained for that one or needs no training. Raises ``DFlashError``, naming the
    option, for a number out of range, and for adapters without a target.
    """

    target: str | Path | None = option(
        None,
        "Folder or hub name of the target. Default: bundled, the one of the package.",
        kind=str,
        metavar="PATH|HUB",
        also=("model",),
    )
    drafter: str | Path | None = option(
        None,
        "The drafter for the target; ngram needs no training, ngram+PATH copies where the text repeats, "
        "NAME[:KEY=VALUE] is a plug-in's. "
        "Default: the one that is bundled for the target.",
        kind=str,
        metavar="PATH|HUB",
        also=("draft_model",),
    )
    block_size: int | None = option(
        None, "Positions per block, the anchor included. Default: the drafter's own.", kind=int, at_least=1
    )
    draft_bits: int | None = option(
        None, "Quantise the drafter as it is loaded: 8, 6, 5, 4, 3 or 2 bits a weight.", kind=int
    )
    draft_window: int | None = option(
        None,
        "Newest context tokens that the drafter's full attention sees; its memory stops growing with the text.",
        kind=int,
        metavar="N",
        at_least=1,
    )
    trust_remote_code: bool = option(False, "Run the Python code that comes with the target.")
    adapter_path: str | Path | None = option(
        None, "Folder of LoRA adapters for the target, as mlx_lm.lora writes it.", kind=str, metavar="FOLDER"
    )
    extra_eos_token: Sequence[str] = option(
        (), "A token that ends an answer too, by its text or id; repeatable.", kind=list[str], metavar="TOKEN"
    )

    def __post_init__(self) -> None:
        check_limits(self)
        bits = self.draft_bits
        if bits is not None and (type(bits) is not int or bits not in (2, 3, 4, 5, 6, 8)):
            raise GenerationError(f"draft_bits must be 2, 3, 4, 5, 6 or 8, got {short(bits)}.")
        for name in ("target", "drafter", "adapter_path"):
            if not isinstance(value := getattr(self, name), str | Path | None):
                raise GenerationError(f"{name} must be a folder or a hub name, got {short(value)}.")
        given = self.extra_eos_token
        extra = tuple(given) if isinstance(given, list | tuple) else (given,)
        if not all(isinstance(token, str) for token in extra):
            raise GenerationError(f"extra_eos_token must be texts of tokens, got {short(given)}.")
        object.__setattr__(self, "extra_eos_token", extra)
        if self.adapter_path is not None and self.target is None:
            raise IncompatibleModelsError("adapter_path needs the target that the adapters were made for; give both.")

    def load_target(self) -> "LoadedTargetModel":
        """The target. Raises ``DFlashError`` for a bad checkpoint, or a drafter alone of another target."""
        from .bundled import target_for
        from .drafters.combined import own_name
        from .target import load_target
        from .target.load import BUNDLED, add_stop_tokens

        self.check_drafter()
        if self.target is not None:
            target = load_target(self.target, self.trust_remote_code, self.adapter_path)
        elif own_name(self._drafter) == BUNDLED:
            target = load_target(BUNDLED)
        else:
            target = target_for(self._drafter)
        add_stop_tokens(target, self.extra_eos_token)
        return target

    def check_drafter(self) -> None:
        """Raise ``CheckpointError`` if the drafter is neither a name, a hub name nor a folder that is there."""
        from .core.files import is_hub_name, resolve_checkpoint
        from .drafters.combined import own_name
        from .drafters.kinds import needs_no_files
        from .target.load import BUNDLED

        name = own_name(self._drafter)
        if name != BUNDLED and not needs_no_files(name) and not is_hub_name(name):
            resolve_checkpoint(name)

    def load_drafter(self, target: "LoadedTargetModel | None") -> "Drafter":
        """The drafter for ``target``, or ``None`` for the bundled target.

        Raises ``DFlashError`` for a bad checkpoint, or where no drafter is bundled for ``target``.
        """
        from .bundled import drafter_folder
        from .drafters import load_drafter
        from .drafters.combined import own_name
        from .target.load import BUNDLED, PAIR

        name = self._drafter
        if own_name(name) == BUNDLED:
            if self.adapter_path is not None:
                logger.warning(
                    "The bundled drafter was made for the target without adapters: fewer drafts may be right."
                )
            name = name.removesuffix(BUNDLED) + str(PAIR / "drafter" if target is None else drafter_folder(target))
        return load_drafter(name, self.draft_bits, self.draft_window)

    @property
    def _drafter(self) -> str:
        from .target.load import BUNDLED

        return BUNDLED if self.drafter is None else str(self.drafter)
