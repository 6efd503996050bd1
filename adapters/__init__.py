"""Target adapters, one small file per model family; see :class:`TargetAdapter` for what one answers."""

from . import llama, qwen
from .base import TargetAdapter
from .registry import (
    adapter_for_model_type,
    detect_model_architecture,
    register_adapter,
    registered_adapters,
)

__all__ = [
    "TargetAdapter",
    "adapter_for_model_type",
    "detect_model_architecture",
    "llama",
    "qwen",
    "register_adapter",
    "registered_adapters",
]
