"""GPT-OSS targets: alternate sliding and full attention, with sinks."""

from .base import TargetAdapter
from .registry import register_adapter


@register_adapter("gpt_oss")
class GptOssAdapter(TargetAdapter):
    """GPT-OSS. Its chat template has ``reasoning_effort`` ("low", "medium", "high")."""
