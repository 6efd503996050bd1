"""``dflash bench``, ``eval`` and ``doctor``: how fast, how good, and on what.

Knows options, files and what to print. Must not know how anything is measured. Mounted by ``cli``.
"""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import DataError, DFlashError
from . import options

if TYPE_CHECKING:
    from ..bench import PromptResult

app = typer.Typer()


@app.command()
def bench(
    target: options.Target = None,
    drafter: options.DrafterName = None,
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE.jsonl", help='Lines such as {"prompt": "..."}. Default: held-out requests.'),
    ] = None,
    max_tokens: options.MaxTokens = 512,
    runs: Annotated[int, typer.Option(help="Runs of each side per prompt.")] = 1,
    temp: options.Temp = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed for sampling.")] = 0,
    block_size: options.BlockSize = 16,
    chat: options.Chat = True,
    as_json: options.AsJson = False,
) -> None:
    """Compare with plain mlx_lm on the same prompts, in turns.

    Prints speeds (tokens after the first per second since the first), their
    ratio, the acceptance length, whether the tokens are identical, and the
    arithmetic limit of the ratio with the share of it reached. Exits with 1 if
    tokens differ or one side fails.

    Examples:

    dflash bench --runs 3
    dflash bench --prompts mine.jsonl --temp 0.8 --json > result.json
    """
    from mlx_lm.sample_utils import make_sampler
    from tqdm import tqdm

    from .. import bench as b
    from ..bench.report import Report
    from ..bench.speedup import measure_limit

    requests = b.read_prompts(prompts or b.HELDOUT)
    options.score_answers(
        [("def f(): pass", r.check) for r in requests if r.check]
    )  # an unknown check shows now, not at the end
    decoder = options.load_decoder(target, drafter, block_size)
    loaded = decoder.loaded_target
    sides = b.plain_side(loaded, max_tokens, temp), b.dflash_side(decoder, max_tokens, temp)
    comparing = b.compare(loaded, *sides, requests, runs, greedy=temp == 0, seed=seed, chat=chat)
    results = list(tqdm(comparing, total=len(requests), unit="prompt", disable=None))

    tau = b.acceptance_length(run for r in results for run in r.dflash)
    typical = _middling(results)
    limit = tau and measure_limit(
        decoder, typical.prompt_tokens, typical.dflash[0].tokens, tau, make_sampler(temp=temp)
    )
    settings = {
        "target": target or "the pair that ships",
        "drafter": drafter or "the pair that ships",
        "max_tokens": max_tokens,
        "runs": runs,
        "temperature": temp,
        "seed": seed,
        "block_size": decoder.block_size,
    }
    report = Report(settings, results, temp == 0, limit or None, b.judge(results, options.score_answers))
    if as_json:
        print(json.dumps(report.to_dict(), indent=1))
    else:
        options.print_rich(report.render())
    if not report.lossless:
        print("error: plain mlx_lm and DFlash wrote different tokens.", file=sys.stderr)
        raise typer.Exit(1)


@app.command("eval")
def evaluate(
    drafter: Annotated[str | None, typer.Argument(metavar="[PATH|HUB]", help="Default: the one that ships.")] = None,
    target: Annotated[str | None, typer.Option(metavar="PATH|HUB", help="The drafter's target.")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE.jsonl", help="Lines as for prepare. Default: the pair's held-out requests."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate for a prompt.")] = 256,
    temp: Annotated[float, typer.Option(help="Temperature; 0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed for sampling.")] = 0,
    chat: Annotated[bool, typer.Option("--chat/--raw", help="Use the chat template, or the prompt as it is.")] = True,
    chat_template_config: Annotated[str | None, options.TEMPLATE_CONFIG] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Score a drafter on a file of prompts by decoding: acceptance length, and acceptance by position.

    Examples:

    dflash eval
    dflash eval runs/qwen3-4b/drafter --target Qwen/Qwen3-4B --prompts mine.jsonl --json
    """
    import mlx.core as mx
    from tqdm import tqdm

    from ..bench import HELDOUT
    from ..generate import DFlashSpeculativeDecoder
    from ..prompts import read_conversations
    from ..training.data.chat import request_tokens
    from ..training.evaluate import measure

    switches = options.json_object(chat_template_config, "--chat-template-config")
    if prompts is not None and not prompts.is_file():
        raise DataError(f"There is no file {str(prompts)!r}; expected a JSONL file.")
    requests = read_conversations(str(prompts or HELDOUT))
    decoder = DFlashSpeculativeDecoder.from_pretrained(target, drafter)
    loaded = decoder.loaded_target
    mx.random.seed(seed)
    tokens = request_tokens(requests, loaded, chat, switches, max_tokens)
    bar = tqdm(tokens, unit="prompt", disable=None)
    results = {"prompts": len(tokens)} | measure(loaded, decoder.draft_model, bar, max_tokens, temp).results()
    if not results["blocks"]:
        raise DFlashError("No answer was long enough for a block, so there is no acceptance to measure.")
    if as_json:
        print(json.dumps(results))
        return
    print(f"acceptance length {results['acceptance_length']:.3f} tokens per target pass")
    print(f"{results['prompts']} prompts, {results['blocks']} blocks, {results['generated_tokens']} tokens")
    print("position   blocks accepted up to it")
    for position, share in enumerate(results["acceptance_by_position"], 1):
        print(f"{position:8}   {share:.3f}")


@app.command()
def doctor(target: options.Target = None) -> None:
    """Show versions, device and BLAS, and what a target would use.

    Examples:

    dflash doctor
    dflash doctor --target Qwen/Qwen3-4B
    """
    from ..bench.doctor import machine_report, target_report
    from ..target import load_target

    options.print_pairs(machine_report())
    if target is not None:
        print()
        options.print_pairs(target_report(load_target(target), target))


def _middling(results: list["PromptResult"]) -> "PromptResult":
    """The result of median length, prompt and answer together."""
    return sorted(results, key=lambda r: len(r.prompt_tokens) + len(r.dflash[0].tokens))[len(results) // 2]
