"""The errors that users see. Every message says what was wrong, what was expected and what to do."""

import difflib
from collections.abc import Iterable


class DFlashError(ValueError):
    """Base of all errors raised for bad input; the command line prints it as one line."""


class BackendError(DFlashError, ImportError):
    """MLX cannot run on this machine as installed."""


class CheckpointError(DFlashError):
    """A config or weight file is missing, damaged or of the wrong shape."""


class IncompatibleModelsError(DFlashError):
    """Drafter and target do not fit each other, or the target cannot be decoded exactly."""


class GenerationError(DFlashError):
    """A request that cannot be served: empty prompt, negative counts, too long."""


class DataError(DFlashError):
    """A file of prompts or a dataset is missing, broken, empty, or belongs to another target."""


class TrainingError(DFlashError):
    """Training cannot start or continue: unusable data, a loss that diverged, another recipe's run, a lost rank."""


class StopTraining(Exception):
    """A callback ends a training run: raised by the callback with its reason, then by the run once it is saved."""


def one_line(error: BaseException, limit: int = 300) -> str:
    """The message of ``error`` on one line of at most ``limit`` characters; its type's name where it has none.

    Of a system's error it is the reason, without a number, and the file if the error names one.
    """
    message = str(error)
    if isinstance(error, OSError) and error.strerror:
        message = error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    text = " ".join(message.split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 3] + "..."


def install_extra(name: str) -> str:
    """How to install the packages of an extra, as the end of a sentence; the package itself is on no index."""
    return f"install the extra {name!r} (from the clone: pip install '.[{name}]')"


MANY = 20
"""More known names than these are not listed."""


def did_you_mean(name: object, known: Iterable[object]) -> str:
    """How to correct an unknown name: the nearest of the known ones, or all of a few."""
    names = [str(k) for k in known]
    near = difflib.get_close_matches(str(name), names, n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    if len(names) > MANY:
        return f"the nearest are {', '.join(difflib.get_close_matches(str(name), names, n=5, cutoff=0))}."
    return f"known are {', '.join(names)}." if names else "none is known."
