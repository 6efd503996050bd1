"""``dflash eval``: how good drafters are, on prompts of a file or standard suites."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core.errors import DFlashError, install_extra
from ..models import ModelOptions
from ..options import DecodeOptions
from . import loading, options, terminal
from .requests import PromptFormat, Requests, that_fit
from .texts import Folder

if TYPE_CHECKING:
    from ..evaluation import BenchPrompt
    from ..evaluation.acceptance import Acceptance
    from ..evaluation.texts import Text
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
    decode = decode or _needs_decoding(decoding)
    if every_anchor and decode:
        raise DFlashError("--every-anchor works on finished texts; leave out --decode and what needs decoding.")
    if batch is not None and not decode:
        raise DFlashError("--batch is for decoding; give --decode too.")
    decoders = _decoders(models, drafter or [], block_size or [])
    loaded, most = next(iter(decoders.values())).loaded_target, decoding.max_tokens or MAX_TOKENS
    fitting, left_out = that_fit(requests, requests.encode(loaded, form), loaded.max_length, most)
    terminal.show_progress()
    anchors: dict[str, Any] = {}
    if batch is not None:
        parts, interrupted = _decode_batches(decoders, decoding, form, fitting, batch)
    elif decode:
        parts, interrupted = _decode(decoders, models, decoding, form, fitting)
    else:
        parts, anchors, interrupted = _replay(decoders, fitting, most, decoding, form, texts, every_anchor)
    settings = {name: value for name, value in asked.items() if name != "as_json"} | loading.names_of(models)
    if len(decoders) > 1:
        settings["drafter"] = [loading.path_or_bundled(name) for name in drafter or [loading.BUNDLED]]
    paths = {"trace": decoding.trace, "texts": texts, "plot": plot}
    settings |= {"prompts": requests.identity(), "decode": decode} | {n: p and str(p) for n, p in paths.items()}
    settings["block_size"] = block_size[0] if block_size and len(block_size) == 1 else block_size
    about = {"settings": settings, "complete": not (interrupted or left_out), "left_out": left_out}
    done = len(next(iter(parts.values())))
    _show(parts, anchors, [prompt.kind for prompt in fitting[:done]], decoders, about, plot, as_json)
    if interrupted:
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


def _needs_decoding(decoding: DecodeOptions) -> bool:
    """Whether the score depends on more than the target's greedy texts."""
    others = decoding.asked("max_tokens", "temp", "seed", "stop_token_ids", "prefill_step_size", "policy")
    return bool(not decoding.greedy or decoding.policy != "full" or others)


_Parts = dict[str, list["Acceptance"]]
"""The counts of each prompt, by the drafters' names."""


def _decode(
    decoders: "dict[str, DFlashSpeculativeDecoder]",
    models: ModelOptions,
    decoding: DecodeOptions,
    form: PromptFormat,
    prompts: "list[BenchPrompt]",
) -> tuple[_Parts, bool]:
    """Counts by decoding, several drafters in turns, and whether Ctrl-C came before the last prompt."""
    import mlx.core as mx

    from ..evaluation.acceptance import measure_turns

    loaded = next(iter(decoders.values())).loaded_target
    mx.random.seed(decoding.seed or 0)  # once: each prompt continues with the state that the previous one left
    others: dict[str, Any] = {"policy": decoding.policy} | decoding.asked("max_tokens", "temp", "seed", "trace")
    with loading.trace_file(decoding, models) as file:
        encode, most = form.in_messages(loaded), decoding.max_tokens or MAX_TOKENS
        each = [
            measure_turns(decoder, prompts, encode, most, decoding.temp, trace=file, **others)
            for decoder in decoders.values()
        ]
        found, interrupted = terminal.until_stopped(zip(*each, strict=False), "eval", _answers(prompts))
    columns = zip(decoders.items(), zip(*found, strict=True), strict=True)
    return {name: _by_prompt(own, decoder.block_size) for (name, decoder), own in columns}, interrupted


def _answers(prompts: "list[BenchPrompt]") -> int:
    """How many answers there will be, those to later turns among them."""
    return sum(1 + (len(prompt.conversation.later) if prompt.conversation else 0) for prompt in prompts)


def _decode_batches(
    decoders: "dict[str, DFlashSpeculativeDecoder]",
    decoding: DecodeOptions,
    form: PromptFormat,
    prompts: "list[BenchPrompt]",
    rows: int,
) -> tuple[_Parts, bool]:
    """The same with ``rows`` prompts at a time, by one drafter after another; after Ctrl-C, of the prompts all have."""
    import mlx.core as mx

    from ..evaluation.acceptance import in_turns, measure_batch, next_turn

    loaded, most = next(iter(decoders.values())).loaded_target, decoding.max_tokens or MAX_TOKENS
    follow = partial(next_turn, target=loaded, encode=form.in_messages(loaded), max_tokens=most)
    others: dict[str, Any] = {"policy": decoding.policy} | decoding.asked("max_tokens", "seed")
    mx.random.seed(decoding.seed or 0)
    measured = (
        (name, number, counts)
        for name, decoder in decoders.items()
        for number, counts in in_turns(
            prompts, partial(measure_batch, decoder, batch_size=rows, max_tokens=most, **others), follow
        )
    )
    found, interrupted = terminal.until_stopped(measured, "eval", _answers(prompts) * len(decoders))
    there = {(name, number) for name, number, _ in found}
    if not (done := next(n for n in count() if any((name, n) not in there for name in decoders))):
        raise terminal.stopped(" before the first prompt was answered.")
    each = {
        name: sorted(((n, c) for own, n, c in found if own == name and n < done), key=lambda pair: pair[0])
        for name in decoders
    }
    return {name: _by_prompt(own, decoders[name].block_size) for name, own in each.items()}, interrupted


