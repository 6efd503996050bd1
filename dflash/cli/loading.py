"""What commands load by name: decoders, seeded, and the judge of their answers.

Knows how the command line names models. Must not know typer, or any one command.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import DFlashError

if TYPE_CHECKING:
    from ..generate import DFlashSpeculativeDecoder
    from ..target import LoadedTargetModel

BUNDLED, NGRAM, COMBINED = "bundled", "ngram", "ngram+"


def drafter_name(name: str, target: "LoadedTargetModel | None" = None) -> str:
    """What :func:`~dflash.load_drafter` takes: ``bundled``, after ``ngram+`` too, is the bundled drafter's folder.

    It is the drafter for ``target``, or without one the drafter for the bundled target. Raises
    ``IncompatibleModelsError`` where there is none for ``target``.
    """
    from ..bundled import drafter_folder
    from ..generate import PAIR

    combined = COMBINED if name.startswith(COMBINED) else ""
    rest = name.removeprefix(combined)
    if rest != BUNDLED:
        return name
    return combined + str(PAIR / "drafter" if target is None else drafter_folder(target))


def load_decoder(
    target: str | None,
    drafter: str | None,
    block_size: int | None = None,
    trust_remote_code: bool = False,
    draft_bits: int | None = None,
    draft_window: int | None = None,
) -> "DFlashSpeculativeDecoder":
    """The decoder of a command with one drafter: :func:`load_decoders` of it, or of the bundled one."""
    drafters = [] if drafter is None else [drafter]
    (decoder,) = load_decoders(target, drafters, block_size, trust_remote_code, draft_bits, draft_window).values()
    return decoder


def load_decoders(
    target: str | None,
    drafters: Sequence[str],
    block_size: int | None = None,
    trust_remote_code: bool = False,
    draft_bits: int | None = None,
    draft_window: int | None = None,
) -> dict[str, "DFlashSpeculativeDecoder"]:
    """A decoder for each drafter, by its name; they share the target. Without names, the bundled models.

    No drafter is the same as ``bundled``, the bundled one for the target. No target is the bundled one, if a drafter
    is bundled or needs no training, or the first was trained for it. Raises ``DFlashError``
    otherwise, and for a name given twice.
    """
    from ..bundled import target_for
    from ..generate import DFlashSpeculativeDecoder, load_drafter
    from ..target import load_target

    names = drafters or [BUNDLED]
    if len(set(names)) < len(names):
        raise DFlashError(f"--drafter names one drafter twice; expected different ones, got {', '.join(names)}.")
    if target is None and {BUNDLED, NGRAM, COMBINED + BUNDLED}.isdisjoint(names):
        loaded = target_for(names[0])
    else:
        loaded = load_target(BUNDLED if target is None else target, trust_remote_code)
    decoders = {}
    for name in names:
        drafter = load_drafter(drafter_name(name, loaded), draft_bits, draft_window)
        decoders[name] = DFlashSpeculativeDecoder(loaded, drafter, block_size=block_size)
    return decoders


def path_or_bundled(name: str | None) -> str:
    """How JSON names a model: an absolute path, a hub name, or ``bundled``."""
    return BUNDLED if name in (None, BUNDLED) else str(Path(name).resolve()) if Path(name).exists() else name


def set_seed(seed: int | None) -> None:
    """Seed sampling; ``None`` leaves it random."""
    if seed is not None:
        import mlx.core as mx

        mx.random.seed(seed)


def score_answers(pairs: list[tuple[str, dict[str, Any]]]) -> list[bool]:
    """Whether each answer is right: :func:`~dflash.evaluation.checks.check_answers`."""
    from ..evaluation.checks import check_answers

    return check_answers(pairs)
