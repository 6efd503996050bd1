"""LLaMA targets, and the many models published under ``model_type`` "llama"."""

from .base import TargetAdapter
from .registry import register_adapter


@register_adapter("llama")
class LlamaAdapter(TargetAdapter):
    """LLaMA 2 and 3, with full and sliding layers."""
