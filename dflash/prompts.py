"""Conversations to train on, read from JSONL or from a dataset on the hub.

Knows what a line may look like. Must not know tokenizers, targets or what becomes of the conversations.

A line is ``{"prompt": str}``, ``{"prompt": str, "response": str}`` (``"completion"`` too) or
``{"messages": [{"role": str, "content": str}, ...]}``, mlx-lm's own forms among them; other keys are left alone.
With a template such as ``"Question: {question}"`` a line's own keys make the prompt.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash.errors import DataError
from dflash.files import is_hub_name

_OURS = ("messages", "prompt", "response", "completion")
ROLES = ("system", "developer", "user", "assistant", "tool")
_FORMS = '{"prompt": "..."}, {"prompt": "...", "response": "..."} or {"messages": [{"role": "user", "content": "..."}]}'


@dataclass(frozen=True)
class Conversation:
    """Messages in order, as chat templates take them; ``where`` they came from is for error messages only.

    ``extra`` holds the other keys of the line, such as the answer that a prompt expects.
    """

    messages: tuple[dict[str, str], ...]
    where: str
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def answered(self) -> bool:
        """Whether the last message is a response."""
        return self.messages[-1]["role"] == "assistant"

    def unanswered(self) -> "Conversation":
        """The same without its last response."""
        last = max(i for i, message in enumerate(self.messages) if message["role"] != "assistant")
        return Conversation(self.messages[: last + 1], self.where, self.extra)

    @property
    def opening(self) -> tuple[dict[str, str], ...]:
        """What stands before the first response."""
        roles = [message["role"] for message in self.messages]
        return self.messages[: roles.index("assistant")] if "assistant" in roles else self.messages


def digest(conversations: Iterable[Conversation]) -> str:
    """SHA-256 of all messages, in order."""
    total = hashlib.sha256()
    for conversation in conversations:
        total.update(message_bytes(conversation.messages) + b"\n")
    return total.hexdigest()


def message_bytes(messages: Iterable[dict[str, str]]) -> bytes:
    """Messages as bytes, equal for equal messages."""
    return json.dumps([(m["role"], m["content"]) for m in messages]).encode()


def read_conversations(
    source: str, *, split: str = "train", subset: str | None = None, template: str | None = None
) -> list[Conversation]:
    """Conversations of a JSONL file, or of a hub dataset ``org/name`` (the only case that uses the network).

    ``split`` and ``subset`` choose a part of a hub dataset, as in ``datasets.load_dataset``; ``template`` makes
    the prompt from a line's keys, by ``str.format``. Raises :class:`~dflash.errors.DataError`, naming the line.
    """
    path = Path(source)
    if path.exists():
        rows: Iterator[tuple[str, Any]] = _jsonl_rows(path)
    elif is_hub_name(source) and path.suffix not in (".json", ".jsonl"):
        rows = _hub_rows(source, split, subset)
    else:
        raise DataError(f"There is no file {source!r}; expected a JSONL file or a hub dataset such as 'org/name'.")
    conversations = [conversation(row, where, template) for where, row in rows]
    if not conversations:
        raise DataError(f"{source} is empty; expected lines such as {_FORMS}.")
    return conversations


def _jsonl_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Every line that is not blank, and where it stands."""
    try:
        with path.open("rb") as file:  # str.splitlines would also part lines at U+2028, which JSON text may hold
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


def _hub_rows(name: str, split: str, subset: str | None) -> Iterator[tuple[str, Any]]:
    try:
        from datasets import load_dataset  # an extra: nothing else needs it
    except ImportError as error:
        raise DataError(
            f"There is no file {name!r}, and hub datasets need the 'datasets' package: "
            "pip install 'dflash-research[hub]', or give a JSONL file."
        ) from error
    try:
        rows = load_dataset(name, subset, split=split)
    except Exception as error:  # the hub client raises many unrelated kinds
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise DataError(f"Cannot load split {split!r} of the hub dataset {name!r}: {reason}") from error
    for number, row in enumerate(rows):
        yield f"{name} [{split}], row {number}", row


def conversation(row: Any, where: str, template: str | None = None) -> Conversation:
    """One line as a conversation. Raises :class:`~dflash.errors.DataError`, naming ``where``."""
    if not isinstance(row, dict):
        raise DataError(f"{where} is a {type(row).__name__}, not an object; expected {_FORMS}.")
    if template is not None:
        messages: Any = _exchange(row | {"prompt": _filled(template, row, where)}, where)
    elif "messages" in row:
        messages = row["messages"]
    elif "prompt" in row:
        messages = _exchange(row, where)
    else:
        keys = ", ".join(map(repr, row)) or "none"
        raise DataError(f"{where} has no 'prompt' or 'messages' (its keys: {keys}); name others in a template.")
    extra = {key: value for key, value in row.items() if key not in _OURS}
    return Conversation(_checked(messages, where), where, extra)


def _exchange(row: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """A prompt and, where it is there, its response."""
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
        raise DataError(f"{where}: 'messages' must be a list of at least one message, got {_short(messages)}.")
    for message in messages:
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise DataError(f"{where}: a message must have 'role' and 'content', got {_short(message)}.")
        role, content = message["role"], message["content"]
        if role not in ROLES:
            raise DataError(f"{where}: the role {_short(role)} is not known; expected one of {', '.join(ROLES)}.")
        if not isinstance(content, str):
            raise DataError(f"{where}: the text of the {role} must be a string, got {_short(content)}.")
        if role == "user" and not content.strip():
            raise DataError(f"{where}: the prompt is empty.")
        if not _encodable(content):
            raise DataError(f"{where}: the text of the {role} holds half a surrogate pair, which no text can.")
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


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