def _by_prompt(found: "Sequence[tuple[int, Acceptance]]", block_size: int) -> list["Acceptance"]:
    """Counts of each prompt that was answered, all its turns together."""
    from ..evaluation.acceptance import total

    parts: list[Acceptance] = []
    for number, counts in found:
        parts[number:] = [total([*parts[number:], counts], block_size)]
    return parts


def _replay(
    decoders: "dict[str, DFlashSpeculativeDecoder]",
    prompts: "list[BenchPrompt]",
    max_tokens: int,
    decoding: DecodeOptions,
    form: PromptFormat,
    folder: Path | None,
    every_anchor: bool,
) -> tuple[_Parts, dict[str, Any], bool]:
    """Counts on finished texts, what all anchors say if that is asked for, and whether Ctrl-C came."""
    from ..evaluation.acceptance import Drafted, counts, in_turns, next_turn
    from ..evaluation.anchors import anchor_results
    from ..evaluation.features import Features
    from ..evaluation.replay import replay
    from ..evaluation.texts import Texts

    own, answers = list(decoders.values()), _answers(prompts)
    loaded = own[0].loaded_target
    kept = Texts(loaded, decoding.stop_token_ids, folder)

    def answered(asked: list[list[int]]) -> "Iterator[tuple[int, Text, str]]":
        return ((i, text, kept.shown(text)) for i, text in kept.answers(asked, max_tokens))

    follow = partial(next_turn, target=loaded, encode=form.in_messages(loaded), max_tokens=max_tokens)
    written, interrupted = terminal.until_stopped(in_turns(prompts, answered, follow), "texts", answers)
    if interrupted:
        raise terminal.stopped(f"; {len(written)} of {answers} texts are kept, so the same command goes on.")
    written.sort(key=lambda pair: pair[0])  # and in the order of turns
    numbers, texts, features = [number for number, _ in written], [text for _, text in written], Features(kept)

    def blocks(name: str, every: bool) -> "tuple[list[list[list[Drafted]]], bool]":
        """Of each decoder, and each prompt with all its turns."""
        found, stopped = terminal.until_stopped(replay(own, texts, every, features), name, len(texts))
        each = [{number: list[Drafted]() for number in numbers[: len(found)]} for _ in own]
        for number, of_text in zip(numbers, found, strict=False):
            for prompts, of_decoder in zip(each, of_text, strict=True):
                prompts[number] += of_decoder
        return [list(prompts.values()) for prompts in each], stopped

    walks, interrupted = blocks("eval", every=False)
    parts = {
        name: [counts(prompt, decoder.block_size) for prompt in walk]
        for (name, decoder), walk in zip(decoders.items(), walks, strict=True)
    }
    anchors = {}
    if every_anchor and not interrupted:
        found, interrupted = blocks("every anchor", every=True)
        named = zip(decoders.items(), found, strict=True)
        anchors = {name: anchor_results(each, decoder.block_size) for (name, decoder), each in named}
    return parts, anchors, interrupted


def _show(
    parts: _Parts,
    anchors: dict[str, Any],
    kinds: list[str | None],
    decoders: "dict[str, DFlashSpeculativeDecoder]",
    about: dict[str, Any],
    plot: Path | None,
    as_json: bool,
) -> None:
    from ..core.environment import environment
    from ..evaluation.acceptance import acceptance_results, length_over, render_acceptance, render_comparison
    from ..evaluation.anchors import render_anchors

    scores, first = {}, next(iter(parts.values()))
    for name, own in parts.items():
        scores[name] = acceptance_results(own, kinds, decoders[name].block_size)
        if len(parts) > 1:
            scores[name]["over_first"] = vars(length_over(own, first))
        if name in anchors:
            scores[name]["every_anchor"] = anchors[name]
    if not all(results["blocks"] for results in scores.values()):
        raise DFlashError("No answer was long enough for a block, so there is no acceptance to measure.")
    if plot is not None:
        _draw(plot, scores)
    if as_json:
        found = [scores[name] | {"by_prompt": _each(own, kinds)} for name, own in parts.items()]
        named = {"drafters": [{"drafter": name} | own for name, own in zip(parts, found, strict=True)]}
        print(json.dumps((found[0] if len(found) == 1 else named) | {"environment": environment()} | about))
        return
    terminal.print_rich(
        render_comparison(scores) if len(scores) > 1 else render_acceptance(next(iter(scores.values())))
    )
    for name, results in anchors.items():
        print(f"\n{name}" if len(anchors) > 1 else "")
        terminal.print_rich(render_anchors(results))


def _each(parts: "list[Acceptance]", kinds: list[str | None]) -> list[dict[str, Any]]:
    return [
        {"acceptance_length": p.length, "blocks": p.blocks, "generated_tokens": p.committed, "kind": kind}
        for p, kind in zip(parts, kinds, strict=True)
    ]


def _draw(path: Path, scores: dict[str, dict[str, Any]]) -> None:
    try:
        from ..study.plots import draw_intervals
    except ImportError as error:
        raise DFlashError(f"--plot needs matplotlib; {install_extra('study')}.") from error
    lengths = {name: (own["acceptance_length"], own["acceptance_length_interval"]) for name, own in scores.items()}
    draw_intervals(path, lengths, "tokens per target pass")
