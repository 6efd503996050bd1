"""Mistral targets: dense, mixtures of experts, and the text part of Mistral 3."""

from .base import TargetAdapter
from .registry import register_adapter


@register_adapter("mistral", "mixtral", "ministral3", "mistral3")
class MistralAdapter(TargetAdapter):
    """Mistral. mlx-lm loads ``mistral`` with its ``llama`` module; its ``model_type`` stays ``mistral``."""
