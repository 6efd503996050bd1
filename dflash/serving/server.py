"""From options to a server that answers."""

import logging
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path

from mlx_lm import server

from ..core.errors import DFlashError, one_line
from ..generate import DFlashSpeculativeDecoder
from ..models import ModelOptions
from ..options import DecodeOptions, option_names
from .counts import Metrics
from .engine import ServedModel, stream_generate
from .generator import Generator, PromptCaches, Provider
from .http import Handler
from .options import ServeOptions

logger = logging.getLogger(__name__)

UNLIMITED = 1 << 30
"""The context length of a target that tells none, in tokens."""


def serve(models: ModelOptions, decoding: DecodeOptions, serving: ServeOptions) -> None:
    """Serve until Ctrl-C; errors as of :func:`started`."""
    with started(models, decoding, serving) as (httpd, _):
        try:
            httpd.serve_forever()
        except KeyboardInterrupt:
            logger.info("Stopped.")


@contextmanager
def started(
    models: ModelOptions, decoding: DecodeOptions, serving: ServeOptions
) -> Iterator[tuple[ThreadingHTTPServer, Generator]]:
    """A server that listens, with the thread that decodes, while the ``with`` block lasts.

    ``decoding`` has the defaults of requests. mlx-lm's server decodes with this package in all of this process from now
    on. Raises ``DFlashError`` for models that cannot be loaded, ``OSError`` for an address that cannot be had.
    """
    arguments = mlx_lm_arguments(models, decoding, serving)
    caches = PromptCaches(serving.prompt_caches, serving.prompt_cache_bytes)
    generator: Generator
    metrics = Metrics(
        {
            "vllm:num_requests_running": ("Requests that are decoded.", lambda: generator.running),
            "vllm:num_requests_waiting": ("Requests that wait.", lambda: len(generator.waiting)),
            "dflash:prompt_cache_bytes": ("Memory of the prompt caches that are kept.", lambda: caches.nbytes),
        }
    )
    make = partial(ServedModel, metrics=metrics, still_serves=lambda: generator.still_serves())
    provider = Provider(arguments, partial(load_served, models, decoding, serving.max_seq_length, make))
    handler = partial(Handler, system_fingerprint="dflash")
    with ThreadingHTTPServer((serving.host, serving.port), lambda *args: handler(generator, *args)) as httpd:
        server.stream_generate = stream_generate  # type: ignore[assignment]
        generator = Generator(provider, caches, serving.max_queue, serving.patience)
        try:
            model = provider.ready.result()
            told = f"plainly: {model.plain}" if model.plain else f"with the drafter {arguments.drafter}"
            port = httpd.server_address[1]
            logger.info("Serving %s at http://%s:%d/v1, %s", arguments.model, serving.host, port, told)
            yield httpd, generator
        finally:
            generator.stop_and_join()


def load_served(
    models: ModelOptions, decoding: DecodeOptions, longest: int | None, make: Callable[..., ServedModel]
) -> ServedModel:
    """The decoder to serve: plain, if no drafter was named and none that fits is bundled."""
    target = models.load_target()
    options = {name: getattr(decoding, name) for name in (*option_names("caches"), "policy", "tree")}
    options |= {"block_size": models.block_size, "max_seq_length": longest or target.max_length or UNLIMITED}
    try:
        return make(DFlashSpeculativeDecoder(target, models.load_drafter(target), **options), plain="")
    except DFlashError as error:
        if models.drafter is not None:
            raise
        reason = one_line(error)
    logger.warning("No drafter: %s", reason)
    drafter = replace(models, drafter="ngram").load_drafter(target)  # which a policy of 0 does not ask
    return make(DFlashSpeculativeDecoder(target, drafter, **options | {"policy": 0, "tree": None}), plain=reason)


def mlx_lm_arguments(models: ModelOptions, decoding: DecodeOptions, serving: ServeOptions) -> Namespace:
    """What mlx-lm's server takes for its command line, and what ours reads beside it."""
    ours = {name: getattr(decoding, name) for name in ("temp", "top_p", "top_k", "min_p", "prefill_step_size")}
    not_used = dict.fromkeys(("adapter_path", "draft_model", "kv_bits", "kv_group_size", "quantized_kv_start"))
    return Namespace(
        **ours,
        **not_used,
        model=serving.served_model_name or Path(models.target or "bundled").name,
        drafter=str(models.drafter or "bundled"),
        created=int(time.time()),
        max_tokens=decoding.max_tokens,
        num_draft_tokens=0,
        trust_remote_code=False,
        chat_template="",
        chat_template_args=serving.chat_template_config or {},
        pipeline=False,
        allowed_origins=list(serving.allowed_origin),
        api_key=serving.api_key,
        max_body_bytes=serving.max_body_bytes,
    )
