"""Qwen targets: dense, mixtures of experts, and the hybrids with gated delta nets."""

from .base import TargetAdapter
from .registry import register_adapter


@register_adapter("qwen2", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe")
class QwenAdapter(TargetAdapter):
    """Qwen2 to Qwen3.5, the latter inside a multimodal wrapper. Their chat templates have ``enable_thinking``."""
