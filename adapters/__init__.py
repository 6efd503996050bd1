"""Target adapters, one small file per model family; :class:`TargetAdapter` is the interface."""

from . import gemma, gpt_oss, llama, mistral, qwen, whole_models
from .base import TargetAdapter
from .registry import (
    adapter_for_model_type,
    detect_model_architecture,
    find_adapter,
    register_adapter,
    registered_adapters,
)

__all__ = [
    "TargetAdapter",
    "adapter_for_model_type",
    "detect_model_architecture",
    "find_adapter",
    "gemma",
    "gpt_oss",
    "llama",
    "mistral",
    "qwen",
    "register_adapter",
    "registered_adapters",
    "whole_models",
]
