"""``dflash generate`` and ``dflash demo``: one request, answered."""

import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core.errors import DFlashError
from ..models import ModelOptions
from ..options import DecodeOptions
from . import loading, options, terminal
from .requests import PromptFormat, Requests

if TYPE_CHECKING:
    from ..decoding.stream import DFlashResponse
    from ..evaluation import PromptResult
    from ..generate import DFlashSpeculativeDecoder

app = typer.Typer()


@app.command()
@options.grouped(
    models=options.group(ModelOptions),
    form=options.group(PromptFormat),
    decoding=options.group(DecodeOptions, without=("prompt_cache",)),
)
def generate(
    models: ModelOptions,
    form: PromptFormat,
    decoding: DecodeOptions,
    prompt: options.Prompt = None,
    prompt_option: options.PromptOption = None,
    prompt_cache_file: Annotated[str | None, options.option_of(DecodeOptions, "prompt_cache")] = None,
    show_blocks: Annotated[
        bool, typer.Option("--show-blocks", help="Colour the text: accepted drafts, the target's own tokens.")
    ] = False,
    show_rejected: Annotated[
        bool, typer.Option("--show-rejected", help="As --show-blocks, and show the drafts that were rejected.")
    ] = False,
    as_json: options.AsJson = False,
    verbose: Annotated[str, typer.Option(metavar="True|False", help="False leaves out the line on speed.")] = "True",
) -> None:
    """Answer one request.

    The text goes to stdout as it comes, then a line on speed to stderr.

    Examples:

    dflash generate "Write a function that doubles each number and sums them."
    dflash generate - --raw --max-tokens 100 --stop "def " < start.py
    dflash generate "Hello" --target T --drafter D --temp 0.8 --seed 1 --json
    dflash generate "Hello" --system "Answer in French."
    dflash generate "Hello" --chat-template-config '{"enable_thinking": false}'
    dflash generate "Who is the thief?" --prompt-cache-file book.safetensors
    dflash generate "What is 7 * 8?" --show-rejected --profile --trace it.jsonl
    dflash generate --model T --prompt "Hello" -m 100    # mlx_lm.generate's options work too
    """
    import mlx.core as mx

    from ..decoding.sampling import RandomState
    from ..decoding.trace import together
    from .blocks import ColouredText, print_profile

    if as_json and (show_blocks or show_rejected):
        raise DFlashError("--show-blocks colours text, and --json prints none; leave one of them out.")
    text = terminal.one_prompt(prompt, prompt_option, keep_ends=not form.chat)
    if decoding.seed is None:
        decoder = loading.load_decoder(models)
    else:  # as mlx_lm.generate does: loading a target draws random numbers, and decoding goes on with the next
        mx.random.seed(decoding.seed)
        decoder = loading.load_decoder(models)
        decoding = replace(decoding, seed=RandomState.now().seed)
    if prompt_cache_file is None:
        tokens = form.tokens(text, decoder.loaded_target)
    else:
        cache = decoder.load_prompt_cache(prompt_cache_file)
        decoding = replace(decoding, prompt_cache=cache)
        tokens = cache.tokens + form.continuation(text, decoder.loaded_target)
    coloured = ColouredText(show_rejected) if show_blocks or show_rejected else None
    with loading.trace_file(decoding, models) as file:
        decoding = replace(decoding, trace=together(file, coloured))
        responses = _shown(decoder, tokens, decoding, quiet=as_json or coloured is not None, lines=not as_json)
    result = generation(len(tokens), responses)
    if as_json:
        print(json.dumps(result))
        return
    print(flush=True)
    if verbose.lower() not in ("false", "f"):
        print(speed_line(result), file=sys.stderr)
    full = len(tokens) + result["generation_tokens"] >= decoder.max_seq_length
    if full and decoding.max_tokens is None and result["finish_reason"] == "length":
        print(f"The answer ends here because the context of {decoder.max_seq_length} tokens is full.", file=sys.stderr)
    if responses and responses[-1].profile is not None:
        print_profile(responses[-1].profile)


def _shown(
    decoder: "DFlashSpeculativeDecoder", tokens: list[int], decoding: DecodeOptions, *, quiet: bool, lines: bool
) -> list["DFlashResponse"]:
    """The responses, their text shown as it comes unless ``quiet``; with ``lines`` what ends it early begins a line."""
    responses: list[DFlashResponse] = []
    try:
        for response in decoder.stream_generate(tokens, **decoding.asked()):
            responses.append(response)
            if not quiet:
                terminal.show(response.text)
    except BaseException as error:
        if lines and responses:
            print(flush=True)
        if isinstance(error, KeyboardInterrupt):
            raise terminal.stopped(f" after {sum(len(r.tokens) for r in responses)} tokens.") from None
        raise
    return responses


