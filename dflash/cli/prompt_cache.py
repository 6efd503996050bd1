"""``dflash cache-prompt``: a long beginning of prompts read once, into a file; as ``mlx_lm.cache_prompt``.

Knows options and what to print. Must not know caches or their files. Mounted by ``cli``.
"""

import time
from typing import Annotated

import typer

from . import loading, options, terminal
from .requests import Form

app = typer.Typer()


@app.command("cache-prompt")
def cache_prompt(
    prompt: Annotated[str, options.Prompt],
    prompt_cache_file: Annotated[
        str,
        typer.Option(metavar="FILE", help="The .safetensors file to write.", callback=options.not_empty),
    ],
    target: options.Target = None,
    drafter: options.DrafterName = None,
    chat: options.Chat = True,
    system: options.System = None,
    chat_template_config: options.TemplateConfig = None,
    max_kv_size: options.MaxKvSize = None,
    kv_bits: options.KvBits = None,
    kv_group_size: options.KvGroupSize = 64,
    quantized_kv_start: options.QuantizedKvStart = 5000,
    draft_bits: options.DraftBits = None,
    draft_window: options.DraftWindow = None,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Read the beginning of a user's message, and keep what target and drafter made of it.

    A prompt of dflash generate --prompt-cache-file goes on within this message. mlx_lm.generate
    takes the file too, and files of mlx_lm.cache_prompt are taken (the drafter then sees only
    what follows them).

    Examples:

    dflash cache-prompt - --prompt-cache-file book.safetensors < book.txt

    dflash generate "Who is the thief?" --prompt-cache-file book.safetensors
    """
    text = terminal.prompt_text(prompt, keep_ends=True)
    form = Form(chat, options.json_object(chat_template_config, "--chat-template-config"), system)
    caching = options.caching(max_kv_size, kv_bits, kv_group_size, quantized_kv_start)
    decoder = loading.load_decoder(target, drafter, None, trust_remote_code, draft_bits, draft_window)
    cache, began = decoder.make_prompt_cache(**caching), time.perf_counter()
    decoder.cache_prompt(text, cache, chat=form.chat, system=form.system, chat_template_config=form.switches or None)
    cache.save(prompt_cache_file, {} if target in (None, loading.BUNDLED) else {"model": target})
    seconds, count = time.perf_counter() - began, len(cache.tokens)
    print(f"{prompt_cache_file}: {count} token{'' if count == 1 else 's'}, {count / seconds:.1f} tokens/s.")
