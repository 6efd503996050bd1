"""``dflash adapters``: which architectures there are, does a target decode exactly here, what does rewind cost.

Knows options, tables and exit codes. Must not know how anything is checked or measured. Mounted by ``cli.py``.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import DFlashError

app = typer.Typer(no_args_is_help=True, help="Architectures: list them, check one, measure what rewind costs.")


@app.command("list")
def list_adapters() -> None:
    """Architectures with an adapter of their own; any other gets the generic one if it passes the check."""
    from rich.table import Table

    from ..adapters import registered_adapters

    table = Table("model_type", "adapter", "from")
    for model_type, adapter in registered_adapters().items():
        table.add_row(model_type, adapter.__name__, adapter.__module__)
    _print(table)


@app.command("check")
def check_adapter(
    model: Annotated[str, typer.Argument(metavar="PATH|MODEL_TYPE", help="A target, or an architecture to try small.")],
    rounds: Annotated[int, typer.Option(help="Blocks to verify and rewind.")] = 300,
    seed: Annotated[int, typer.Option(help="Of tokens, block lengths and acceptances.")] = 0,
    max_kv_size: Annotated[int | None, typer.Option(help="Keep at most so many tokens a layer.")] = None,
    kv_bits: Annotated[int | None, typer.Option(help="Quantise keys and values to so many bits.")] = None,
) -> None:
    """Try everything that decoding relies on, and show the first difference. Exit code 1 if there is one."""
    from ..adapters.conformance import check
    from ..adapters.conformance import small_models as small
    from ..target import load_target

    if Path(model).exists() or "/" in model:
        target: Any = load_target(model)
    elif model in small.architecture_names():
        target = small.build(model)
    else:
        raise DFlashError(f"{model!r} is neither a folder, a hub name nor a model_type that mlx-lm knows.")
    report = check(target, rounds, seed, max_kv_size=max_kv_size, kv_bits=kv_bits)
    _print(report.table())
    if not report.passed:
        raise typer.Exit(1)


@app.command("bench")
def bench_rewind(
    blocks: Annotated[int, typer.Option(help="Blocks to time for each kind of cache.")] = 40,
) -> None:
    """Time of rewinding a block as a part of the block's own time, on models of about 50M parameters."""
    from ..adapters.conformance.rewind_cost import measure, table

    _print(table(measure(blocks)))


def _print(renderable: Any) -> None:
    """Tables keep their full width in files and pipes."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 200
    console.print(renderable)
