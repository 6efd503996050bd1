"""Checks on drafters and their proposals: a mistake in a drafter's code becomes one clear error here."""

import logging
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..core.errors import GenerationError, IncompatibleModelsError
from ..core.trees import depths_of_rows
from ..core.values import short
from .protocol import Proposal

logger = logging.getLogger(__name__)

_PARTS = ("block_size", "target_layer_ids", "bind", "make_cache", "extend_context", "propose")


def check_drafter(drafter: Any) -> None:
    """Raise ``IncompatibleModelsError``, naming the missing parts, if ``drafter`` is not a ``Drafter``."""
    if isinstance(drafter, str | Path):
        raise IncompatibleModelsError(
            f"Expected a drafter, got the name {str(drafter)!r}; load it first: load_drafter({str(drafter)!r})."
        )
    missing = [part for part in _PARTS if not hasattr(drafter, part)]
    if missing:
        raise IncompatibleModelsError(
            f"{type(drafter).__name__} is no Drafter: it lacks {', '.join(missing)}. See dflash.Drafter."
        )
    size = drafter.block_size
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise IncompatibleModelsError(
            f"The block_size of {type(drafter).__name__} must be a whole number of at least 1, got {size!r}."
        )


def fitting_block_size(wanted: int | None, own: int, max_length: int | None) -> int:
    """The block size to decode with. A drafter may fill its own block whatever is used, so that must be possible."""
    if max_length is not None and own > max_length:
        raise IncompatibleModelsError(
            f"The drafter's block_size {own} is more than the {max_length} positions of the target; "
            "expected a block, such as 16."
        )
    if wanted is not None and wanted > own:
        logger.warning("block_size %d is more than the drafter's own %d; %d is used.", wanted, own, own)
    return own if wanted is None else min(wanted, own)


def proposed_tokens(drafter: Any, proposal: Any, length: int) -> mx.array:
    """The tokens ``[1, n]`` of a proposal as int64, with ``0 <= n <= length``; their values are not checked.

    A tree may have more drafts, but no longer path. Raises ``GenerationError`` for anything else.
    """
    name = type(drafter).__name__
    if not isinstance(proposal, Proposal):
        raise GenerationError(f"{name}.propose returned {_form(proposal)}; expected a dflash.Proposal.")
    tokens = proposal.tokens
    fits = isinstance(tokens, mx.array) and mx.issubdtype(tokens.dtype, mx.integer)
    if not (fits and tokens.ndim == 2 and tokens.shape[0] == 1 and (proposal.parents or tokens.shape[1] <= length)):
        raise GenerationError(
            f"{name}.propose returned tokens that are {_form(tokens)}; expected an mx.array of integers, "
            f"of shape [1, n] with n at most {length}."
        )
    if proposal.parents is not None:
        _check_tree(name, proposal.parents, tokens.shape[1], length)
    return tokens.astype(mx.int64)


def _check_tree(name: str, parents: list[int], count: int, length: int) -> None:
    ordered = len(parents) == count and all(-1 <= parent < node for node, parent in enumerate(parents))
    if not ordered or max(depths_of_rows(parents)) > length:
        raise GenerationError(
            f"{name}.propose returned a tree of {count} drafts with parents {short(parents)}; expected one for each "
            f"draft, -1 or a draft before it, and paths of at most {length} drafts."
        )


def check_drafted(drafter: Any, drafted: list[int], vocab_size: int) -> None:
    """Raise ``GenerationError`` if an id in ``drafted`` is outside the target's vocabulary."""
    wrong = next((token for token in drafted if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise GenerationError(
            f"{type(drafter).__name__} proposed the token id {wrong}; this target's ids are 0 to {vocab_size - 1}. "
            "Use a drafter that was made for this target's vocabulary."
        )


def _form(value: Any) -> str:
    return f"an array of shape {value.shape} {value.dtype}" if isinstance(value, mx.array) else type(value).__name__
