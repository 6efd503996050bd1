"""``dflash bench``: how fast, next to plain mlx_lm."""

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core.errors import DFlashError
from ..core.values import require_count
from ..models import ModelOptions
from ..options import DecodeOptions
from . import loading, options, terminal
from .requests import PromptFormat, Requests

if TYPE_CHECKING:
    from ..evaluation import PromptResult
    from ..evaluation.report import Report
    from ..generate import DFlashSpeculativeDecoder

app = typer.Typer()


@app.command()
@options.grouped(
    models=options.group(ModelOptions, without=("drafter",)),
    form=options.group(PromptFormat),
    decoding=options.group(
        DecodeOptions,
        without=("trace", "profile", "prompt_cache"),  # they would slow down what is measured, or one side alone
        default={"seed": 0},
        max_tokens={
            "help": f"Most tokens to generate. Default: {options.MAX_TOKENS}, or fewer where the target has less room."
        },
    ),
)
def bench(
    models: ModelOptions,
    form: PromptFormat,
    decoding: DecodeOptions,
    asked: dict[str, Any],
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            "--drafter",
            metavar="PATH|HUB",
            help="A drafter for the target; repeatable, to compare several. Also: bundled, ngram, ngram+PATH, "
            "a plug-in's.",
            callback=options.not_empty,
        ),
    ] = None,
    prompts: options.Prompts = None,
    template: options.Template = None,
    limit: options.Limit = None,
    runs: Annotated[int, typer.Option(help="Runs of each side per prompt.")] = 1,
    batch: Annotated[
        str | None,
        typer.Option(metavar="N,N", help="Against mlx_lm.batch_generate, N prompts at a time: '1,2,4,8,16'."),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Compare with plain mlx_lm on the same prompts, alternating.

    Prints speeds (tokens after the first per second since the first), their
    ratio, the acceptance length, whether the tokens are identical, and the
    ceiling of the ratio: what the times of draft and verification alone would
    allow at this acceptance. Exits with 1 if tokens differ or one side
    fails. Ctrl-C ends it with the table of what is there.

    Examples:

    dflash bench --runs 3
    dflash bench --prompts mine.jsonl --limit 20 --temp 0.8 --json > result.json
    dflash bench --drafter bundled --drafter ngram --limit 20
    dflash bench --batch 1,2,4,8,16 --runs 3
    dflash bench --target T --drafter mine --prompts q.jsonl --template "{question}"
    """
    from ..evaluation import check_answers

    require_count("runs", runs, 1)
    if decoding.max_tokens is not None:
        require_count("max_tokens", decoding.max_tokens, 1)
    requests = Requests.read(prompts, template=template, limit=limit)
    known = [c.extra["check"] for c in requests.conversations if isinstance(c.extra.get("check"), dict)]
    check_answers([("def f(): pass", check) for check in known])  # an unknown check shows before a model loads
    rows = None if batch is None else _rows(batch, drafter or (), decoding)
    decoders = loading.load_decoders(models, drafter or ())
    terminal.show_progress()
    if rows is not None:
        _bench_batches(next(iter(decoders.values())), requests, form, decoding, rows, runs, as_json)
        return
    comparison = _Comparison(decoders, requests, form, decoding)
    comparison.carry_out(runs)
    settings = {name: value for name, value in asked.items() if name != "as_json"} | {
        "target": loading.path_or_bundled(models.target),
        "drafter": [loading.path_or_bundled(name) for name in drafter or ()] or loading.BUNDLED,
        "prompts": requests.identity(),
        "max_tokens": decoding.max_tokens or options.MAX_TOKENS,
        "block_size": [decoder.block_size for decoder in decoders.values()],
    }
    comparison.show(settings, as_json)


def _rows(batch: str, drafters: Sequence[str], decoding: DecodeOptions) -> list[int]:
    """The numbers of rows in ``batch``. Raises ``DFlashError`` for anything else, and for what batches are not for."""
    from ..batches import check_together

    if len(drafters) > 1:
        raise DFlashError(f"--batch measures one drafter at a time, got {len(drafters)}.")
    try:
        rows = [int(number) for number in batch.split(",")]
    except ValueError as error:
        raise DFlashError(f"--batch takes whole numbers and commas, such as 1,2,4,8, got {batch!r}.") from error
    for number in rows:
        require_count("batch", number, 1)
    if decoding.stop_strings or decoding.stop_token_ids is not None:
        raise DFlashError("With --batch both sides end at the target's own stops; leave out --stop and --stop-token.")
    check_together(replace(decoding, seed=None))  # neither side is seeded
    return rows


def _bench_batches(
    decoder: "DFlashSpeculativeDecoder",
    requests: Requests,
    form: PromptFormat,
    decoding: DecodeOptions,
    rows: list[int],
    runs: int,
    as_json: bool,
) -> None:
    """Measure and print batches; exits with 1 if greedy tokens differ."""
    from rich.table import Table

    from ..core.environment import environment
    from ..evaluation.batch_speed import batch_speeds

    most = decoding.max_tokens or options.MAX_TOKENS
    prompts, _ = requests.fitting(decoder.loaded_target, form, decoder.max_seq_length, decoding.max_tokens or 1)
    measured = batch_speeds(decoder, [prompt.tokens for prompt in prompts], rows, runs, most, decoding)
    found, interrupted = terminal.until_stopped(measured, "bench", len(rows))
    if as_json:
        about = {"prompts": requests.identity(), "max_tokens": most, "environment": environment(decoder.threads)}
        print(json.dumps(about | {"batches": [speed.to_dict() for speed in found]}, indent=1))
    else:
        speeds, memory = ("plain tok/s", "DFlash tok/s", "ratio"), ("plain GB", "DFlash GB")
        table = Table("rows", *speeds, "accepted", "drafted", *memory, "differ", box=None, pad_edge=False)
        for column in table.columns:
            column.justify = "right"
        for speed in found:
            plain, ours = statistics.median(speed.plain_tps), statistics.median(speed.dflash_tps)
            accepted = "-" if speed.acceptance is None else f"{speed.acceptance:.2f}"
            memory = f"{speed.plain_memory:.2f}", f"{speed.dflash_memory:.2f}"
            differ = "sampled" if speed.different is None else f"{speed.different} of {len(prompts)}"
            speeds = f"{plain:.0f}", f"{ours:.0f}", f"{speed.ratio:.2f}"
            table.add_row(str(speed.rows), *speeds, accepted, f"{speed.drafting:.0%}", *memory, differ)
        terminal.print_rich(table)
    if interrupted:
        raise terminal.stopped(f" after {len(found)} of {len(rows)} numbers of rows.")
    if any(speed.different for speed in found):
        print("error: plain mlx_lm and DFlash wrote different tokens.", file=sys.stderr)
        raise typer.Exit(1)


class _Comparison:
    """Plain mlx_lm and every drafter on the prompts that fit, and what came of it so far."""

    def __init__(
        self,
        decoders: Mapping[str, "DFlashSpeculativeDecoder"],
        requests: Requests,
        form: PromptFormat,
        decoding: DecodeOptions,
    ):
        from .. import evaluation as b

        if len(decoders) == 1:
            decoders = {b.DFLASH: next(iter(decoders.values()))}
        self.decoders, self.decoding = decoders, decoding
        first = next(iter(decoders.values()))
        self.target, self.threads = first.loaded_target, first.threads
        longest = min(decoder.max_seq_length for decoder in decoders.values())
        self.most = most = decoding.max_tokens if decoding.max_tokens is not None else options.MAX_TOKENS
        stops: dict[str, Any] = {"stop_strings": decoding.stop_strings, "stop_token_ids": decoding.stop_token_ids}
        self.plain = b.plain_side(self.target, most, longest, **decoding.plain(self.target.tokenizer), **stops)
        others = decoding.asked("max_tokens", "temp", "seed")
        self.sides = {
            name: b.dflash_side(decoder, most, decoding.temp, longest, **others) for name, decoder in decoders.items()
        }
        self.prompts, self.left_out = requests.fitting(self.target, form, longest, decoding.max_tokens or 1)
        self.results: list[dict[str, PromptResult]] = []
        self.failures: list[str] = []
        self.interrupted = False

    def carry_out(self, runs: int) -> None:
        """Answer every prompt; Ctrl-C and prompts on which a side fails leave the results of the others."""
        from ..core.progress import forecast
        from ..evaluation import compare, plain_side, time_side

        # A few tokens tell the speed. Drafts slow down a bad text only, and a little.
        if speed := time_side(plain_side(self.target, 9), self.prompts[0].tokens).tps:
            answers = len(self.prompts) * runs * (1 + len(self.sides))
            forecast("bench", answers * self.most / speed, at_most=True)

        def failed(error: DFlashError) -> None:
            self.failures.append(str(error))

        turns = compare(
            self.target,
            self.plain,
            self.sides,
            self.prompts,
            runs,
            greedy=self.decoding.greedy,
            seed=self.decoding.seed or 0,
            on_failure=failed,
            threads=self.threads,
        )
        self.results, self.interrupted = terminal.until_stopped(turns, "bench", len(self.prompts))
        if not self.results:
            raise DFlashError(self.failures[0])

    def show(self, settings: dict[str, Any], as_json: bool) -> None:
        """Print the report; raises what ends the command where something is wrong."""
        from ..evaluation.report import render_several, several_dict

        reports = self._reports(settings)
        only = next(iter(reports.values())) if len(reports) == 1 else None
        if as_json:
            print(json.dumps(only.to_dict() if only else several_dict(reports), indent=1))
        else:
            terminal.print_rich(only.render() if only else render_several(reports))
        different = [name for name, report in reports.items() if not report.lossless]
        if self.failures:
            print(
                f"error: {len(self.failures)} of {len(self.prompts)} prompts failed: {self.failures[0]}",
                file=sys.stderr,
            )
        if different:
            print("error: plain mlx_lm and DFlash wrote different tokens.", file=sys.stderr)
        if self.interrupted:
            raise terminal.stopped(f" after {len(self.results)} of {len(self.prompts)} prompts.")
        if self.failures or different:
            raise typer.Exit(1)

    def _reports(self, settings: dict[str, Any]) -> dict[str, "Report"]:
        from ..core.environment import environment
        from ..evaluation import check_answers, judge
        from ..evaluation.report import Report
        from ..evaluation.speedup import limit_of

        about = {
            "environment": environment(self.threads),
            "complete": not (self.interrupted or self.failures or self.left_out),
            "left_out": self.left_out,
            "failed": self.failures,
        }
        sampler = self.decoding.build_sampler()
        reports = {}
        for name, decoder in self.decoders.items():
            results = [result[name] for result in self.results]
            with self.threads.in_use():
                limit = None if self.interrupted else limit_of(decoder, results, sampler)
            verdicts = judge(results, check_answers)
            reports[name] = Report(settings, results, self.decoding.greedy, limit, verdicts, about)
        return reports
