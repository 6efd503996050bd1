"""From a prompt (a text, messages or token ids) to the token ids that the target reads."""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import mlx.core as mx

from ..core.errors import GenerationError, one_line
from ..core.values import short
from ..target import LoadedTargetModel
from .conversations import ROLES

Message = Mapping[str, Any]
Prompt = str | Sequence[Message] | Sequence[int] | mx.array
"""A user's text, the messages of a conversation (``role`` and ``content`` each), or token ids."""


_NO_SWITCHES = {
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "max_length", "messages",
    "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "self", "tokenize", "tokenizer",
    "tokenizer_kwargs", "truncation",
}  # fmt: skip
"""What the tokenizer's ``apply_chat_template`` takes for itself."""


def prompt_tokens(
    target: LoadedTargetModel,
    prompt: Prompt,
    *,
    chat: bool = True,
    system: str | None = None,
    chat_template_config: Mapping[str, Any] | None = None,
    prefill_response: str | None = None,
    opening: bool = False,
) -> list[int]:
    """Token ids of ``prompt``; text and messages go through the target's chat template.

    Args:
        target: The target with its tokenizer, which token ids alone do not need.
        prompt: A user's text, messages that end with the one to answer, or token ids, which are used unchanged.
        chat: ``False`` encodes a text without the chat template.
        system: The system prompt, put before the prompt.
        chat_template_config: Switches of the chat template, such as ``{"enable_thinking": False}``.
        prefill_response: The beginning of the answer, after which the target goes on.
        opening: End within the last message instead of where its answer begins.

    Raises ``GenerationError`` for an empty or malformed prompt, or if an option needs a chat template that is not used.
    """
    config = checked_template_config(chat_template_config)
    if not isinstance(chat, bool):
        raise GenerationError(f"chat must be True or False, got {short(chat)}.")
    if not isinstance(prompt, str) and not _is_messages(prompt):
        if system is not None or prefill_response is not None or config:
            raise GenerationError(
                "Token ids are taken as they stand: system, prefill_response and chat_template_config need text."
            )
        return token_row(cast(Any, prompt))
    if target.tokenizer is None:
        raise GenerationError("This target has no tokenizer; pass token ids.")
    templated = chat and target.tokenizer.has_chat_template
    plain = isinstance(prompt, str) and system is None and prefill_response is None and not config
    if not templated and not plain:
        why = "the target's tokenizer has none" if chat else "the prompt is to be taken as it stands"
        raise GenerationError(
            f"Messages, system, prefill_response and chat_template_config need the chat template, and {why}."
        )
    messages = _checked_messages(prompt, system, str(getattr(target.tokenizer, "chat_template", "")))
    if prefill_response is not None:
        if not isinstance(prefill_response, str):
            raise GenerationError(f"prefill_response must be a text, got {short(prefill_response)}.")
        _check_text("prefill_response", prefill_response)
        messages.append({"role": "assistant", "content": prefill_response})
    within = opening or prefill_response is not None
    if within:
        config |= {"add_generation_prompt": False, "continue_final_message": True}
    with _quiet_about_length():
        try:
            if templated and within:
                tokens = target.tokenizer.apply_chat_template(messages, **config)
            elif templated:
                tokens = target.adapter.chat_tokens(target.tokenizer, messages, **config)
            else:
                tokens = target.tokenizer.encode(prompt)
        except Exception as error:  # a template is a program that comes with the target
            raise GenerationError(f"The target's tokenizer cannot take this prompt: {one_line(error)}") from error
    if not tokens:
        raise GenerationError(
            "The tokenizer makes no tokens of this text; is there a tokenizer.json in the target's folder?"
        )
    return list(tokens)


def continuation_tokens(
    target: LoadedTargetModel,
    text: str,
    *,
    chat: bool = True,
    chat_template_config: Mapping[str, Any] | None = None,
    prefill_response: str | None = None,
) -> list[int]:
    """Token ids that continue a cached user message: ``text``, and what the chat template puts after it.

    No token spans the end of the cached text. Raises ``GenerationError`` as :func:`prompt_tokens`.
    """
    given: dict[str, Any] = {"chat_template_config": chat_template_config, "prefill_response": prefill_response}
    prompt_tokens(target, text, chat=chat, **given)  # raises those errors
    if not chat or not target.tokenizer.has_chat_template:
        return list(target.tokenizer.encode(text, add_special_tokens=False))
    messages = _checked_messages(text)
    config = {"add_generation_prompt": True, "tokenize": False} | checked_template_config(chat_template_config)
    whole = target.tokenizer.apply_chat_template(messages, **config)
    if text not in whole:
        raise GenerationError("The chat template changes this text, so that it cannot follow a prompt cache.")
    start = whole.rindex(text)  # of the part that a begun answer does not change
    if prefill_response is not None:
        messages.append({"role": "assistant", "content": prefill_response})
        config |= {"add_generation_prompt": False, "continue_final_message": True}
        whole = target.tokenizer.apply_chat_template(messages, **config)
    return list(target.tokenizer.encode(whole[start:], add_special_tokens=False))


