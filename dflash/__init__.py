"""DFlash for MLX: lossless speculative decoding with block-diffusion drafters.

Decoding        DFlashSpeculativeDecoder, DecodeOptions, DFlashResponse, PromptCache, Profile, TraceFile
Models          load_target, LoadedTargetModel, load_drafter, save_drafter, is_draft_model_compatible
Conversations   read_conversations
A drafter       DFlashDraftModel, DFlashConfig, Drafter, Proposal, register_drafter
An architecture TargetAdapter, register_adapter
A policy        Policy, Drafts, BlockRecord, register_policy
A rule          Verified, register_verify
Sampling        register_sampler, register_logits_processor
Errors          DFlashError, which all of them are; each of them in ``errors``

Subpackages: ``adapters`` (architectures), ``training`` (drafters), ``study`` (ablations, traces) and ``bench`` (against
plain mlx_lm).

Public names and subpackages load on first use, so that ``dflash --help`` is quick and a machine on which MLX has no
backend gets one line instead of a traceback.
"""

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import errors as errors
from .core import backend
from .core.errors import DFlashError as DFlashError

if TYPE_CHECKING:
    from . import adapters as adapters
    from . import bench as bench
    from . import study as study
    from . import training as training
    from .adapters import TargetAdapter as TargetAdapter
    from .adapters import register_adapter as register_adapter
    from .decoding.profile import Profile as Profile
    from .decoding.sampling import register_logits_processor as register_logits_processor
    from .decoding.sampling import register_sampler as register_sampler
    from .decoding.stream import DFlashResponse as DFlashResponse
    from .decoding.trace import TraceFile as TraceFile
    from .decoding.verify import Verified as Verified
    from .decoding.verify import register_verify as register_verify
    from .drafters.checkpoints.checkpoint import load_drafter as load_drafter
    from .drafters.checkpoints.checkpoint import save_drafter as save_drafter
    from .drafters.checkpoints.config import DFlashConfig as DFlashConfig
    from .drafters.checkpoints.vocabularies import is_draft_model_compatible as is_draft_model_compatible
    from .drafters.dflash import DFlashDraftModel as DFlashDraftModel
    from .drafters.kinds import register_drafter as register_drafter
    from .drafters.protocol import Drafter as Drafter
    from .drafters.protocol import Proposal as Proposal
    from .generate import DFlashSpeculativeDecoder as DFlashSpeculativeDecoder
    from .options import DecodeOptions as DecodeOptions
    from .policies.base import BlockRecord as BlockRecord
    from .policies.base import Drafts as Drafts
    from .policies.base import Policy as Policy
    from .policies.base import register_policy as register_policy
    from .prompts.conversations import read_conversations as read_conversations
    from .prompts.prompt_cache import PromptCache as PromptCache
    from .target import LoadedTargetModel as LoadedTargetModel
    from .target import load_target as load_target

# In a notebook without ipywidgets, huggingface_hub's import says that it cannot draw bars there. None is drawn here.
warnings.filterwarnings("ignore", "IProgress not found")

_MODULE_OF = {
    "BlockRecord": "policies.base",
    "DFlashConfig": "drafters.checkpoints.config",
    "DFlashDraftModel": "drafters.dflash",
    "DFlashResponse": "decoding.stream",
    "DFlashSpeculativeDecoder": "generate",
    "DecodeOptions": "options",
    "Drafter": "drafters.protocol",
    "Drafts": "policies.base",
    "LoadedTargetModel": "target",
    "Policy": "policies.base",
    "Profile": "decoding.profile",
    "PromptCache": "prompts.prompt_cache",
    "Proposal": "drafters.protocol",
    "TargetAdapter": "adapters",
    "TraceFile": "decoding.trace",
    "Verified": "decoding.verify",
    "is_draft_model_compatible": "drafters.checkpoints.vocabularies",
    "load_drafter": "drafters.checkpoints.checkpoint",
    "load_target": "target",
    "read_conversations": "prompts.conversations",
    "register_adapter": "adapters",
    "register_drafter": "drafters.kinds",
    "register_logits_processor": "decoding.sampling",
    "register_policy": "policies.base",
    "register_sampler": "decoding.sampling",
    "register_verify": "decoding.verify",
    "save_drafter": "drafters.checkpoints.checkpoint",
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
