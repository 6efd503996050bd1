"""DFlash for MLX: lossless speculative decoding with block-diffusion drafters."""

from .backend import require_mlx

require_mlx()  # before anything below imports MLX

from .adapters import TargetAdapter, register_adapter  # noqa: E402
from .checkpoint import load_drafter, save_drafter  # noqa: E402
from .config import DFlashConfig  # noqa: E402
from .decoder import DFlashResponse, DFlashSpeculativeDecoder  # noqa: E402
from .drafter import DFlashDraftModel  # noqa: E402
from .errors import DFlashError  # noqa: E402
from .protocol import Drafter, Proposal  # noqa: E402
from .target import LoadedTargetModel, load_target  # noqa: E402

__all__ = [
    "DFlashConfig",
    "DFlashDraftModel",
    "DFlashError",
    "DFlashResponse",
    "DFlashSpeculativeDecoder",
    "Drafter",
    "LoadedTargetModel",
    "Proposal",
    "TargetAdapter",
    "load_drafter",
    "load_target",
    "register_adapter",
    "save_drafter",
]
