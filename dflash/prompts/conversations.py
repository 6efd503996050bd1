"""Conversations, read from a JSONL file or a dataset on the hub; every command reads them here.

A line is ``{"prompt": str}``, ``{"prompt": str, "response": str}`` (or ``"completion"``) or
``{"messages": [{"role": str, "content": str}, ...]}``, which includes mlx-lm's forms. Other keys are kept unchanged.
With a template such as ``"Question: {question}"`` the prompt is made from the line's keys.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from ..core.errors import DataError, install_extra, one_line
from ..core.files import is_hub_name
from ..core.values import short

_OURS = ("messages", "prompt", "response", "completion")
MOST = 2**62  # lines: islice counts no further
ROLES = ("system", "developer", "user", "assistant", "tool")
_FORMS = '{"prompt": "..."}, {"prompt": "...", "response": "..."} or {"messages": [{"role": "user", "content": "..."}]}'


@dataclass(frozen=True)
class Conversation:
    """Messages in order, as chat templates take them; ``where`` they came from is only for error messages.

    ``extra`` holds the other keys of the line, such as the expected answer. ``later`` holds the user's further turns,
    one after each answer.
    """

    messages: tuple[dict[str, str], ...]
    where: str
    extra: dict[str, Any] = field(default_factory=dict)
    later: tuple[str, ...] = ()

    @property
    def answered(self) -> bool:
        """Whether the last message is a response."""
        return self.messages[-1]["role"] == "assistant"

    def unanswered(self) -> "Conversation":
        """The conversation without its last response."""
        last = max(i for i, message in enumerate(self.messages) if message["role"] != "assistant")
        return replace(self, messages=self.messages[: last + 1])

    def after(self, answer: str) -> "Conversation":
        """The conversation continued with ``answer`` and the next of the ``later`` turns."""
        turns = {"role": "assistant", "content": answer}, {"role": "user", "content": self.later[0]}
        return replace(self, messages=(*self.messages, *turns), later=self.later[1:])

    def with_system(self, text: str) -> "Conversation":
        """The conversation with ``text`` as its system prompt, unless it has one."""
        if self.messages[0]["role"] in ("system", "developer"):
            return self
        return replace(self, messages=({"role": "system", "content": text}, *self.messages))

    @property
    def opening(self) -> tuple[dict[str, str], ...]:
        """The messages before the first response."""
        roles = [message["role"] for message in self.messages]
        return self.messages[: roles.index("assistant")] if "assistant" in roles else self.messages


def digest(conversations: Iterable[Conversation]) -> str:
    """SHA-256 of all messages and later turns, in order."""
    total = hashlib.sha256()
    for conversation in conversations:
        later = [{"role": "user", "content": turn} for turn in conversation.later]
        total.update(message_bytes([*conversation.messages, *later]) + b"\n")
    return total.hexdigest()


def message_bytes(messages: Iterable[dict[str, str]]) -> bytes:
    """Messages as bytes, equal for equal messages."""
    return json.dumps([(m["role"], m["content"]) for m in messages]).encode()


def read_conversations(
    source: str | Path,
    *,
    template: str | None = None,
    limit: int | None = None,
    split: str | None = None,
    subset: str | None = None,
    turns: str | None = None,
) -> list[Conversation]:
    """Conversations of a JSONL file, or of a hub dataset ``org/name`` (the only case that uses the network).

    Args:
        source: A file, or the name of a hub dataset. A :class:`~pathlib.Path` is always a file.
        template: Makes the prompt from a line's keys with ``str.format``: ``"Question: {question}"``.
        limit: Read only the first lines, at most this many.
        split: Of a hub dataset, as in ``datasets.load_dataset``; by default ``"train"``.
        subset: Of a hub dataset, as in ``datasets.load_dataset``.
        turns: The key that holds the user's turns, a list of texts, of which the first is the prompt.

    Raises ``DataError``, naming the line.
    """
    path = Path(source)
    if limit is not None and limit < 1:
        raise DataError(f"limit must be at least 1, got {limit}.")
    if path.exists():
        if split is not None or subset is not None:
            option = "--split" if split is not None else "--subset"
            raise DataError(f"{source} is a file; {option} chooses a part of a hub dataset. Leave the option out.")
        rows: Iterator[tuple[str, Any]] = _jsonl_rows(path)
    elif isinstance(source, str) and is_hub_name(source) and path.suffix not in (".json", ".jsonl"):
        rows = _hub_rows(source, split or "train", subset)
    else:
        raise DataError(
            f"There is no file {str(source)!r}; expected a JSONL file"
            + (" or a hub dataset such as 'org/name'." if isinstance(source, str) else ".")
        )
    conversations = [conversation(row, where, template, turns) for where, row in islice(rows, min(limit or MOST, MOST))]
    if not conversations:
        raise DataError(f"{source} is empty; expected lines such as {_FORMS}.")
    return conversations


def _jsonl_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """The place and the value of every line that is not blank."""
    try:
        with path.open("rb") as file:  # str.splitlines would also split at U+2028, which JSON text may hold
            for number, line in enumerate(file, 1):
                where = f"{path}, line {number}"
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                if line.strip():
                    yield where, _parse(line, where)
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror}.") from error


def _parse(line: bytes, where: str) -> Any:
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: byte {error.start + 1} is not UTF-8 text; save the file as UTF-8.") from error
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where} is not valid JSON ({error.msg}, character {error.pos + 1}); expected one object a line, {_FORMS}."
        ) from error
    except RecursionError as error:
        raise DataError(f"{where} is nested too deeply to read; expected {_FORMS}.") from error
    except ValueError as error:  # a number of thousands of digits
        raise DataError(f"{where} cannot be read: {one_line(error)}; expected {_FORMS}.") from error


def _hub_rows(name: str, split: str, subset: str | None) -> Iterator[tuple[str, Any]]:
    try:
        from datasets import load_dataset  # an extra: nothing else needs it
    except ImportError as error:
        raise DataError(
            f"There is no file {name!r}, and hub datasets need the 'datasets' package: "
            f"{install_extra('hub')}, or give a JSONL file."
        ) from error
    try:
        rows = load_dataset(name, subset, split=split)
    except Exception as error:  # the hub client raises many unrelated types
        raise DataError(f"Cannot load split {split!r} of the hub dataset {name!r}: {one_line(error)}") from error
    for number, row in enumerate(rows):
        yield f"{name} [{split}], row {number}", row


def conversation(row: Any, where: str, template: str | None = None, turns: str | None = None) -> Conversation:
    """One line as a conversation. Raises ``DataError``, naming ``where``."""
    if not isinstance(row, dict):
        raise DataError(f"{where} must hold an object, not a {type(row).__name__}; expected {_FORMS}.")
    if turns is not None:
        return _with_turns(row, where, turns)
    if template is not None:
        messages: Any = _exchange(row | {"prompt": _filled(template, row, where)}, where)
    elif "messages" in row:
        messages = row["messages"]
    elif "prompt" in row:
        messages = _exchange(row, where)
    else:
        keys = ", ".join(map(repr, row)) or "none"
        text = next((key for key, value in row.items() if isinstance(value, str) and key.isidentifier()), "question")
        raise DataError(
            f"{where} has no 'prompt' or 'messages' (its keys: {keys}); make a prompt of other keys with "
            f"--template, such as --template '{{{text}}}'."
        )
    extra = {key: value for key, value in row.items() if key not in _OURS}
    return Conversation(_checked(messages, where), where, extra)


def _with_turns(row: dict[str, Any], where: str, key: str) -> Conversation:
    if not isinstance(row.get(key), list) or not row[key]:
        raise DataError(f"{where}: {key!r} must be a list of the user's turns, got {short(row.get(key))}.")
    first, *later = _checked([{"role": "user", "content": turn} for turn in row[key]], where)
    extra = {name: value for name, value in row.items() if name not in (*_OURS, key)}
    return Conversation((first,), where, extra, tuple(message["content"] for message in later))


def _exchange(row: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """The messages of a prompt and its response, if the line has one."""
    given = [row[name] for name in ("response", "completion") if name in row]
    if len(given) > 1:
        raise DataError(f"{where} has both 'response' and 'completion'; expected one of them.")
    messages = [{"role": "user", "content": row["prompt"]}]
    return messages + [{"role": "assistant", "content": text} for text in given]


def _filled(template: str, row: dict[str, Any], where: str) -> str:
    try:
        return template.format_map(row)
    except KeyError as error:
        keys = ", ".join(map(repr, row))
        raise DataError(f"{where} has no {error} for the template {template!r}; its keys: {keys}.") from error
    except (ValueError, IndexError, AttributeError, TypeError) as error:
        raise DataError(f"The template {template!r} does not fit {where}: {error}.") from error


def _checked(messages: Any, where: str) -> tuple[dict[str, str], ...]:
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{where}: 'messages' must be a list of at least one message, got {short(messages)}.")
    for message in messages:
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise DataError(f"{where}: a message must have 'role' and 'content', got {short(message)}.")
        role, content = message["role"], message["content"]
        if role not in ROLES:
            raise DataError(f"{where}: the role {short(role)} is not known; expected one of {', '.join(ROLES)}.")
        if not isinstance(content, str):
            raise DataError(f"{where}: the text of the {role} must be a string, got {short(content)}.")
        if role == "user" and not content.strip():
            raise DataError(f"{where}: the prompt is empty; expected some text.")
        if not _encodable(content):
            raise DataError(f"{where}: the text of the {role} holds half a surrogate pair, which is not valid text.")
    roles = [message["role"] for message in messages]
    if "user" not in roles[: roles.index("assistant") if "assistant" in roles else None]:
        raise DataError(f"{where} has no message of the user before the first response; expected a prompt.")
    if roles[-1] in ("system", "developer"):
        raise DataError(f"{where} ends with the role {roles[-1]!r}; expected a prompt or a response last.")
    return tuple({"role": m["role"], "content": m["content"]} for m in messages)


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
