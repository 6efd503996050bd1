"""From options to a server that answers."""

import logging
import signal
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import ThreadingHTTPServer
from threading import Thread

from ..core.errors import DFlashError, one_line
from ..core.values import require_count
from ..models import ModelOptions
from ..options import DecodeOptions
from ..prompts.tokens import checked_template_config
from .body import Refused
from .generator import Generator
from .http import Handler
from .models import by_name
from .options import ServeOptions
from .record import recording

logger = logging.getLogger(__name__)


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

    ``decoding`` has the defaults of requests. Raises ``DFlashError`` for models that cannot be loaded and defaults that
    they cannot decode with, ``OSError`` for an address that cannot be had.
    """
    require_count("max_tokens", decoding.max_tokens, 1)
    served = by_name(models, decoding, serving)
    name = next(iter(served))
    handler = partial(Handler, system_fingerprint="dflash")
    generator: Generator
    with (
        recording(serving.record, serving.record_bytes, serving.redact) as record,
        ThreadingHTTPServer((serving.host, serving.port), lambda *args: handler(generator, *args)) as httpd,
    ):
        generator = Generator(mlx_lm_arguments(name, decoding, serving), served, serving)
        try:
            engine = generator.between_requests(lambda: generator.load(name))
            if record is not None:
                record.begin(engine.decoder.loaded_target)
                generator.record = record
                logger.info("Requests and answers are recorded in %s.", serving.record)
            about, port = generator.about[name], httpd.server_address[1]
            told = f"{about['engine']}, {about['drafter']}"
            logger.info("Serving %s at http://%s:%d/v1, %s", name, serving.host, port, told)
            yield httpd, generator
        finally:
            generator.stop_and_join()


def mlx_lm_arguments(name: str, decoding: DecodeOptions, serving: ServeOptions) -> Namespace:
    """What mlx-lm's queue and handlers read of its command line."""
    return Namespace(
        model=name,
        created=int(time.time()),
        max_tokens=decoding.max_tokens,
        temp=decoding.temp,
        top_p=decoding.top_p,
        top_k=decoding.top_k,
        min_p=decoding.min_p,
        num_draft_tokens=0,
        chat_template_args=checked_template_config(serving.chat_template_config),
        allowed_origins=list(serving.allowed_origin),
    )
