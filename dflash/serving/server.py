"""From options to a server that answers."""

import logging
import signal
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path
from threading import Thread

from ..core.errors import DFlashError, GenerationError, one_line
from ..generate import DFlashSpeculativeDecoder
from ..models import ModelOptions
from ..options import DecodeOptions, option_names
from ..target import LoadedTargetModel
from .body import Refused
from .caches import PromptCaches
from .counts import Metrics
from .generator import Generator, Loader, Provider
from .http import Handler
from .options import ServeOptions
from .record import recording

logger = logging.getLogger(__name__)

UNLIMITED = 1 << 30
"""The context length of a target that tells none, in tokens."""


def serve(models: ModelOptions, decoding: DecodeOptions, serving: ServeOptions) -> None:
    """Serve until Ctrl-C; SIGHUP loads the drafter again. Errors as of :func:`started`."""
    with started(models, decoding, serving) as (httpd, generator):
        signal.signal(signal.SIGHUP, lambda *_: Thread(target=load_again, args=(generator,), daemon=True).start())
        try:
            httpd.serve_forever()
        except KeyboardInterrupt:
            logger.info("Stopped.")


def load_again(generator: Generator) -> None:
    """Exchange the drafter for what its folder holds now; an error goes to the log."""
    try:
        generator.exchange(None)
    except (DFlashError, Refused) as error:
        logger.warning("The drafter stays as it is: %s", one_line(error))


@contextmanager
def started(
    models: ModelOptions, decoding: DecodeOptions, serving: ServeOptions
) -> Iterator[tuple[ThreadingHTTPServer, Generator]]:
    """A server that listens, with the thread that decodes, while the ``with`` block lasts.

    ``decoding`` has the defaults of requests. Raises ``DFlashError`` for models that cannot be loaded, ``OSError`` for
    an address that cannot be had.
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
    provider = Provider(arguments, loaders(arguments.model, models, decoding, serving))
    handler = partial(Handler, system_fingerprint="dflash")
    with (
        recording(serving.record, serving.record_bytes, serving.redact) as record,
        ThreadingHTTPServer((serving.host, serving.port), lambda *args: handler(generator, *args)) as httpd,
    ):
        generator = Generator(
            provider, caches, metrics, serving.decode_concurrency, serving.max_queue, serving.patience
        )
        generator.exchange = Exchange(generator, models, decoding, serving)
        try:
            model, about = provider.ready.result(), provider.about[arguments.model]
            if record is not None:
                record.begin(model.decoder.loaded_target)
                generator.record = record
                logger.info("Requests and answers are recorded in %s.", serving.record)
            told = f"{about['engine']}, {about['drafter']}"
            port = httpd.server_address[1]
            logger.info("Serving %s at http://%s:%d/v1, %s", arguments.model, serving.host, port, told)
            yield httpd, generator
        finally:
            generator.stop_and_join()


def loaders(name: str, models: ModelOptions, decoding: DecodeOptions, serving: ServeOptions) -> dict[str, Loader]:
    """What loads each model, by the names that requests give. Raises ``GenerationError`` for two of one name."""
    found = {name: models}
    for also in serving.also:
        target, _, drafter = also.partition(",")
        if (name := Path(target).name) in found:
            raise GenerationError(f"Two models are called {name!r}; rename the folder of one of them.")
        found[name] = replace(models, target=target, drafter=drafter or None, adapter_path=None)
    return {name: partial(load_served, models, decoding, serving.max_seq_length) for name, models in found.items()}


class Exchange:
    """Exchanges the drafter of the first model between requests."""

    def __init__(self, generator: Generator, models: ModelOptions, decoding: DecodeOptions, serving: ServeOptions):
        self._generator, self._models = generator, models
        self._decoding, self._longest = decoding, serving.max_seq_length

    def __call__(self, drafter: str | None) -> None:
        """Decode with ``drafter`` from the next request on; ``None`` loads the present one again.

        Raises ``DFlashError`` if it is damaged or of another target: the present one stays.
        """
        generator, name = self._generator, self._generator.cli_args.model

        def exchange() -> None:  # one after another, so that the present one is that of the last
            models = replace(self._models, drafter=drafter or self._models.drafter or "bundled")
            target = generator.load(name).decoder.loaded_target
            decoder, about = load_served(models, self._decoding, self._longest, target)
            generator.use(name, decoder, **about)
            generator.model_provider.loaders[name] = partial(load_served, models, self._decoding, self._longest)
            self._models = models
            logger.info("The drafter is now %s.", models.drafter)

        generator.between_requests(exchange)


def load_served(
    models: ModelOptions, decoding: DecodeOptions, longest: int | None, target: LoadedTargetModel | None = None
) -> tuple[DFlashSpeculativeDecoder, dict[str, str]]:
    """The decoder to serve, plain if no drafter was named and none that fits is bundled; and what is told of it."""
    target = target or models.load_target()
    names = (*option_names("caches"), "policy", "tree", "prefill_step_size")
    options = {name: getattr(decoding, name) for name in names}
    options |= {"block_size": models.block_size, "max_seq_length": longest or target.max_length or UNLIMITED}
    try:
        about = {"engine": "speculative", "drafter": str(models.drafter or "bundled")}
        return DFlashSpeculativeDecoder(target, models.load_drafter(target), **options), about
    except DFlashError as error:
        if models.drafter is not None:
            raise
        reason = one_line(error)
    logger.warning("No drafter: %s", reason)
    drafter = replace(models, drafter="ngram").load_drafter(target)  # which a policy of 0 does not ask
    about = {"engine": "plain", "drafter": reason}
    return DFlashSpeculativeDecoder(target, drafter, **options | {"policy": 0, "tree": None}), about


def mlx_lm_arguments(models: ModelOptions, decoding: DecodeOptions, serving: ServeOptions) -> Namespace:
    """What mlx-lm's server takes for its command line, and what ours reads beside it."""
    ours = {name: getattr(decoding, name) for name in ("temp", "top_p", "top_k", "min_p")}
    not_used = dict.fromkeys(("adapter_path", "draft_model", "kv_bits", "kv_group_size", "quantized_kv_start"))
    return Namespace(
        **ours,
        **not_used,
        model=serving.served_model_name or Path(models.target or "bundled").name,
        created=int(time.time()),
        max_tokens=decoding.max_tokens,
        num_draft_tokens=0,
        trust_remote_code=False,
        chat_template="",
        chat_template_args=serving.chat_template_config or {},
        pipeline=False,
        allowed_origins=list(serving.allowed_origin),
        api_key=serving.api_key,
        admin_key=serving.admin_key,
        max_body_bytes=serving.max_body_bytes,
    )
