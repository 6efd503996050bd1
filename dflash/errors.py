"""The errors that users see. Every message says what was wrong, what was expected and what to do."""


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
    """Training cannot start or go on: unusable data, a loss that blew up, another recipe's run, a lost rank."""
