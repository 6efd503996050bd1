"""Qwen targets: dense, mixtures of experts, and the hybrids with gated delta nets.

Knows what Qwen models of mlx-lm do differently from the usual layout. Must not know the decode loop or any drafter.
"""

from .base import TargetAdapter
from .registry import register_adapter


@register_adapter("qwen2", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe")
class QwenAdapter(TargetAdapter):
    """Qwen2 to Qwen3.5; the latter sit inside a multimodal wrapper.

    ``enable_thinking`` is the switch of their chat templates; without it the template's default holds.
    """
