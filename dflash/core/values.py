"""Checks of the values that callers give: one line says what was wrong and what was expected."""

import math
from collections.abc import Collection, Mapping
from typing import Any

from .errors import GenerationError


def require_count(name: str, value: Any, least: int, most: int | None = None) -> None:
    """Raise ``GenerationError`` unless ``value`` is a whole number from ``least`` to ``most``."""
    if not _is_whole(value) or value < least or (most is not None and value > most):
        scope = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise GenerationError(f"{name} must be a whole number {scope}, got {value!r}.")


def require_number(name: str, value: Any, least: float = -math.inf, most: float = math.inf) -> None:
    """Raise ``GenerationError`` unless ``value`` is a finite number from ``least`` to ``most``."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not least <= value <= most or math.isinf(value):  # NaN fails too
        lower = "" if least == -math.inf else f" of at least {least:g}"
        scope = lower if most == math.inf else f" from {least:g} to {most:g}"
        raise GenerationError(f"{name} must be a finite number{scope}, got {value!r}.")


def check_logit_bias(bias: Any) -> None:
    """A dict of token ids and numbers, minus infinity for a token that must not come, or ``None``."""
    if bias is not None and not isinstance(bias, Mapping):
        raise GenerationError(f"logit_bias must be a dict of token ids and numbers, got {short(bias)}.")
    for token, value in (bias or {}).items():
        if not _is_whole(token):
            raise GenerationError(f"logit_bias must name token ids, got {short(token)}.")
        if value != -math.inf:
            require_number(f"logit_bias of token {token}", value)


def check_stop_strings(stop_strings: Any) -> None:
    """A list of texts, none of them empty, or ``None``."""
    if isinstance(stop_strings, str):
        raise GenerationError(f"stop_strings must be a list of strings; did you mean [{stop_strings!r}]?")
    if not isinstance(stop_strings, Collection | None):
        raise GenerationError(f"stop_strings must be a list of strings, got {short(stop_strings)}.")
    if any(not isinstance(s, str) or not s for s in stop_strings or ()):
        raise GenerationError("A stop string must be a non-empty text.")


def check_stop_tokens(tokens: Any) -> None:
    """A list of token ids, or ``None``."""
    try:
        whole = all(_is_whole(token) and token >= 0 for token in (() if tokens is None else tokens))
    except TypeError:
        whole = False
    if not whole:
        raise GenerationError(f"stop_token_ids must be a list of token ids, got {short(tokens)}.")


def check_caches(max_kv_size: Any, kv_bits: Any, kv_group_size: Any) -> None:
    """Options of caches, as far as no model says more: a bound beyond the four first tokens, MLX's quantisations."""
    if max_kv_size is not None:
        require_count("max_kv_size", max_kv_size, 5)
    if kv_bits is not None and not (_is_whole(kv_bits) and kv_bits in (2, 3, 4, 6, 8)):
        raise GenerationError(f"kv_bits must be 2, 3, 4, 6 or 8, got {short(kv_bits)}.")
    if not _is_whole(kv_group_size) or (kv_bits is not None and kv_group_size not in (32, 64, 128)):
        raise GenerationError(f"kv_group_size must be 32, 64 or 128, got {short(kv_group_size)}.")


def short(value: Any) -> str:
    """``value`` as Python writes it, cut to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
