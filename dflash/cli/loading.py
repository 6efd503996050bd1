"""What commands load by name, and how JSON and traces name it."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ..core.errors import DFlashError
from ..models import ModelOptions
from ..options import DecodeOptions
from . import options

if TYPE_CHECKING:
    from ..decoding.trace import TraceFile
    from ..generate import DFlashSpeculativeDecoder

BUNDLED = "bundled"


def load_decoder(models: ModelOptions) -> "DFlashSpeculativeDecoder":
    """The decoder of a command with one drafter."""
    (decoder,) = load_decoders(models, [] if models.drafter is None else [str(models.drafter)]).values()
    return decoder


def load_decoders(models: ModelOptions, drafters: Sequence[str]) -> dict[str, "DFlashSpeculativeDecoder"]:
    """A decoder for each of ``drafters``, by its name; they share the target. Without names, the bundled drafter.

    No target is the bundled one, if a drafter is bundled or needs no files, or the first was trained for it. Raises
    ``DFlashError`` otherwise, and for a name given twice.
    """
    from ..decoding.sampling import RandomState
    from ..drafters.combined import own_name
    from ..drafters.kinds import needs_no_files
    from ..generate import DFlashSpeculativeDecoder

    names = drafters or [BUNDLED]
    if len(set(names)) < len(names):
        raise DFlashError(f"--drafter names one drafter twice; expected different ones, got {', '.join(names)}.")
    for name in names:
        replace(models, drafter=name).check_drafter()
    for_any_target = (n for n in names if own_name(n) == BUNDLED or needs_no_files(own_name(n)))
    target = replace(models, drafter=next(for_any_target, names[0])).load_target()
    state = RandomState.now()
    decoders = {
        name: DFlashSpeculativeDecoder(
            target, replace(models, drafter=name).load_drafter(target), block_size=models.block_size
        )
        for name in names
    }
    state.restore()  # that of plain mlx-lm, which draws random weights for a target and none for our drafters
    return decoders


def path_or_bundled(name: str | Path | None) -> str:
    """How JSON names a model: an absolute path, a hub name, or ``bundled``."""
    return BUNDLED if name in (None, BUNDLED) else str(Path(name).resolve()) if Path(name).exists() else str(name)


def names_of(models: ModelOptions) -> dict[str, str]:
    """How traces and JSON name target and drafter."""
    adapted = {} if models.adapter_path is None else {"adapters": path_or_bundled(models.adapter_path)}
    return {"target": path_or_bundled(models.target), "drafter": path_or_bundled(models.drafter)} | adapted


def trace_file(decoding: DecodeOptions, models: ModelOptions) -> "AbstractContextManager[TraceFile | None]":
    """The file of ``--trace``, which names the models, while it is open; ``None`` without the option."""
    from ..decoding.trace import TraceFile

    if not decoding.trace:
        return nullcontext()
    path = cast(Path, decoding.trace)
    options.require_new(path)  # another process may have written it while the models were loaded
    return TraceFile(path, **names_of(models))
