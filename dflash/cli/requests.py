"""The prompts of a command: read before a model loads, made into token ids once it has."""

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import DataError, DFlashError, GenerationError
from ..core.option import option
from .options import TEMPLATE_CONFIG

if TYPE_CHECKING:
    from ..evaluation import BenchPrompt
    from ..prompts.conversations import Conversation
    from ..target import LoadedTargetModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PromptFormat:
    """How a prompt becomes tokens: through the chat template or raw, its switches, a system prompt, a begun answer."""

    chat: bool = option(
        True, "Use the chat template, or the prompt as it is.", flag="--chat/--raw", also=(" /--ignore-chat-template",)
    )
    system: str | None = option(
        None, "System prompt, where the prompt has none.", kind=str, metavar="TEXT", also=("system_prompt",)
    )
    chat_template_config: dict[str, Any] | None = option(
        None, f"Switches of the chat template: '{TEMPLATE_CONFIG}'.", kind=str, metavar="JSON"
    )
    prefill_response: str | None = option(None, "The answer goes on after this text.", kind=str, metavar="TEXT")

    def tokens(self, prompt: str | list[dict[str, str]], target: "LoadedTargetModel") -> list[int]:
        """Token ids of a text or of messages. Raises ``GenerationError`` where they have none."""
        from ..prompts.tokens import prompt_tokens

        return prompt_tokens(target, prompt, **vars(self))

    def in_messages(self, target: "LoadedTargetModel") -> Callable[[str | list[dict[str, str]]], list[int]]:
        """:meth:`tokens` of what has the system prompt already, if there is to be one."""
        return partial(replace(self, system=None).tokens, target=target)

    def continuation(self, text: str, target: "LoadedTargetModel") -> list[int]:
        """Token ids that go on within a cached message. Raises ``GenerationError`` as above."""
        from ..prompts.tokens import continuation_tokens

        if self.system is not None:
            raise GenerationError("The system prompt belongs to the beginning: give --system to dflash cache-prompt.")
        return continuation_tokens(target, text, **{name: v for name, v in vars(self).items() if name != "system"})


@dataclass(frozen=True)
class Requests:
    """Conversations to answer, and where they came from."""

    conversations: list["Conversation"]
    source: str

    @classmethod
    def read(
        cls, source: str | Path | None = None, *, template: str | None = None, limit: int | None = None
    ) -> "Requests":
        """The first ``limit`` conversations of a JSONL file or a hub dataset; ``template`` makes their prompts.

        Of a dataset's folder they are those that it holds out. Without a ``source`` they are the held-out requests of
        the bundled models.
        """
        from ..evaluation import HELDOUT
        from ..prompts.conversations import read_conversations

        if limit is not None and limit < 1:
            raise DFlashError(f"--limit must be at least 1, got {limit}.")
        source = source or HELDOUT
        if Path(source).is_dir():
            return cls(_heldout(Path(source), template)[:limit], str(source))
        return cls(read_conversations(source, template=template, limit=limit), str(source))

    @classmethod
    def of_suites(cls, names: list[str], limit: int | None = None) -> "Requests":
        """The first ``limit`` prompts of each of the suites ``NAME`` or ``NAME=FILE.jsonl``, or of ``all``."""
        from ..evaluation.suites import named_suites

        read = [suite.read(file, limit) for suite, file in named_suites(names)]
        return cls([conversation for suite in read for conversation in suite], ", ".join(names))

    def identity(self) -> dict[str, Any]:
        """Plain data by which to tell prompts from others: their source, number and hash."""
        from ..prompts.conversations import digest

        path = Path(self.source)
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else digest(self.conversations)
        return {"source": self.source, "sha256": sha256, "prompts": len(self.conversations)}

    def encode(self, target: "LoadedTargetModel", form: PromptFormat) -> list["BenchPrompt"]:
        """Each conversation up to the response that is wanted, as token ids.

        Raises ``DataError``, naming the line, where the target cannot take one.
        """
        return [_encode(conversation, target, form) for conversation in self.conversations]

    def fitting(
        self, target: "LoadedTargetModel", form: PromptFormat, longest: int | None, max_tokens: int
    ) -> tuple[list["BenchPrompt"], list[str]]:
        """The prompts that leave room for ``max_tokens`` tokens, and one sentence on each that does not.

        Raises ``DFlashError`` if none does, and as :meth:`encode`; but what a server recorded is left out.
        """
        found, left_out = [], []
        for conversation in self.conversations:
            try:
                prompt = _encode(conversation, target, form)
            except DataError as error:
                if not Path(self.source).is_dir():
                    raise
                left_out.append(f"{error} It is left out.")
                continue
            if longest is None or len(prompt.tokens) + max_tokens <= longest:
                found.append(prompt)
                continue
            left_out.append(
                f"{conversation.where} is left out: {len(prompt.tokens)} prompt tokens and {max_tokens} new ones "
                f"exceed the limit of {longest}; ask for fewer."
            )
        if not found:
            raise DFlashError(f"No prompt of {self.source} fits: {left_out[0]}")
        for sentence in left_out:
            logger.warning("%s", sentence)
        return found, left_out


def _encode(conversation: "Conversation", target: "LoadedTargetModel", form: PromptFormat) -> "BenchPrompt":
    from ..evaluation import BenchPrompt

    in_messages = form.in_messages(target)
    asked = conversation.unanswered()
    asked = asked if form.system is None else asked.with_system(form.system)
    messages = list(asked.messages)
    check = conversation.extra.get("check")
    if check is not None and not isinstance(check, dict):
        raise DataError(f'{conversation.where}: "check" must be an object, got {type(check).__name__}.')
    alone = len(messages) == 1 and messages[0]["role"] == "user"
    try:
        tokens = in_messages(messages[0]["content"] if alone else messages)
        if asked.later:  # a later turn that cannot be asked shows before anything is decoded
            in_messages(list(asked.after("").messages))
    except GenerationError as error:
        raise DataError(f"{conversation.where}: {error}") from error
    kind = conversation.extra.get("kind")
    return BenchPrompt(
        messages[-1]["content"], tokens, check, None if kind is None else str(kind), asked if asked.later else None
    )


def _heldout(folder: Path, template: str | None) -> list["Conversation"]:
    """What a dataset holds out, each request once. Completions, which a server may record, are no conversations."""
    from ..prompts.conversations import conversation, message_bytes
    from ..training.data.text import read_dataset

    found, errors = [], []
    for row in read_dataset(folder, "heldout"):
        try:
            if row.text.get("chat", True):
                found.append(conversation(row.text, f"{folder}, conversation {row.number}", template))
        except DataError as error:  # a server records what it was asked, such as an empty message
            errors.append(error)
    if errors:
        logger.warning("Left out, as they are no prompts: %d. The first is %s", len(errors), errors[0])
    if not found:
        raise DataError(f"{folder} holds out no conversation; see 'dflash data split', or give a file of prompts.")
    return list({message_bytes(own.unanswered().messages): own for own in found}.values())
