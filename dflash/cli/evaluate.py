"""``dflash eval``: how good drafters are, on prompts of a file or standard suites."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core.errors import DFlashError, install_extra
from ..models import ModelOptions
from ..options import DecodeOptions
from . import loading, options, scores, terminal
from .requests import PromptFormat, Requests
from .texts import Folder

if TYPE_CHECKING:
    from ..evaluation.acceptance import Acceptance
    from ..generate import DFlashSpeculativeDecoder

app = typer.Typer()

MAX_TOKENS = 256
Drafters = Annotated[
    list[str] | None,
    typer.Argument(metavar="PATH|HUB", help="One or several. Default: the bundled one.", callback=options.not_empty),
]
BlockSizes = Annotated[
    list[int] | None,
    typer.Option(
        metavar="N",
        help="Positions per block, the anchor included; repeatable. Default: the drafter's own.",
        callback=options.two_positions,
    ),
]
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
    models=options.group(ModelOptions, without=("drafter", "block_size")),
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
    drafter: Drafters = None,
    block_size: BlockSizes = None,
    prompts: options.Prompts = None,
    suite: Suites = None,
    template: options.Template = None,
    limit: options.Limit = None,
    decode: Annotated[bool, typer.Option("--decode", help="Decode, with the same result.")] = False,
    batch: Annotated[int | None, typer.Option(metavar="N", min=1, help="Decode N prompts at a time.")] = None,
    texts: Folder = None,
    every_anchor: Annotated[
        bool, typer.Option("--every-anchor", help="Draft after every token too, and show more of the drafters.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE.svg", help="Draw the acceptance lengths.", callback=options.a_picture),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Score drafters on prompts: acceptance length, and acceptance by position.

    At temperature 0 the target's texts do not depend on the drafter. They are
    written once, in batches, and kept (dflash texts); drafters are scored on them
    without decoding. It decodes with --decode, and for what needs it: sampling,
    penalties, --policy, --tree, --verify, --trace, stop strings and kv options.

    Suites, and prompts whose lines have a "kind", get a row each. Ctrl-C ends it
    with the score of the prompts that were answered; texts that were written are
    kept.

    Examples:

    dflash eval
    dflash eval runs/mine/drafter --target Qwen/Qwen3-4B --prompts mine.jsonl --json
    dflash eval RUN/drafters/* --target T --plot steps.svg
    dflash eval DRAFTER --target T --suite gsm8k --suite mt-bench=FILE.jsonl --limit 80
    """
    models = replace(models, drafter=drafter[0] if drafter and len(drafter) == 1 else None)
    requests = _requests(prompts, suite, template, limit)
    if decoding.trace and any(len(several or ()) > 1 for several in (drafter, block_size)):
        raise DFlashError("--trace records one drafter; give one, with one block size.")
    decode = decode or not decoding.on_texts
    if every_anchor and decode:
        raise DFlashError("--every-anchor works on finished texts; leave out --decode and what needs decoding.")
    if batch is not None and not decode:
        raise DFlashError("--batch is for decoding; give --decode too.")
    decoders = _decoders(models, drafter or [], block_size or [])
    target, most = next(iter(decoders.values())).loaded_target, decoding.max_tokens or MAX_TOKENS
    fitting, left_out = requests.fitting(target, form, target.max_length, most)
    terminal.show_progress()
    task = scores.Task(decoders, fitting, form, decoding, most)
    if batch is not None:
        found = scores.in_batches(task, batch)
    elif decode:
        found = scores.by_decoding(task, models)
    else:
        found = scores.on_texts(task, texts, every_anchor)
    settings = {name: value for name, value in asked.items() if name != "as_json"} | loading.names_of(models)
    if len(decoders) > 1:
        settings["drafter"] = [loading.path_or_bundled(name) for name in drafter or [loading.BUNDLED]]
    paths = {"trace": decoding.trace, "texts": texts, "plot": plot}
    settings |= {"prompts": requests.identity(), "decode": decode} | {n: p and str(p) for n, p in paths.items()}
    settings["block_size"] = block_size[0] if block_size and len(block_size) == 1 else block_size
    about = {"settings": settings, "complete": not (found.interrupted or left_out), "left_out": left_out}
    _show(task, found, about, plot, as_json)
    if found.interrupted:
        done = len(next(iter(found.parts.values())))
        raise terminal.stopped(f" after {done} of {len(fitting)} prompts.")


