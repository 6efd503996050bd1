"""The body of a completion request, checked and brought to what mlx-lm's server reads; errors in OpenAI's form."""

import json
from collections.abc import Sequence
from typing import Any

from ..core.errors import GenerationError
from ..core.values import short
from ..prompts.conversations import ROLES
from ..prompts.tokens import checked_template_config


class Refused(Exception):
    """A request that gets an error object, with the HTTP ``status``; ``param`` names the field that was wrong."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


ONLY: dict[str, Any] = {
    "n": 1,
    "best_of": 1,
    "echo": False,
    "suffix": "",
    "response_format": {"type": "text"},
    "adapters": "",
    "draft_model": "",
}
"""Fields that change an answer in a way that is not supported, and the one value that they may have."""

KINDS: dict[str, type | tuple[type, ...]] = {
    "model": str,
    "stream_options": dict,
    "tools": list,
    "role_mapping": dict,
    "chat_template_kwargs": dict,
    "xtc_probability": (int, float),
    "xtc_threshold": (int, float),
    "seed": int,
    "store": bool,
}
"""The fields whose types mlx-lm leaves unchecked, or checks too narrowly."""


def checked_body(raw: bytes, chat: bool, models: Sequence[str]) -> dict[str, Any]:
    """What ``raw`` asks of one of ``models``, the first by default, without nulls.

    Raises :class:`Refused`, naming the field.
    """
    body = {name: value for name, value in json_object(raw).items() if value is not None}
    for name, value in ONLY.items():
        if (given := body.pop(name, value)) != value:
            raise Refused(400, f"{name} {short(given)} is not supported; leave it out.", name)
    for name, kind in KINDS.items():
        if name in body and not isinstance(body[name], kind):
            raise Refused(400, f"{name} is of the wrong type: {short(body[name])}.", name)
    if (model := body.setdefault("model", models[0])) == "default_model":
        model = models[0]
    if model not in models:
        served = " and ".join(map(repr, models))
        raise Refused(404, f"There is no model {short(model)}; served: {served}.", "model", "model_not_found")
    _check_stop(body.get("stop"))
    if chat:
        _make_texts(body.get("messages"))
        try:
            checked_template_config(body.get("chat_template_kwargs"))
        except GenerationError as error:
            reason = str(error).replace("chat_template_config", "chat_template_kwargs")
            raise Refused(400, reason, "chat_template_kwargs") from error
        for name in ("tool_choice", "function_call"):
            if body.get(name, "auto") not in ("auto", "none"):
                raise Refused(400, f"{name} must be 'auto' or 'none': no call can be forced.", name)
        if body.get("tool_choice") == "none":
            body.pop("tools", None)
    else:
        prompt = body.get("prompt")
        body["prompt"] = prompt[0] if isinstance(prompt, list) and len(prompt) == 1 else prompt
        if not isinstance(body["prompt"], str):
            raise Refused(400, f"prompt must be one text, got {short(prompt)}.", "prompt")
        if type(count := body.get("logprobs")) is int:  # a number there, a switch in chats
            body |= {"logprobs": True, "top_logprobs": count}
    if body.get("stream") and body.get("logprobs"):
        raise Refused(400, "A stream has no log-probabilities; leave out logprobs or stream.", "logprobs")
    if body.get("top_logprobs", 0) not in (0, -1) and not body.get("logprobs"):  # -1 is mlx-lm's default
        raise Refused(400, "top_logprobs needs logprobs; set logprobs to true.", "top_logprobs")
    if "stream_options" in body:
        body["stream_options"] = {"include_usage": False} | body["stream_options"]
    if "seed" in body:
        body["seed"] %= 2**64
    numbers = {name: float(body[name]) for name in ("xtc_probability", "xtc_threshold") if name in body}
    return body | numbers | {"model": model}


def json_object(raw: bytes) -> dict[str, Any]:
    """The object that ``raw`` is. Raises :class:`Refused` for anything else."""
    try:
        body = json.loads(raw, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"The request body is not valid JSON: {error}.") from error
    if not isinstance(body, dict):
        raise Refused(400, f"The request body must be a JSON object, got {short(body)}.")
    return body


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _check_stop(stop: Any) -> None:
    texts = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise Refused(400, f"stop must be a text or a list of texts, none of them empty, got {short(stop)}.", "stop")


def _make_texts(messages: Any) -> None:
    """Check the messages and make the content of each one text, in place: mlx-lm would fetch the URL of an image."""
    if not isinstance(messages, list) or not messages:
        raise Refused(400, f"messages must be a list of at least one message, got {short(messages)}.", "messages")
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise Refused(400, f"{where} must be an object with a role of {', '.join(ROLES)}.", "messages")
        content, calls = message.get("content"), message.get("tool_calls") or []
        if content is None and message["role"] == "assistant":
            content = ""  # an empty answer, or calls alone
        if isinstance(content, list):
            texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
            if len(texts) < len(content) or not all(isinstance(text, str) for text in texts):
                raise Refused(400, f"{where}: only parts of type text are supported.", "messages")
            content = "".join(map(str, texts))
        if not isinstance(content, str):
            raise Refused(400, f"{where} must have a content, a text.", "messages")
        message["content"] = content
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise Refused(400, f"{where}: tool_calls must be a list of objects.", "messages")
