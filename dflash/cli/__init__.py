"""The ``dflash`` command: options in, calls to the package, text, tables or JSON out.

Knows options, streams and exit codes. Must not know how anything is computed; heavy modules are imported
by the commands that need them.

Exit codes: 0, 1 for an error (one line on stderr), a difference or a failed check, 2 for wrong usage,
130 for Ctrl-C.
"""

import json
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from ..errors import DFlashError
from .adapters import app as adapters_app
from .training import app as training_app

if TYPE_CHECKING:
    from ..bench import PromptResult
    from ..generate import DFlashResponse, DFlashSpeculativeDecoder


class _OneLineErrors(TyperGroup):
    """Turns the errors that users can cause into one line and an exit code, unless ``--debug`` is given."""

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:  # the reader, such as `head`, has gone
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        except (DFlashError, OSError) as error:
            if ctx.params.get("debug"):
                raise
            print("error:", " ".join(str(error).split()), file=sys.stderr)
            raise typer.Exit(1) from None
        return result


app = typer.Typer(
    cls=_OneLineErrors,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    no_args_is_help=True,
)
app.add_typer(adapters_app, name="adapters")
app.add_typer(training_app)  # without a name: its commands stand beside the ones below

Target = Annotated[
    str | None, typer.Option(metavar="PATH|HUB", help="Folder or hub name of the target. Default: the pair that ships.")
]
DrafterName = Annotated[str | None, typer.Option("--drafter", metavar="PATH|HUB", help="The drafter for the target.")]
MaxTokens = Annotated[int, typer.Option(help="Most tokens to generate.")]
Temp = Annotated[float, typer.Option(help="Temperature; 0 is greedy.")]
BlockSize = Annotated[int, typer.Option(help="Positions per block, the anchor included.")]
Chat = Annotated[bool, typer.Option("--chat/--raw", help="Use the chat template, or the prompt as it is.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


def main() -> None:
    """Entry point of the console script."""
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        print("dflash-research", version("dflash-research"))
        raise typer.Exit


@app.callback()
def dflash(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    """The target's own text, faster: speculative decoding with a block-diffusion drafter, on MLX.

    Without --target and --drafter every command uses the pair that ships.
    """
    from .. import backend

    backend.require_mlx()


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The request; - reads it from standard input.")],
    target: Target = None,
    drafter: DrafterName = None,
    max_tokens: MaxTokens = 512,
    temp: Temp = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling; 0 is off.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Sample among the k most probable; 0 is off.")] = 0,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed for sampling.")] = None,
    block_size: BlockSize = 16,
    chat: Chat = True,
    stop: Annotated[list[str] | None, typer.Option(metavar="STR", help="End before this text; repeatable.")] = None,
    as_json: AsJson = False,
) -> None:
    """Answer one request.

    The text goes to stdout as it comes, then a line on speed to stderr.

    Examples:

    dflash generate "Write a function that doubles each number and sums them."
    dflash generate - --raw --max-tokens 100 --stop "def " < start.py
    dflash generate "Hello" --target PATH --drafter PATH --temp 0.8 --seed 1 --json
    """
    text = _stdin_text(keep_ends=not chat) if prompt == "-" else prompt
    decoder = _decoder(target, drafter, block_size)
    _seed(seed)
    responses = []
    options: dict[str, Any] = {"top_p": top_p, "top_k": top_k, "chat": chat}
    for response in decoder.stream_generate(text, max_tokens, temp, stop, **options):
        responses.append(response)
        if not as_json:
            _show(response.text)
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
def bench(
    target: Target = None,
    drafter: DrafterName = None,
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE.jsonl", help='Lines such as {"prompt": "..."}. Default: held-out requests.'),
    ] = None,
    max_tokens: MaxTokens = 512,
    runs: Annotated[int, typer.Option(help="Runs of each side per prompt.")] = 1,
    temp: Temp = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed for sampling.")] = 0,
    block_size: BlockSize = 16,
    chat: Chat = True,
    as_json: AsJson = False,
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
    _score([("def f(): pass", r.check) for r in requests if r.check])  # an unknown check shows now, not at the end
    decoder = _decoder(target, drafter, block_size)
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
    report = Report(settings, results, temp == 0, limit or None, b.judge(results, _score))
    if as_json:
        print(json.dumps(report.to_dict(), indent=1))
    else:
        _print_rich(report.render())
    if not report.lossless:
        print("error: plain mlx_lm and DFlash wrote different tokens.", file=sys.stderr)
        raise typer.Exit(1)


@app.command()
def doctor(target: Target = None) -> None:
    """Show versions, device and BLAS, and what a target would use.

    Examples:

    dflash doctor
    dflash doctor --target Qwen/Qwen3-4B
    """
    from ..bench.doctor import machine_report, target_report
    from ..target import load_target

    _print_pairs(machine_report())
    if target is not None:
        print()
        _print_pairs(target_report(load_target(target), target))


@app.command()
def demo(
    prompt: Annotated[str | None, typer.Argument(help="A request of your own (its answer is not checked).")] = None,
    target: Target = None,
    drafter: DrafterName = None,
) -> None:
    """Answer one request plainly, then with DFlash, and compare.

    Examples:

    dflash demo
    dflash demo "Write a function that keeps the even numbers and returns the largest."
    """
    from .. import bench as b
    from ..bench import demo as d

    requests = b.read_prompts(b.HELDOUT) if prompt is None else [b.BenchPrompt(prompt)]
    sides = d.demo_sides(_decoder(target, drafter), requests)
    request = d.choose_request(sides, requests) if prompt is None else requests[0]
    print(f"Request: {request.text}")
    d.stream_once(sides, request, lambda name: print(f"\n\n--- {name}\n", flush=True), _show)
    result = d.measure(sides, request)
    verdicts = b.judge([result], _score)[0]
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


# --- helpers ------------------------------------------------------------------------------------------


def _decoder(target: str | None, drafter: str | None, block_size: int = 16) -> "DFlashSpeculativeDecoder":
    from ..generate import DFlashSpeculativeDecoder

    return DFlashSpeculativeDecoder.from_pretrained(target, drafter, block_size=block_size)


def _seed(seed: int | None) -> None:
    if seed is not None:
        import mlx.core as mx

        mx.random.seed(seed)


def _show(text: str) -> None:
    print(text, end="", flush=True)


def _stdin_text(keep_ends: bool) -> str:
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise DFlashError(f"Standard input is not UTF-8 text: {error}.") from error
    return text if keep_ends else text.strip()


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


def _middling(results: list["PromptResult"]) -> "PromptResult":
    """The result of median length, prompt and answer together."""
    return sorted(results, key=lambda r: len(r.prompt_tokens) + len(r.dflash[0].tokens))[len(results) // 2]


def _score(pairs: list[tuple[str, dict[str, Any]]]) -> list[bool]:
    """Judge answers to requests of the world that the shipped pair knows."""
    from ..training.toy.tasks import check_answers

    try:
        return [verdict.ok for verdict in check_answers(pairs)]
    except (KeyError, TypeError) as error:
        raise DFlashError(f'A "check" in the prompts is not of a kind that is known: {error!r}.') from error


def _print_pairs(pairs: dict[str, str]) -> None:
    width = max(map(len, pairs))
    for name, value in pairs.items():
        print(f"{name:<{width}}  {value}")


def _print_rich(renderable: Any) -> None:
    """Tables keep their full width in files and pipes."""
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 200
    console.print(renderable)
