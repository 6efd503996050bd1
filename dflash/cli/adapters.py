"""``dflash adapters``: which architectures there are, does a target decode exactly here, what does rewind cost."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core.errors import DFlashError, did_you_mean
from ..options import DecodeOptions
from . import options, terminal

if TYPE_CHECKING:
    import mlx.nn as nn

    from ..adapters.conformance import Check
    from ..target import LoadedTargetModel

app = typer.Typer(no_args_is_help=True, help="Architectures: list them, check one, measure what rewind costs.")


@app.command("list")
def list_adapters() -> None:
    """List the architectures that have an adapter of their own.

    Any other gets the generic adapter, if that passes a short trial when the target loads.

    Examples:

    dflash adapters list
    """
    from rich.table import Table

    from ..adapters import registered_adapters

    table = Table("model_type", "adapter", "from")
    for model_type, adapter in registered_adapters().items():
        table.add_row(model_type, adapter.__name__, adapter.__module__)
    terminal.print_rich(table)


@app.command("check")
def check_adapter(
    model: Annotated[
        str,
        typer.Argument(
            metavar="PATH|HUB|MODEL_TYPE",
            help="A target, or an architecture to try on a small random model.",
            callback=options.not_empty,
        ),
    ],
    rounds: Annotated[int, typer.Option(help="Blocks to verify and rewind.")] = 300,
    seed: Annotated[
        int, typer.Option(help="Seed for tokens, block lengths and acceptances.", callback=options.seed_in_range)
    ] = 0,
    max_kv_size: Annotated[int | None, typer.Option(help="Bound each layer's cache to this many tokens.")] = None,
    kv_bits: Annotated[int | None, typer.Option(help="Quantise keys and values to this many bits.")] = None,
    kv_group_size: Annotated[int, typer.Option(help="Keys and values that share one scale: 32, 64 or 128.")] = 64,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Try everything that decoding and drafters rely on, and show the first difference of each check.

    A line per check as it ends. Exits with 1 if one fails.

    Examples:

    dflash adapters check Qwen/Qwen3-0.6B
    dflash adapters check path/to/target --rounds 40
    dflash adapters check gemma3_text
    dflash --plugin my_adapter.py adapters check path/to/target
    """
    from ..adapters.conformance import check

    if rounds < 1:
        raise DFlashError(f"--rounds must be at least 1, got {rounds}.")
    cache_options: dict[str, Any] = {"max_kv_size": max_kv_size, "kv_bits": kv_bits, "kv_group_size": kv_group_size}
    DecodeOptions(**cache_options)  # a wrong one shows before a model loads
    target = _target(model, trust_remote_code)
    terminal.show_progress()
    report = check(target, rounds, seed, on_check=_print_check, show=True, **cache_options)
    failed = sum(not found.passed for found in report.checks)
    skipped = sum(bool(found.skipped) for found in report.checks)
    count = len(report.checks)
    passed = f"{count - skipped} checks passed, {skipped} skipped." if skipped else f"All {count} checks passed."
    print(report.title)
    print(f"{failed} of {count} checks failed." if failed else passed)
    if failed:
        raise typer.Exit(1)


@app.command("bench")
def bench_rewind(
    blocks: Annotated[int, typer.Option(help="Blocks to time for each kind of cache.")] = 40,
) -> None:
    """Time the rewind of a block as a fraction of the block's own time, on models of about 50M parameters.

    Examples:

    dflash adapters bench --blocks 10
    """
    from ..adapters.conformance.rewind_cost import measure, table

    if blocks < 1:
        raise DFlashError(f"--blocks must be at least 1, got {blocks}.")
    terminal.show_progress()
    terminal.print_rich(table(measure(blocks)))


def _target(name: str, trust_remote_code: bool) -> "nn.Module | LoadedTargetModel":
    """A target from a folder or the hub, or a small random model of an architecture."""
    from ..adapters.conformance import small_models as small
    from ..target import load_target
    from ..target.load import BUNDLED

    if Path(name).exists() or "/" in name or name == BUNDLED:
        return load_target(name, trust_remote_code)
    known = small.architecture_names()
    if name not in known:
        near = did_you_mean(name, known)
        raise DFlashError(
            f"{name!r} is neither a folder, nor a hub name (org/name), nor a model_type that mlx-lm knows"
            + (f"; {near}" if near.startswith("did") else ".")
        )
    return small.build(name)


def _print_check(found: "Check") -> None:
    if found.skipped:
        print(f"skip  {found.name}: {found.skipped}", flush=True)
        return
    print(f"pass  {found.name}" if found.passed else f"FAIL  {found.name}: {found.difference}", flush=True)
