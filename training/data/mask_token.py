"""Choosing a mask token, which stands for "not yet drafted": one that no text uses.

A drafter reads the mask's embedding at every position that it drafts. A token that also occurs in text would have two
meanings, which costs acceptance.
"""

import logging
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash import LoadedTargetModel
from dflash.core.errors import DataError

from .sequences import Sequences

logger = logging.getLogger(__name__)

_RESERVED = re.compile(r"[<\[].*(unused|reserved|placeholder|extra_id|control).*[>\]]", re.IGNORECASE)
_SHOWN = 5


@dataclass(frozen=True)
class UnusedToken:
    """An id that no text uses; ``text`` is ``None`` if the tokenizer has no token for it."""

    id: int
    text: str | None

    def __str__(self) -> str:
        return f"{self.id} (no text)" if self.text is None else f"{self.text!r} ({self.id})"


def unused_tokens(target: LoadedTargetModel, *dataset: Sequences) -> list[UnusedToken]:
    """Tokens of ``target`` that can serve as mask, best first: masks, reserved ones, ids without text, others.

    Stop tokens, tokens named in the chat template, and tokens of ``dataset`` are left out. Raises ``DataError`` if the
    target was loaded without a tokenizer.
    """
    tokenizer = _tokenizer(target)
    added = {number: str(token) for number, token in getattr(tokenizer, "added_tokens_decoder", {}).items()}
    texts = {number: text for text, number in tokenizer.get_vocab().items()} | added
    special, template = set(tokenizer.all_special_ids), str(tokenizer.chat_template or "")
    used = _used_by_the_tokenizer(target).union(*(np.unique(s.tokens).tolist() for s in dataset))
    ranked = []
    for number in range(target.vocab_size):
        text = texts.get(number)
        if number in used or (text is not None and text in template):
            continue
        if text is None:
            ranked.append((2, number))
        elif text == tokenizer.mask_token or (number in added and "mask" in text.lower()):
            ranked.append((0, number))
        elif _RESERVED.fullmatch(text):
            ranked.append((1, number))
        elif number in special:
            ranked.append((3, number))
    return [UnusedToken(number, texts.get(number)) for _, number in sorted(ranked)]


def require_unused(mask_token_id: int, target: LoadedTargetModel, *dataset: Sequences) -> None:
    """Check that no sequence of ``dataset`` holds the mask, and warn if it is a token of ordinary text.

    Raises ``DataError``, with unused tokens named, for a mask that occurs.
    """
    count = sum(int((sequences.tokens == mask_token_id).sum()) for sequences in dataset)
    if count:
        raise DataError(
            f"The mask token {_name(mask_token_id, target)} occurs {count} times in the dataset, but a mask must be a "
            f"token that no text uses. Set drafter.mask_token to {suggestion(target, *dataset)}."
        )
    unused = unused_tokens(target, *dataset)
    if unused and mask_token_id not in {token.id for token in unused}:
        logger.warning(
            "The mask token %s is one that text or the chat template may use; better is %s.",
            _name(mask_token_id, target),
            suggestion(target, *dataset),
        )


def suggestion(target: LoadedTargetModel, *dataset: Sequences) -> str:
    """The first unused tokens, for messages: ``one of '<|mask|>' (4), 1030 (no text)``."""
    unused = unused_tokens(target, *dataset)
    if not unused:
        return "a token that no text uses (this tokenizer reserves none)"
    more = f" and {len(unused) - _SHOWN} more" if len(unused) > _SHOWN else ""
    return ("one of " if len(unused) > 1 else "") + ", ".join(map(str, unused[:_SHOWN])) + more


def _used_by_the_tokenizer(target: LoadedTargetModel) -> set[int]:
    """The tokenizer's functional tokens: start, end, separator, padding."""
    tokenizer = _tokenizer(target)
    names = ("bos_token_id", "eos_token_id", "unk_token_id", "pad_token_id", "sep_token_id", "cls_token_id")
    numbers = (getattr(tokenizer, name, None) for name in names)
    return {number for number in numbers if isinstance(number, int)} | target.stop_token_ids()


def _name(number: int, target: LoadedTargetModel) -> str:
    text = _tokenizer(target).convert_ids_to_tokens(number)
    return str(UnusedToken(number, text))


def _tokenizer(target: LoadedTargetModel) -> Any:
    if target.tokenizer is None:
        raise DataError("This target was loaded without a tokenizer; load it from a folder that has one.")
    return target.tokenizer
