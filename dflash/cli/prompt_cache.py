"""``dflash cache-prompt``: a long beginning of prompts read once, into a file; as ``mlx_lm.cache_prompt``."""

import time
from typing import Annotated

import typer

from ..models import ModelOptions
from ..options import DecodeOptions, option_names
from . import loading, options, terminal
from .requests import PromptFormat

app = typer.Typer()


@app.command("cache-prompt")
@options.grouped(
    models=options.group(ModelOptions, without=("block_size",)),
    form=options.group(PromptFormat, without=("prefill_response",)),
    caches=options.group(DecodeOptions, *option_names("caches"), "prefill_step_size"),
)
def cache_prompt(
    prompt_cache_file: Annotated[
        str,
        typer.Option(metavar="FILE", help="The .safetensors file to write.", callback=options.new_cache),
    ],
    models: ModelOptions,
    form: PromptFormat,
    caches: DecodeOptions,
    prompt: options.Prompt = None,
    prompt_option: options.PromptOption = None,
) -> None:
    """Read the beginning of a user's message, and keep what target and drafter made of it.

    A prompt of dflash generate --prompt-cache-file goes on within this message. mlx_lm.generate
    takes the file too, and files of mlx_lm.cache_prompt are taken (the drafter then sees only
    what follows them).

    Examples:

    dflash cache-prompt - --prompt-cache-file book.safetensors < book.txt

    dflash generate "Who is the thief?" --prompt-cache-file book.safetensors
    """
    text = terminal.one_prompt(prompt, prompt_option, keep_ends=True)
    decoder = loading.load_decoder(models)
    cache, began = decoder.make_prompt_cache(**caches.cache_options), time.perf_counter()
    decoder.cache_prompt(text, cache, caches.prefill_step_size, **vars(form))
    cache.save(prompt_cache_file, {} if models.target in (None, loading.BUNDLED) else {"model": str(models.target)})
    seconds, count = time.perf_counter() - began, len(cache.tokens)
    print(f"{prompt_cache_file}: {count} token{'' if count == 1 else 's'}, {count / seconds:.1f} tokens/s.")
