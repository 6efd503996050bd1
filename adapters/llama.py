"""LLaMA targets, and the many models published under ``model_type`` "llama".

Knows what LLaMA models of mlx-lm do differently from the usual layout. Must not know the decode loop or any drafter.
"""

from .base import TargetAdapter
from .registry import register_adapter


@register_adapter("llama")
class LlamaAdapter(TargetAdapter):
    """LLaMA 2 and 3, full and sliding layers."""
