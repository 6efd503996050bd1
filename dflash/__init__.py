"""DFlash for MLX: lossless speculative decoding with block-diffusion drafters.

Decoding        DFlashSpeculativeDecoder, DecodeOptions, DFlashResponse, PromptCache, Profile, TraceFile
Models          load_target, LoadedTargetModel, load_drafter, save_drafter, is_draft_model_compatible
Conversations   read_conversations
A drafter       DFlashDraftModel, DFlashConfig, Drafter, Proposal, register_drafter
An architecture TargetAdapter, register_adapter
A policy        Policy, Drafts, BlockRecord, register_policy
A rule          Verified, register_verify
Sampling        register_sampler, register_logits_processor
Errors          DFlashError, which all of them are

Subpackages: ``adapters`` (architectures), ``training`` (drafters), ``study`` (ablations, traces) and ``bench`` (against
plain mlx_lm).

Public names and subpackages load on first use, so that ``dflash --help`` is quick and a machine on which MLX has no
backend gets one line instead of a traceback.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import backend  # before anything imports MLX: it loads the fast BLAS
from .errors import DFlashError as DFlashError

if TYPE_CHECKING:
    from . import adapters as adapters
    from . import bench as bench
    from . import study as study
    from . import training as training
    from .adapters import TargetAdapter as TargetAdapter
    from .adapters import register_adapter as register_adapter
    from .drafters.checkpoint import load_drafter as load_drafter
    from .drafters.checkpoint import save_drafter as save_drafter
    from .drafters.config import DFlashConfig as DFlashConfig
    from .drafters.dflash import DFlashDraftModel as DFlashDraftModel
    from .drafters.kinds import register_drafter as register_drafter
    from .drafters.protocol import Drafter as Drafter
    from .drafters.protocol import Proposal as Proposal
    from .drafters.vocabularies import is_draft_model_compatible as is_draft_model_compatible
    from .generate import DFlashSpeculativeDecoder as DFlashSpeculativeDecoder
    from .policies.base import BlockRecord as BlockRecord
    from .policies.base import Drafts as Drafts
    from .policies.base import Policy as Policy
    from .policies.base import register_policy as register_policy
    from .profile import Profile as Profile
    from .prompt_cache import PromptCache as PromptCache
    from .prompts import read_conversations as read_conversations
    from .request import DecodeOptions as DecodeOptions
    from .sampling import register_logits_processor as register_logits_processor
    from .sampling import register_sampler as register_sampler
    from .stream import DFlashResponse as DFlashResponse
    from .target import LoadedTargetModel as LoadedTargetModel
    from .target import load_target as load_target
    from .trace import TraceFile as TraceFile
    from .verify import Verified as Verified
    from .verify import register_verify as register_verify

_MODULE_OF = {
    "BlockRecord": "policies.base",
    "DFlashConfig": "drafters.config",
    "DFlashDraftModel": "drafters.dflash",
    "DFlashResponse": "stream",
    "DFlashSpeculativeDecoder": "generate",
    "DecodeOptions": "request",
    "Drafter": "drafters.protocol",
    "Drafts": "policies.base",
    "LoadedTargetModel": "target",
    "Policy": "policies.base",
    "Profile": "profile",
    "PromptCache": "prompt_cache",
    "Proposal": "drafters.protocol",
    "TargetAdapter": "adapters",
    "TraceFile": "trace",
    "Verified": "verify",
    "is_draft_model_compatible": "drafters.vocabularies",
    "load_drafter": "drafters.checkpoint",
    "load_target": "target",
    "read_conversations": "prompts",
    "register_adapter": "adapters",
    "register_drafter": "drafters.kinds",
    "register_logits_processor": "sampling",
    "register_policy": "policies.base",
    "register_sampler": "sampling",
    "register_verify": "verify",
    "save_drafter": "drafters.checkpoint",
}

_SUBPACKAGES = ("adapters", "bench", "study", "training")

__all__ = ["DFlashError", *_MODULE_OF]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF and name not in _SUBPACKAGES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    backend.require_mlx()
    if name in _SUBPACKAGES:
        return import_module(f".{name}", __name__)
    value = globals()[name] = getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBPACKAGES})
