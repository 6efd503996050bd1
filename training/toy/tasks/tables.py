"""The wordings of the toy tasks, which are data: YAML files in ``tables/``, read once.

Texts are `str.format` templates. Rows keep their order: samples of a seed depend on it.
"""

from functools import cache
from pathlib import Path
from typing import Any

import yaml


@cache
def table(name: str) -> Any:
    """``tables/<name>.yaml``."""
    text = (Path(__file__).parent / "tables" / f"{name}.yaml").read_text(encoding="utf-8")
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
