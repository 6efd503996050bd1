"""What loads a target and its drafter: one record for Python and the command line."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .core.option import option

if TYPE_CHECKING:
    from .drafters.protocol import Drafter
    from .target import LoadedTargetModel


@dataclass(frozen=True)
class ModelOptions:
    """What loads a target and its drafter: folders, hub names, or by default the bundled models.

    A target alone gets the bundled drafter that was made for it, at whatever precision it is kept. A drafter alone
    gets the bundled target, if it was trained for that one or needs no training.
    """

    target: str | Path | None = option(
        None,
        "Folder or hub name of the target. Default: bundled, the one of the package.",
        kind=str,
        metavar="PATH|HUB",
    )
    drafter: str | Path | None = option(
        None,
        "The drafter for the target; ngram needs no training, ngram+PATH copies where the text repeats. "
        "Default: the one that is bundled for the target.",
        kind=str,
        metavar="PATH|HUB",
    )
    block_size: int | None = option(
        None, "Positions per block, the anchor included. Default: the drafter's own.", kind=int
    )
    draft_bits: int | None = option(
        None, "Quantise the drafter as it is loaded: 8, 6, 5, 4, 3 or 2 bits a weight.", kind=int
    )
    draft_window: int | None = option(
        None,
        "Newest context tokens that the drafter's full attention sees; its memory stops growing with the text.",
        kind=int,
        metavar="N",
    )
    trust_remote_code: bool = option(False, "Run the Python code that comes with the target.")

    def load_target(self) -> "LoadedTargetModel":
        """The target. Raises ``DFlashError`` for a bad checkpoint, or a drafter alone of another target."""
        from .bundled import target_for
        from .drafters.combined import PREFIX
        from .target import load_target
        from .target.load import BUNDLED

        if self.target is not None:
            return load_target(self.target, self.trust_remote_code)
        if self.drafter is None or str(self.drafter).removeprefix(PREFIX) == BUNDLED:
            return load_target(BUNDLED)
        return target_for(self.drafter)

    def load_drafter(self, target: "LoadedTargetModel | None") -> "Drafter":
        """The drafter for ``target``, or ``None`` for the bundled target.

        Raises ``DFlashError`` for a bad checkpoint, or where no drafter is bundled for ``target``.
        """
        from .bundled import drafter_folder
        from .drafters import load_drafter
        from .drafters.combined import PREFIX
        from .target.load import BUNDLED, PAIR

        name = BUNDLED if self.drafter is None else str(self.drafter)
        combined = PREFIX if name.startswith(PREFIX) else ""
        if name.removeprefix(combined) == BUNDLED:
            name = combined + str(PAIR / "drafter" if target is None else drafter_folder(target))
        return load_drafter(name, self.draft_bits, self.draft_window)
