"""``dflash generate`` and ``dflash demo``: one request, answered.

Knows options, streams and what to print. Must not know how anything is computed. Mounted by ``cli``.
"""

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import options

if TYPE_CHECKING:
    from ..bench import PromptResult
    from ..generate import DFlashResponse, DFlashSpeculativeDecoder

app = typer.Typer()


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The request; - reads it from standard input.")],
    target: options.Target = None,
    drafter: options.DrafterName = None,
    max_tokens: options.MaxTokens = 512,
    temp: options.Temp = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling; 0 is off.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Sample among the k most probable; 0 is off.")] = 0,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed for sampling.")] = None,
    block_size: options.BlockSize = 16,
    chat: options.Chat = True,
    stop: Annotated[list[str] | None, typer.Option(metavar="STR", help="End before this text; repeatable.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Answer one request.

    The text goes to stdout as it comes, then a line on speed to stderr.

    Examples:

    dflash generate "Write a function that doubles each number and sums them."
    dflash generate - --raw --max-tokens 100 --stop "def " < start.py
    dflash generate "Hello" --target PATH --drafter PATH --temp 0.8 --seed 1 --json
    """
    text = options.stdin_text(keep_ends=not chat) if prompt == "-" else prompt
    decoder = options.load_decoder(target, drafter, block_size)
    options.set_seed(seed)
    responses = []
    sampling: dict[str, Any] = {"top_p": top_p, "top_k": top_k, "chat": chat}
    for response in decoder.stream_generate(text, max_tokens, temp, stop, **sampling):
        responses.append(response)
        if not as_json:
            options.show(response.text)
    result = _generation(decoder, text, chat, responses)
    if as_json:
        print(json.dumps(result))
        return
    print(flush=True)
    tau = result["acceptance_length"]
    print(
        f"{result['generation_tokens']} tokens, {result['generation_tps']:.1f} tokens/s, "
        f"acceptance length {'-' if tau is None else f'{tau:.2f}'}, {len(result['accepted'])} blocks",
        file=sys.stderr,
    )


@app.command()
def demo(
    prompt: Annotated[str | None, typer.Argument(help="A request of your own (its answer is not checked).")] = None,
    target: options.Target = None,
    drafter: options.DrafterName = None,
) -> None:
    """Answer one request plainly, then with DFlash, and compare.

    Examples:

    dflash demo
    dflash demo "Write a function that keeps the even numbers and returns the largest."
    """
    from .. import bench as b
    from ..bench import demo as d

    requests = b.read_prompts(b.HELDOUT) if prompt is None else [b.BenchPrompt(prompt)]
    sides = d.demo_sides(options.load_decoder(target, drafter), requests)
    request = d.choose_request(sides, requests) if prompt is None else requests[0]
    print(f"Request: {request.text}")
    d.stream_once(sides, request, lambda name: print(f"\n\n--- {name}\n", flush=True), options.show)
    result = d.measure(sides, request)
    verdicts = b.judge([result], options.score_answers)[0]
    _print_demo(result, verdicts)
    if result.difference is not None or not all(verdicts or ()):
        raise typer.Exit(1)


def _print_demo(result: "PromptResult", verdicts: tuple[bool, bool] | None) -> None:
    from .. import bench as b

    rates = {
        b.PLAIN: b.spread([r.tps for r in result.plain if r.tps]),
        b.DFLASH: b.spread([r.tps for r in result.dflash if r.tps]),
    }
    tau, ratio = b.acceptance_length(result.dflash), b.spread(result.ratios)
    print("\n\n---")
    for name, rate in rates.items():
        print(f"{name:<13} {rate['median']:7.1f} tokens/s" if rate else f"{name:<13} too short to time")
    if ratio and tau:
        print(f"{'ratio':<13} {ratio['median']:7.2f}   (median of {len(result.ratios)} runs in turns)")
        print(f"{'acceptance':<13} {tau:7.2f}   tokens per block, {len(result.dflash[0].tokens)} tokens")
    difference = result.difference
    print("tokens        " + ("identical" if difference is None else f"DIFFERENT at position {difference.position}"))
    if verdicts is not None:
        print("function      " + ("passes its check" if all(verdicts) else "FAILS its check"))


def _generation(
    decoder: "DFlashSpeculativeDecoder", prompt: str, chat: bool, responses: list["DFlashResponse"]
) -> dict[str, Any]:
    """What ``generate --json`` prints; no responses come of ``max_tokens`` 0."""
    accepted = [r.accepted for r in responses if r.accepted]
    last = responses[-1] if responses else None
    return {
        "text": "".join(r.text for r in responses),
        "tokens": [token for r in responses for token in r.tokens],
        "prompt_tokens": last.prompt_tokens if last else len(decoder.loaded_target.build_prompt(prompt, chat)),
        "generation_tokens": last.generation_tokens if last else 0,
        "accepted": accepted,
        "acceptance_length": sum(accepted) / len(accepted) if accepted else None,
        "prompt_tps": last.prompt_tps if last else 0.0,
        "generation_tps": last.generation_tps if last else 0.0,
        "peak_memory": last.peak_memory if last else 0.0,
        "finish_reason": last.finish_reason if last else "length",
    }
