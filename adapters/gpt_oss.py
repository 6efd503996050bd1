"""GPT-OSS targets: sliding and full attention in turn, with sinks.

Knows what GPT-OSS models of mlx-lm do differently from the usual layout. Must not know the decode loop or any drafter.
"""

from .base import TargetAdapter
from .registry import register_adapter


@register_adapter("gpt_oss")
class GptOssAdapter(TargetAdapter):
    """The switch of its chat template is ``reasoning_effort`` ("low", "medium", "high")."""
