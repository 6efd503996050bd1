"""``dflash doctor``: this machine, what a target would use, and what a drafter is, costs and would bring."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from ..core.errors import DFlashError, one_line
from ..models import ModelOptions
from . import loading, options, terminal

if TYPE_CHECKING:
    from ..drafters.protocol import Drafter
    from ..target import LoadedTargetModel

app = typer.Typer()


@app.command()
@options.grouped(models=options.group(ModelOptions, "target", "drafter", "trust_remote_code", "adapter_path"))
def doctor(
    models: ModelOptions,
    acceptance: Annotated[
        str | None,
        typer.Option(metavar="P,P", help="Acceptance by position, as dflash eval has it: predict speed-ups."),
    ] = None,
) -> None:
    """Show versions, device and BLAS, what a target would use, and what a drafter is, costs and would bring.

    Examples:

    dflash doctor
    dflash doctor --target Qwen/Qwen3-4B
    dflash doctor --drafter bundled
    dflash doctor --target Qwen/Qwen3-4B --drafter z-lab/Qwen3-4B-DFlash-b16
    dflash doctor --target T --drafter D --acceptance 0.57,0.27,0.11
    """
    from .. import bundled
    from ..evaluation.doctor import drafter_report, machine_report, target_report
    from ..evaluation.prediction import acceptance_of

    shares = None if acceptance is None else acceptance_of(acceptance)
    if shares is not None and models.target is None:
        raise DFlashError("--acceptance needs the target whose blocks are timed; give --target.")
    terminal.print_pairs(machine_report())
    loaded = ours = None
    drafter = models.drafter
    if models.target is not None:
        loaded = models.load_target()
        print()
        ours = bundled.find_drafter(loaded)
        about = {"bundled drafter": "none; dflash fit makes one" if ours is None else f"made for {ours.target}"}
        terminal.print_pairs(target_report(loaded, str(models.target)) | about | {"unused tokens": _unused(loaded)})
        drafter = loading.BUNDLED if drafter is None and ours is not None else drafter
    if drafter is not None:
        known = ours.folder if ours is not None and drafter == loading.BUNDLED else drafter
        found = replace(models, drafter=known).load_drafter(loaded)
        print()
        terminal.print_pairs(drafter_report(found, str(drafter)))
        if loaded is not None:
            _print_costs(loaded, found, shares)


def _print_costs(target: "LoadedTargetModel", drafter: "Drafter", shares: list[float] | None) -> None:
    """What blocks cost, from which acceptance on they pay, what the default policy would choose, and predictions."""
    from rich.table import Table

    from ..evaluation.doctor import RATES, costs, costs_report
    from ..generate import DFlashSpeculativeDecoder

    speedups = (f"speed-up at {rate}" for rate in RATES)
    table = Table("drafts", "ms a block", "plain steps", "pays from", *speedups, title="what a block costs and brings")
    for column in table.columns:
        column.justify = "right"
    seconds = costs(DFlashSpeculativeDecoder(target, drafter))
    for row in costs_report(seconds):
        table.add_row(*row)
    print()
    terminal.print_rich(table)
    print("0 drafts: a plain step. Rates are those of a draft after right ones; *: what the default policy aims at.")
    if shares is not None:
        _print_predictions(shares, {length: time / seconds[0] for length, time in seconds.items()})


def _print_predictions(shares: list[float], costs: dict[int, float]) -> None:
    """What measured acceptance would bring at this machine's costs, and at those published for others."""
    from rich.table import Table

    from ..evaluation.prediction import DRAFTING, prediction_report

    lengths = [str(length) for length in costs if 0 < length <= len(shares)]
    table = Table("costs of", *lengths, "source", title="predicted speed-up by drafts a block verifies")
    for row in prediction_report(shares, costs):
        table.add_row(*row)
    print()
    terminal.print_rich(table)
    print(
        "A prediction, not a measurement: tokens a block from --acceptance, over its cost. On other machines drafting "
        f"is taken to cost {DRAFTING} plain steps, and drafts to be right as often."
    )


def _unused(target: "LoadedTargetModel") -> str:
    """Tokens that no text uses, one of which a new drafter can take for its mask."""
    from ..training.data.mask_token import unused_tokens

    try:
        found = unused_tokens(target)
    except DFlashError as error:
        return f"unknown ({one_line(error)})"
    shown = ", ".join(str(token) for token in found[:5])
    return f"{shown}{f' and {len(found) - 5} more' if len(found) > 5 else ''}" if found else "none"
