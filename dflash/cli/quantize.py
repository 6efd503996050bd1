"""``dflash quantize``: a drafter with packed weights, smaller and on Apple silicon faster."""

from pathlib import Path
from typing import Annotated

import typer

from ..core.errors import CheckpointError
from . import options

app = typer.Typer()


@app.command()
def quantize(
    drafter: Annotated[
        str, typer.Argument(metavar="DRAFTER", help="A drafter's folder or hub name.", callback=options.not_empty)
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder for the quantised drafter.")],
    bits: Annotated[int | None, typer.Option(help="Bits of a weight: 2, 3, 4, 5, 6 or 8. Default: 4.")] = None,
    group_size: Annotated[
        int | None, typer.Option(help="Weights that share one scale: 32, 64 or 128. Default: 64; 32 for mxfp4.")
    ] = None,
    mode: Annotated[str, typer.Option(help="affine, mxfp4, mxfp8 or nvfp4.")] = "affine",
    leave_out: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Layers to leave as they are: fc, layers.0, o_proj. Repeatable."),
    ] = None,
) -> None:
    """Quantise a drafter's linear layers.

    Norms stay, and so do layers whose inputs do not divide into groups. The text that a target writes stays its own;
    compare the acceptance of both drafters with dflash bench.

    Examples:

    dflash quantize z-lab/Qwen3-4B-DFlash-b16 qwen3-4b-4bit

    dflash quantize runs/one/drafter drafter-mxfp4 --mode mxfp4 --leave-out fc
    """
    from ..core.files import flat
    from ..drafters.checkpoints.checkpoint import load_drafter, save_drafter
    from ..drafters.checkpoints.quantized import quantize_drafter, usual

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out} is not an empty folder; choose a new one.")
    usual_group, usual_bits = usual(mode)
    bits = usual_bits if bits is None else bits
    group_size = usual_group if group_size is None else group_size
    model = load_drafter(drafter)
    kept = quantize_drafter(model, bits, group_size, mode, leave_out or ())
    save_drafter(model, out)
    size = sum(w.nbytes for w in flat(model.parameters()).values())
    print(f"{out}: {bits} bits, groups of {group_size}, {mode}, {size / 1e6:.1f} MB.")
    if kept:
        print(f"Left as they are: {', '.join(kept)}.")