def _requests(prompts: str | None, suites: list[str] | None, template: str | None, limit: int | None) -> Requests:
    if not suites:
        return Requests.read(prompts, template=template, limit=limit)
    if prompts is not None or template is not None:
        option = "--prompts" if prompts is not None else "--template"
        raise DFlashError(f"--suite brings prompts and template of its own; leave {option} out.")
    return Requests.of_suites(suites, limit)


def _decoders(
    models: ModelOptions, drafters: Sequence[str], block_sizes: Sequence[int]
) -> dict[str, "DFlashSpeculativeDecoder"]:
    """A decoder for each drafter and block size, by their names."""
    from ..drafters.combined import CombinedDrafter
    from ..generate import DFlashSpeculativeDecoder

    models = replace(models, block_size=block_sizes[0] if block_sizes else None)
    decoders = loading.load_decoders(models, drafters)
    if len(block_sizes) < 2:
        return decoders

    def fresh(drafter: Any) -> Any:  # what a combined drafter learns in blocks of one size must not count in another
        return CombinedDrafter(drafter.model) if isinstance(drafter, CombinedDrafter) else drafter

    return {
        f"{name}, blocks of {size}": DFlashSpeculativeDecoder(
            own.loaded_target, fresh(own.draft_model), block_size=size
        )
        for name, own in decoders.items()
        for size in dict.fromkeys(block_sizes)
    }


def _show(task: scores.Task, found: scores.Scores, about: dict[str, Any], plot: Path | None, as_json: bool) -> None:
    """Print what was found as JSON with what is known ``about`` it, or as tables; draw it."""
    from ..core.environment import environment
    from ..evaluation.acceptance import acceptance_results, length_over, render_acceptance, render_comparison
    from ..evaluation.anchors import render_anchors

    rows, first = {}, next(iter(found.parts.values()))
    kinds = [prompt.kind for prompt in task.prompts[: len(first)]]
    for name, own in found.parts.items():
        rows[name] = acceptance_results(own, kinds, task.decoders[name].block_size)
        if len(found.parts) > 1:
            rows[name]["over_first"] = vars(length_over(own, first))
        if name in found.anchors:
            rows[name]["every_anchor"] = found.anchors[name]
    if not all(results["blocks"] for results in rows.values()):
        raise DFlashError("No answer was long enough for a block, so there is no acceptance to measure.")
    if plot is not None:
        _draw(plot, rows)
    if as_json:
        each = [row | {"by_prompt": _each(found.parts[name], kinds)} for name, row in rows.items()]
        named = {"drafters": [{"drafter": name} | row for name, row in zip(rows, each, strict=True)]}
        print(json.dumps((each[0] if len(each) == 1 else named) | {"environment": environment()} | about))
        return
    terminal.print_rich(render_comparison(rows) if len(rows) > 1 else render_acceptance(next(iter(rows.values()))))
    for name, results in found.anchors.items():
        print(f"\n{name}" if len(found.anchors) > 1 else "")
        terminal.print_rich(render_anchors(results))


def _each(parts: "list[Acceptance]", kinds: list[str | None]) -> list[dict[str, Any]]:
    return [
        {"acceptance_length": p.length, "blocks": p.blocks, "generated_tokens": p.committed, "kind": kind}
        for p, kind in zip(parts, kinds, strict=True)
    ]


def _draw(path: Path, rows: dict[str, dict[str, Any]]) -> None:
    try:
        from ..study.plots import draw_intervals
    except ImportError as error:
        raise DFlashError(f"--plot needs matplotlib; {install_extra('study')}.") from error
    lengths = {name: (own["acceptance_length"], own["acceptance_length_interval"]) for name, own in rows.items()}
    draw_intervals(path, lengths, "tokens per target pass")
