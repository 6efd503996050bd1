"""Mistral targets, dense and mixtures of experts, also as the text part of Mistral 3.

Knows what Mistral models of mlx-lm do differently from the usual layout. Must not know the decode loop or any drafter.
"""

from .base import TargetAdapter
from .registry import register_adapter


@register_adapter("mistral", "mixtral", "ministral3", "mistral3")
class MistralAdapter(TargetAdapter):
    """``mistral`` is loaded by mlx-lm as ``llama``, and named by its own ``model_type``."""
