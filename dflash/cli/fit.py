"""``dflash fit``: from a target alone to its drafter, in one command."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from .options import Begin, RunSeed, Settings, TrustRemoteCode, can_be_made, not_empty
from .terminal import resumable, show_log

app = typer.Typer()


@app.command()
def fit(
    target: Annotated[str, typer.Option(metavar="PATH|HUB", help="The target.", callback=not_empty)],
    output: Annotated[
        Path,
        typer.Option(
            metavar="FOLDER", help="Where everything goes; the drafter to its drafter/.", callback=can_be_made
        ),
    ],
    count: Annotated[
        int | None, typer.Option(metavar="N", help="Requests that the target makes up. Default: 5000.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE.jsonl", help="Requests of your own in place of made up ones.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of a response.")] = 512,
    temp: Annotated[float, typer.Option(help="Temperature of the responses; 0 is greedy.")] = 0.0,
    seed: RunSeed = 0,
    begin: Begin = None,
    settings: Settings = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what is left to do and how long it takes.")] = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Make a drafter for a target that has none, with or without data.

    The target makes up requests (dflash prompts) and answers them (prepare), a
    recipe is proposed (recipe), the drafter is trained (train) and exported
    (export). Every stage is named with the time that it will about take.
    Stopped or killed, the same command continues; the recipe may be edited
    before training begins, and then --set is left out.

    Examples:

    dflash fit --target Qwen/Qwen3-0.6B --output out/qwen3-0.6b

    dflash fit --target smollm2 --output out/smollm2 --count 1000 --set run.steps=500
    """
    from ..core.backend import keep_freed_memory
    from ..training.data.plan import PrepareSettings
    from ..training.data.self_prompts import PromptSettings
    from ..training.pipeline import Pipeline

    keep_freed_memory()
    show_log()
    made_up = PromptSettings(seed=seed, begins=tuple(begin or ("",)))
    responses = PrepareSettings(max_tokens=max_tokens, temp=temp, seed=seed, shard_size=256)
    given = (tuple(settings or ()), trust_remote_code)
    pipeline = Pipeline(target, output, count, prompts, made_up, responses, *given)
    if dry_run:
        _print_forecast(pipeline.forecast())
        return
    with resumable(output):
        drafter = pipeline.run()
    trust = " --trust-remote-code" if trust_remote_code else ""
    print(f'{drafter}\nTry it: dflash generate "..." --target {target} --drafter {drafter}{trust}')


def _print_forecast(stages: Iterable[tuple[str, float | None]]) -> None:
    """Each stage with its time as soon as that is known, then the time of all."""
    from ..core.progress import duration

    known: list[float] = []
    for stage, seconds in stages:
        known.append(seconds or 0.0)
        print(f"{stage}: {'a moment' if seconds is None else f'at most about {duration(seconds)}'}", flush=True)
    print(f"in all: at most about {duration(sum(known))}" if known else "Nothing is left to do.")