def token_row(tokens: Sequence[int] | mx.array) -> list[int]:
    """Token ids of one sequence: ``[L]``, ``[1, L]`` or a list. Raises ``GenerationError`` for other forms."""
    expected = "Expected a text, a list of messages or token ids"
    if tokens is None or isinstance(tokens, bytes | bytearray | Mapping):
        raise GenerationError(f"{expected}, got {type(tokens).__name__}.")
    if isinstance(tokens, list | tuple) and any(isinstance(token, bool) for token in tokens):
        raise GenerationError(f"{expected}, got True or False among {short(tokens)}.")
    try:
        array = mx.array(tokens)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise GenerationError(f"{expected}, got {type(tokens).__name__}: {short(tokens)}.") from error
    if array.ndim == 2 and array.shape[0] != 1:
        raise GenerationError(f"Batch size {array.shape[0]} is not supported; decode one sequence at a time.")
    if array.ndim not in (1, 2) or (array.size and not mx.issubdtype(array.dtype, mx.integer)):
        raise GenerationError(f"Expected token ids of shape [length] or [1, length], got {array.shape} {array.dtype}.")
    return cast(list[int], array.reshape(-1).tolist())


def _is_messages(prompt: Any) -> bool:
    return isinstance(prompt, list | tuple) and bool(prompt) and any(isinstance(m, Mapping) for m in prompt)


def _checked_messages(prompt: Any, system: str | None = None, template: str = "") -> list[dict[str, Any]]:
    """The prompt as messages of text, the system prompt first if there is one; ``template`` may name further roles."""
    if isinstance(prompt, str):
        if not prompt.strip():
            raise GenerationError("The prompt is empty; expected text.")
        messages: list[dict[str, Any]] = [{"role": "user", "content": prompt}]
    else:
        for number, message in enumerate(prompt, 1):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or len(message) < 2:
                raise GenerationError(
                    f"Message {number} of the prompt must have a 'role' and a 'content', got {short(message)}."
                )
            if message["role"] not in ROLES and not re.search(rf"[\"']{re.escape(message['role'])}[\"']", template):
                raise GenerationError(
                    f"Message {number} has the role {short(message['role'])}; expected one of {', '.join(ROLES)}."
                )
        messages = [dict(message) | _text_content(message, number) for number, message in enumerate(prompt, 1)]
        if messages[-1]["role"] in ("assistant", "system", "developer"):
            raise GenerationError(
                f"The last message is the {messages[-1]['role']}'s; expected the message to answer last."
            )
    if system is not None:
        if not isinstance(system, str):
            raise GenerationError(f"system must be a text, got {short(system)}.")
        if messages[0]["role"] == "system":
            raise GenerationError("The messages begin with a system prompt already; give it once.")
        messages.insert(0, {"role": "system", "content": system})
    for message in messages:
        _check_text(f"The text of the {message['role']}", message.get("content"))
    return messages


def _text_content(message: Message, number: int) -> dict[str, str]:
    """The message's content as one text; none where other keys, such as ``tool_calls``, say what it holds.

    Raises ``GenerationError`` for anything that is no text, such as an image.
    """
    content = message.get("content")
    if isinstance(content, list | tuple) and content:
        texts = [part.get("text") for part in content if isinstance(part, Mapping) and part.get("type") == "text"]
        if len(texts) == len(content) and all(isinstance(text, str) for text in texts):
            return {"content": "".join(map(str, texts))}
    elif isinstance(content, str) or (content is None and set(message) - {"role", "content"}):
        return {}
    raise GenerationError(f"The content of message {number} must be text, got {short(content)}.")


def _check_text(what: str, text: Any) -> None:
    """Raise ``GenerationError`` for half a surrogate pair: it stands for a byte that was not UTF-8 in the source."""
    if isinstance(text, str):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise GenerationError(
                f"{what} is not valid Unicode at character {error.start + 1}; give it as UTF-8."
            ) from error


def checked_template_config(config: Mapping[str, Any] | None) -> dict[str, Any]:
    """The switches of a chat template. Raises ``GenerationError`` for what is none."""
    if config is not None and not isinstance(config, Mapping):
        raise GenerationError(f"chat_template_config must be a dict of switches, got {short(config)}.")
    for name in config or ():
        if name in _NO_SWITCHES or not isinstance(name, str):
            raise GenerationError(
                f"{short(name)} is no switch of a chat template; leave it out of chat_template_config."
            )
    return dict(config or {})


@contextmanager
def _quiet_about_length() -> Iterator[None]:
    """Silence transformers' warning about long prompts; a prompt that is too long is refused afterwards."""
    logger = logging.getLogger("transformers.tokenization_utils_base")
    disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = disabled
