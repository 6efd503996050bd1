"""``dflash eval``: how good a drafter is, by decoding a file of prompts or standard suites."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core.errors import DFlashError
from ..models import ModelOptions
from ..options import DecodeOptions
from . import loading, options, terminal
from .requests import PromptFormat, Requests, that_fit

if TYPE_CHECKING:
    from ..evaluation import BenchPrompt
    from ..evaluation.acceptance import Acceptance

app = typer.Typer()

MAX_TOKENS = 256
Suites = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME[=FILE.jsonl]",
        help="gsm8k, math500, humaneval, mbpp or mt-bench, from the hub or a file of its rows; repeatable. Or: all.",
        callback=options.not_empty,
    ),
]


@app.command("eval")
@options.grouped(
    models=options.group(ModelOptions, without=("drafter",)),
    form=options.group(PromptFormat),
    decoding=options.group(
        DecodeOptions,
        without=("profile", "prompt_cache"),
        default={"max_tokens": MAX_TOKENS, "seed": 0, "policy": "full"},
        max_tokens={"min": 1, "help": "Most tokens to generate for a prompt."},
        policy={"help": "Drafts that a block verifies: full (all, default), adaptive, a number, a plug-in's."},
    ),
)
def evaluate(
    models: ModelOptions,
    form: PromptFormat,
    decoding: DecodeOptions,
    asked: dict[str, Any],
    drafter: Annotated[
        str | None,
        typer.Argument(metavar="[PATH|HUB]", help="Default: the bundled one.", callback=options.not_empty),
    ] = None,
    prompts: options.Prompts = None,
    suite: Suites = None,
    template: options.Template = None,
    limit: options.Limit = None,
    as_json: options.AsJson = False,
) -> None:
    """Score a drafter on prompts by decoding: acceptance length, and acceptance by position.

    Suites, and prompts whose lines have a "kind", get a row each. Ctrl-C ends it
    with the score of the prompts that were answered.

    Examples:

    dflash eval
    dflash eval runs/mine/drafter --target Qwen/Qwen3-4B --prompts mine.jsonl --json
    dflash eval DRAFTER --target T --suite gsm8k --suite mt-bench=FILE.jsonl --limit 80
    """
    import mlx.core as mx

    from ..evaluation.acceptance import measure_turns

    models = replace(models, drafter=drafter)
    requests = _requests(prompts, suite, template, limit)
    decoder = loading.load_decoder(models)
    loaded, most = decoder.loaded_target, decoding.max_tokens or MAX_TOKENS
    fitting, left_out = that_fit(requests, requests.encode(loaded, form), loaded.max_length, most)
    mx.random.seed(decoding.seed or 0)  # once: each prompt continues with the state that the previous one left
    terminal.show_progress()
    others: dict[str, Any] = {"policy": decoding.policy} | decoding.asked("max_tokens", "temp", "seed", "trace")
    with loading.trace_file(decoding, models) as file:
        encode = form.in_messages(loaded)
        each = measure_turns(decoder, fitting, encode, most, decoding.temp, trace=file, **others)
        parts, interrupted = _parts(each, fitting, decoder.block_size)
    settings = {name: value for name, value in asked.items() if name != "as_json"} | loading.names_of(models)
    settings |= {"prompts": requests.identity(), "trace": decoding.trace and str(decoding.trace)}
    about = {"settings": settings, "complete": not (interrupted or left_out), "left_out": left_out}
    _show(parts, [prompt.kind for prompt in fitting[: len(parts)]], decoder.block_size, about, as_json)
    if interrupted:
        raise terminal.stopped(f" after {len(parts)} of {len(fitting)} prompts.")


def _requests(prompts: str | None, suites: list[str] | None, template: str | None, limit: int | None) -> Requests:
    if not suites:
        return Requests.read(prompts, template=template, limit=limit)
    if prompts is not None or template is not None:
        option = "--prompts" if prompts is not None else "--template"
        raise DFlashError(f"--suite brings prompts and template of its own; leave {option} out.")
    return Requests.of_suites(suites, limit)


def _parts(
    each: "Iterator[tuple[int, Acceptance]]", prompts: "list[BenchPrompt]", block_size: int
) -> tuple[list["Acceptance"], bool]:
    """Counts of each prompt that was answered, all its turns together, and whether Ctrl-C came before the last."""
    from ..evaluation.acceptance import total

    answers = sum(1 + (len(p.conversation.later) if p.conversation else 0) for p in prompts)
    found, interrupted = terminal.until_stopped(each, "eval", answers)
    parts: list[Acceptance] = []
    for number, counts in found:
        parts[number:] = [total([*parts[number:], counts], block_size)]
    return parts, interrupted


def _show(
    parts: list["Acceptance"], kinds: list[str | None], block_size: int, about: dict[str, Any], as_json: bool
) -> None:
    from ..core.environment import environment
    from ..evaluation.acceptance import acceptance_results, render_acceptance

    results = acceptance_results(parts, kinds, block_size)
    if not results["blocks"]:
        raise DFlashError("No answer was long enough for a block, so there is no acceptance to measure.")
    if not as_json:
        terminal.print_rich(render_acceptance(results))
        return
    each = [
        {"acceptance_length": p.length, "blocks": p.blocks, "generated_tokens": p.committed, "kind": kind}
        for p, kind in zip(parts, kinds, strict=True)
    ]
    print(json.dumps(results | {"by_prompt": each, "environment": environment()} | about))
