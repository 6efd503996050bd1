"""The options of the server."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.option import check_limits, option


@dataclass(frozen=True)
class ServeOptions:
    """Where and for whom to serve, and how much. Raises ``GenerationError``, naming it, for a number out of range."""

    host: str = option("127.0.0.1", "Address to listen at; 0.0.0.0 is every one of this machine.", metavar="ADDRESS")
    port: int = option(8080, "Port to listen at; 0 takes a free one.", at_least=0, at_most=65535)
    api_key: str | None = option(None, "Answer only who sends this as bearer token.", kind=str, metavar="TEXT")
    served_model_name: str | None = option(
        None, "What clients call the model. Default: the name of the target.", kind=str, metavar="NAME"
    )
    allowed_origin: Sequence[str] = option(
        (), "A website whose pages may ask, * for every one; repeatable.", kind=list[str], metavar="ORIGIN"
    )
    chat_template_config: dict[str, Any] | None = option(
        None, "Switches of the chat template: '{\"enable_thinking\": false}'.", kind=str, metavar="JSON"
    )
    max_seq_length: int | None = option(
        None, "Longest prompt with its answer, in tokens. Default: the model's own limit.", kind=int, at_least=2
    )
    max_body_bytes: int = option(4 << 20, "Largest body of a request.", at_least=1)
    also: Sequence[str] = option(
        (),
        "A further model; a request that names its folder has it loaded in place of the present one; repeatable.",
        kind=list[str],
        metavar="TARGET[,DRAFTER]",
    )
    decode_concurrency: int = option(
        32, "Most requests that are decoded at once; with 1, one after another.", at_least=1
    )
    max_queue: int = option(64, "Most requests that wait; others are refused.", at_least=1)
    prompt_caches: int = option(10, "Most prompt caches that are kept.", at_least=1)
    prompt_cache_bytes: int = option(4 << 30, "Most memory that they take.", at_least=0)
    admin_key: str | None = option(
        None, "Who sends this as bearer token may exchange the drafter.", kind=str, metavar="TEXT"
    )
    record: Path | None = option(
        None, "Keep requests and answers in this folder, as a dataset to train on.", kind=Path, metavar="FOLDER"
    )
    record_bytes: int = option(256 << 20, "Most bytes of them; the oldest go.", at_least=1 << 16)
    redact: Path | None = option(
        None, "Regular expressions, one a line; what they match is not kept.", kind=Path, metavar="FILE"
    )
    patience: int = option(60, "Seconds without a step after which /health tells of a fault.", at_least=1)

    def __post_init__(self) -> None:
        check_limits(self)