def generation(prompt_tokens: int, responses: list["DFlashResponse"]) -> dict[str, Any]:
    """What ``generate --json`` prints; no responses come of ``max_tokens`` 0."""
    blocks = responses[1:]  # the first token is the prompt's own pass
    last = responses[-1] if responses else None
    committed = [len(r.tokens) for r in blocks]
    return {
        "text": "".join(r.text for r in responses),
        "tokens": [token for r in responses for token in r.tokens],
        "prompt_tokens": prompt_tokens,
        "generation_tokens": last.generation_tokens if last else 0,
        "committed": committed,
        "drafted": [len(r.drafted) for r in blocks],
        "accepted": [r.accepted for r in blocks],
        "acceptance_length": sum(committed) / len(committed) if committed else None,
        "prompt_tps": last.prompt_tps if last else 0.0,
        "generation_tps": last.generation_tps if last else 0.0,
        "peak_memory": last.peak_memory if last else 0.0,
        "finish_reason": last.finish_reason if last else "length",
    } | ({"profile": last.profile.to_dict()} if last and last.profile else {})


def speed_line(result: dict[str, Any]) -> str:
    """One line on what was generated, read and held in memory; a single token has no speed."""
    count, blocks = result["generation_tokens"], len(result["committed"])
    if not blocks:
        return f"{count} token{'' if count == 1 else 's'}, too few to time"
    return (
        f"{count} tokens, {result['generation_tps']:.1f} tokens/s, acceptance length "
        f"{result['acceptance_length']:.2f}, {blocks} block{'' if blocks == 1 else 's'}; "
        f"prompt {result['prompt_tokens']} tokens, {result['prompt_tps']:.1f} tokens/s; "
        f"peak memory {result['peak_memory']:.2f} GB"
    )


@app.command()
@options.grouped(models=options.group(ModelOptions, "target", "drafter", "trust_remote_code", "adapter_path"))
def demo(
    models: ModelOptions,
    prompt: Annotated[
        str | None,
        typer.Argument(
            help="A request of your own (its answer is not checked); - reads it from standard input.",
            callback=options.is_text,
        ),
    ] = None,
) -> None:
    """Answer one request plainly, then with DFlash, and compare.

    The request is a held-out one of the bundled models. The answers of any other
    target are not checked.

    Examples:

    dflash demo
    dflash demo --target smollm2
    dflash demo "Write a function that keeps the even numbers and returns the largest."
    """
    from .. import evaluation as b
    from ..bundled import heldout_for
    from ..evaluation import demo as d

    text = None if prompt is None else terminal.prompt_text(prompt)
    decoder = loading.load_decoder(models)
    loaded = decoder.loaded_target
    if text is None:
        heldout = None if models.target is None else heldout_for(loaded)
        requests = Requests.read(heldout).encode(loaded, PromptFormat())
    else:
        requests = [b.BenchPrompt(text, PromptFormat().tokens(text, loaded))]
    sides = d.demo_sides(decoder, requests)
    request = d.choose_request(sides[b.PLAIN], requests) if text is None else requests[0]
    print(f"Request: {request.text}")
    result = d.run_demo(decoder, sides, request, lambda name: print(f"\n\n--- {name}\n", flush=True), terminal.show)
    verdicts = b.judge([result], b.check_answers)[0]
    _print_demo(result, verdicts)
    if decoder.threads.count is not None:
        print(f"{'threads':<13} {decoder.threads}")
    if result.difference is not None or not all(verdicts or ()):
        raise typer.Exit(1)


def _print_demo(result: "PromptResult", verdicts: tuple[bool, bool] | None) -> None:
    from .. import evaluation as b

    rates = {
        b.PLAIN: b.spread([r.tps for r in result.plain if r.tps]),
        b.DFLASH: b.spread([r.tps for r in result.dflash if r.tps]),
    }
    tau, ratio = b.acceptance_length(result.dflash), b.spread(result.ratios)
    print("\n\n---")
    for name, rate in rates.items():
        print(f"{name:<13} {rate['median']:7.1f} tokens/s, the median" if rate else f"{name:<13} too short to time")
    if ratio and tau:
        print(f"{'ratio':<13} {ratio['median']:7.2f}   (median of the ratios of {len(result.ratios)} pairs of runs)")
        print(f"{'acceptance':<13} {tau:7.2f}   tokens per block, {len(result.dflash[0].tokens)} tokens")
    difference = result.difference
    print("tokens        " + ("identical" if difference is None else f"DIFFERENT at position {difference.position}"))
    if verdicts is not None:
        print("function      " + ("passes its check" if all(verdicts) else "FAILS its check"))
