"""DFlash for MLX: lossless speculative decoding with block-diffusion drafters.

Public names load on first use, so that ``dflash --help`` is quick and a machine on which MLX has no backend
gets one line instead of a traceback.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import backend  # before anything imports MLX: it loads the fast BLAS
from .errors import DFlashError as DFlashError

if TYPE_CHECKING:
    from .adapters import TargetAdapter as TargetAdapter
    from .adapters import register_adapter as register_adapter
    from .drafters.checkpoint import load_drafter as load_drafter
    from .drafters.checkpoint import save_drafter as save_drafter
    from .drafters.config import DFlashConfig as DFlashConfig
    from .drafters.dflash import DFlashDraftModel as DFlashDraftModel
    from .drafters.protocol import Drafter as Drafter
    from .drafters.protocol import Proposal as Proposal
    from .generate import DFlashResponse as DFlashResponse
    from .generate import DFlashSpeculativeDecoder as DFlashSpeculativeDecoder
    from .target import LoadedTargetModel as LoadedTargetModel
    from .target import load_target as load_target

_MODULE_OF = {
    "DFlashConfig": "drafters.config",
    "DFlashDraftModel": "drafters.dflash",
    "DFlashResponse": "generate",
    "DFlashSpeculativeDecoder": "generate",
    "Drafter": "drafters.protocol",
    "LoadedTargetModel": "target",
    "Proposal": "drafters.protocol",
    "TargetAdapter": "adapters",
    "load_drafter": "drafters.checkpoint",
    "load_target": "target",
    "register_adapter": "adapters",
    "save_drafter": "drafters.checkpoint",
}

__all__ = ["DFlashError", *_MODULE_OF]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    backend.require_mlx()
    value = globals()[name] = getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
    return value
