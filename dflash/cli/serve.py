"""``dflash serve``: an OpenAI-compatible server."""

import logging

import typer

from ..core.errors import DFlashError, install_extra
from ..models import ModelOptions
from ..options import DecodeOptions, option_names
from ..serving.options import ServeOptions
from . import options, terminal

app = typer.Typer()

DEFAULTS = ("max_tokens", "temp", "top_p", "top_k", "min_p", "policy", "tree", "prefill_step_size")


@app.command()
@options.grouped(
    models=options.group(ModelOptions),
    serving=options.group(ServeOptions),
    decoding=options.group(
        DecodeOptions, *DEFAULTS, *option_names("caches"), default={"max_tokens": options.MAX_TOKENS}
    ),
)
def serve(models: ModelOptions, serving: ServeOptions, decoding: DecodeOptions) -> None:
    """Serve the target to clients of OpenAI's interface.

    It answers /v1/chat/completions, /v1/completions, /v1/models, /health and /metrics.
    SIGHUP loads the drafter again; /v1/drafter exchanges it, with --admin-key.
    What a request leaves open is decoded with these options.

    Examples:

    dflash serve

    dflash serve --target Qwen/Qwen3-4B --drafter z-lab/Qwen3-4B-DFlash-b16 --port 8000

    dflash serve --host 0.0.0.0 --api-key secret --served-model-name mine
    """
    try:
        from ..serving.server import serve
    except ImportError as error:
        raise DFlashError(f"The server needs more packages ({error}); {install_extra('serve')}.") from error
    terminal.show_log(logging.WARNING)
    logging.getLogger("dflash.serving").setLevel(logging.INFO)
    serve(models, decoding, serving)
