"""Which value of a target's ``config.json`` is impossible: said where a model cannot be built or would run wrongly."""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..core.errors import CheckpointError
from ..core.values import short

Test = Callable[[Any], bool]


def _number(least: float, most: float = math.inf, whole: bool = True) -> Test:
    def holds(value: Any) -> bool:
        kinds = int if whole else int | float
        return isinstance(value, kinds) and not isinstance(value, bool) and least <= value <= most

    return holds


_NEVER: list[tuple[str, str, Test]] = [
    ("(num|n)_(hidden_)?layers?", "a whole number from 1 to 10000", _number(1, 10_000)),  # each is built, one by one
    ("max_position_embeddings", "a whole number of at least 1", _number(1)),
    ("rope_theta", "a number above 0", _number(1e-6, 1e20, whole=False)),
    ("(rms_|layer_)?norm_eps", "a small number above 0", _number(1e-30, 1, whole=False)),
]
"""What no model computes rightly with: patterns of keys, what a value must be in words, and as a test."""

_ODD: list[tuple[str, str, Test]] = [
    ("model_type|(torch_)?dtype", "a text", lambda value: isinstance(value, str)),
    (
        "(hidden|intermediate|vocab)_size|num_(attention|key_value)_heads|head_dim|group_size|bits",
        "a whole number from 1 to 16777216",
        _number(1, 2**24),
    ),
    ("((low|high)_freq_)?factor", "a number above 0", _number(1e-6, whole=False)),
    ("tie_word_embeddings|(attention|mlp|qkv)_bias", "true or false", lambda value: isinstance(value, bool)),
    ("eos_token_id", "a token id or a list of them", lambda value: all(map(_number(0), _listed(value)))),
    ("layer_types|architectures", "a list of names", lambda value: isinstance(value, list)),
    (
        "rope_scaling|rope_parameters|quantization(_config)?|text_config|auto_map",
        "an object",
        lambda value: isinstance(value, Mapping),
    ),
]
"""The same of values that some model may have, and that are suspected where one cannot be built."""


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def refuse_impossible(config: Mapping[str, Any]) -> None:
    """Raise ``CheckpointError`` for a number that no model computes rightly with, or that would take hours to build."""
    for key, value, expected in _wrong(config, _NEVER):
        if isinstance(value, int | float):
            raise CheckpointError(_told(key, value, expected))


def suspect(config: Mapping[str, Any]) -> str | None:
    """The value that most likely is why a model could not be built, as a sentence; ``None`` if none is odd.

    A null stands for a default in many configs, so it is suspected last.
    """
    wrong = sorted(_wrong(config, _NEVER + _ODD), key=lambda found: found[1] is None)
    return _told(*wrong[0]) if wrong else None


def _told(key: str, value: Any, expected: str) -> str:
    return f"config.json: {key} must be {expected}, got {short(value)}."


def _wrong(config: Mapping[str, Any], table: list[tuple[str, str, Test]]) -> Iterator[tuple[str, Any, str]]:
    for key, value in config.items():
        expected = next((row for row in table if re.fullmatch(row[0], key)), None)
        if expected is not None and not expected[2](value):
            yield key, value, expected[1]
        if isinstance(value, Mapping):
            yield from _wrong(value, table)
