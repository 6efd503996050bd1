"""Qwen3 targets. Nothing differs from the usual layout."""

from .base import TargetAdapter
from .registry import register_adapter


@register_adapter("qwen3")
class QwenAdapter(TargetAdapter):
    """Qwen3 (dense). Its chat template's switch for thinking is left to the template's default."""
