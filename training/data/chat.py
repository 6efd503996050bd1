"""Conversations as token ids, with a loss mask over the tokens of their responses.

A response is located by rendering the conversation again with a mark in its place: the difference is the response,
and it must consist of the response's own characters. This works for templates that trim, that drop the thinking of
earlier turns, or that add an empty thought.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jinja2 import TemplateError

from dflash import LoadedTargetModel
from dflash.core.errors import DataError
from dflash.prompts.conversations import Conversation

from .sequences import Ints

MARK = "\ue000response\ue001"
"""Stands for a response in a trial rendering: private-use characters, which no template trims."""

Messages = Sequence[dict[str, str]]


@dataclass(frozen=True)
class Row:
    """One sequence: ``tokens [L]`` and ``loss_mask [L]``, true on responses; ``None`` if the response is missing.

    ``draft [R]`` may hold a guess of the missing response.
    """

    tokens: Ints
    loss_mask: Ints | None
    draft: Ints | None = None

    @property
    def prompt(self) -> Ints:
        """The tokens before the last response."""
        if self.loss_mask is None:
            return self.tokens
        begins = np.flatnonzero(self.loss_mask & ~np.concatenate([[False], self.loss_mask[:-1]]))
        return self.tokens[: begins[-1]] if len(begins) else self.tokens


def encode(conversation: Conversation, target: LoadedTargetModel, chat: bool, switches: dict[str, Any]) -> Row:
    """Tokens of a conversation in the target's chat template, or as plain text (``chat=False``, or no template).

    Without a response the tokens end where the target's response would begin. The stop token after a response belongs
    to it. ``switches`` are passed to the chat template. Raises ``DataError`` with the line's name if the template
    refuses the messages or a response cannot be located.
    """
    if target.tokenizer is None:
        raise DataError("This target has no tokenizer to make tokens of prompts; load it from a folder that has one.")
    try:
        if chat and target.tokenizer.has_chat_template:
            row = _templated(conversation, target, switches)
        else:
            row = _plain(conversation, target.tokenizer, target.stop_token_ids())
        if not 0 <= row.tokens.max(initial=-1) < target.vocab_size:
            raise DataError(
                f"the target knows tokens 0 to {target.vocab_size - 1}, but its tokenizer and chat template give "
                f"{row.tokens.max() if len(row.tokens) else 'none'}: this is the tokenizer of another model."
            )
        return row
    except (TemplateError, TypeError, ValueError) as error:
        if isinstance(error, DataError):
            raise DataError(f"{conversation.where}: {error}") from error
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise DataError(f"{conversation.where}: the target's chat template refuses these messages: {reason}") from error


def encode_draft(
    conversation: Conversation, target: LoadedTargetModel, chat: bool, switches: dict[str, Any], prompt: Ints
) -> Ints | None:
    """Tokens ``[R]`` of the last response after the ``prompt`` that :func:`encode` makes without it.

    ``None`` if they cannot be separated from the template's tokens.
    """
    try:
        given = encode(conversation, target, chat, switches)
    except DataError:
        return None
    length = len(prompt)
    if given.loss_mask is None or not np.array_equal(given.tokens[:length], prompt):
        return None
    draft = given.tokens[length:][given.loss_mask[length:]]
    return draft if len(draft) else None


def _templated(conversation: Conversation, target: LoadedTargetModel, switches: dict[str, Any]) -> Row:
    tokenizer, messages = target.tokenizer, conversation.messages
    if not conversation.answered:
        return Row(np.asarray(target.adapter.chat_tokens(tokenizer, list(messages), **switches), np.int32), None)

    def render(messages: Messages) -> str:
        return tokenizer.apply_chat_template(list(messages), tokenize=False, **switches)

    text = render(messages)
    spans = response_spans(render, messages, text)
    return Row(*_masked(tokenizer, text, spans, target.stop_token_ids(), special=False))


def response_spans(render: Callable[[Messages], str], messages: Messages, text: str) -> list[tuple[int, int]]:
    """Start and end, in characters, of every response in ``text``, which is ``render(messages)``.

    Raises ``DataError`` if the template leaves a response out, repeats it or rewrites it.
    """
    spans = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        marked = render([*messages[:i], message | {"content": MARK}, *messages[i + 1 :]])
        before, _, after = marked.partition(MARK)
        start = len(os.path.commonprefix([text, before]))  # noqa: RUF071 - characters, not folders
        end = len(text) - len(after)
        own = "".join(text[start:end].split()) in "".join(message["content"].split())
        if marked.count(MARK) != 1 or not text.endswith(after) or start > end or not own:
            raise DataError(
                f"the target's chat template does not show the response in message {i + 1} exactly once and unchanged, "
                "so its tokens cannot be found; end the conversation before that response, or give prompts alone."
            )
        spans.append((start, end))
    return spans


def _plain(conversation: Conversation, tokenizer: Any, stops: frozenset[int]) -> Row:
    """A prompt and, if there is one, its response with a stop token, without a template."""
    roles = [message["role"] for message in conversation.messages]
    if roles not in (["user"], ["user", "assistant"]):
        raise DataError(
            "without a chat template a conversation must be one prompt and at most one response, "
            f"not messages of {', '.join(roles)}."
        )
    prompt, *response = [message["content"] for message in conversation.messages]
    if not response:
        return Row(np.asarray(tokenizer.encode(prompt), np.int32), None)
    text = prompt + response[0]
    tokens, mask = _masked(tokenizer, text, [(len(prompt), len(text))], stops, special=True)
    if tokenizer.eos_token_id is not None and tokens[-1] not in stops:
        tokens, mask = np.append(tokens, np.int32(tokenizer.eos_token_id)), np.append(mask, True)
    return Row(tokens, mask)


def _masked(
    tokenizer: Any, text: str, spans: list[tuple[int, int]], stops: frozenset[int], special: bool
) -> tuple[Ints, Ints]:
    """Tokens of ``text`` and their loss mask: tokens entirely inside a span, and a stop token right after one."""
    if not getattr(tokenizer, "is_fast", False):
        raise DataError(
            "the target's tokenizer does not say which characters a token stands for, so the tokens of a given "
            "response cannot be found; let the target write the responses (--regenerate)."
        )
    encoding = tokenizer.backend_tokenizer.encode(text, add_special_tokens=special)
    tokens = np.asarray(encoding.ids, np.int32)
    begins, ends = np.asarray(encoding.offsets, np.int64).reshape(-1, 2).T
    loss_mask = np.zeros(len(tokens), bool)
    for start, end in spans:
        inside = (begins >= start) & (ends <= end) & (ends > begins)
        for i in np.flatnonzero((begins < start) & (start < ends) & (ends <= end)):
            inside[i] = text[begins[i] : start].isspace()  # a template's leading space joins the response's first token
        loss_mask |= inside
        if inside.any():
            after = int(np.flatnonzero(inside)[-1]) + 1
            if after < len(tokens) and tokens[after] in stops:
                loss_mask[after] = True
    return tokens, loss_mask
