"""``dflash report``: traces as one page to look at."""

from pathlib import Path
from typing import Annotated

import typer

from . import options

app = typer.Typer()


@app.command()
def report(
    traces: Annotated[
        list[Path],
        typer.Argument(metavar="TRACE.jsonl|FOLDER...", help="Files of --trace, folders of dflash serve --record."),
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE.html", help="The page.", callback=options.in_a_folder)
    ] = Path("report.html"),
    texts: Annotated[
        int, typer.Option(metavar="N", min=1, help="Prompts whose answers are shown; plots are of all.")
    ] = 8,
) -> None:
    """Show traces as one page: text by blocks, what each model thought, and plots. It needs no network.

    Answers of several traces to the same prompt stand side by side. Of a
    server's record it shows acceptance by position and by request. Needs
    pandas and matplotlib, which the extra "study" brings.

    Examples:

    dflash generate "Return the longest word." --trace word.jsonl
    dflash report word.jsonl
    dflash eval mine --trace mine.jsonl && dflash eval theirs --trace theirs.jsonl
    dflash report mine.jsonl theirs.jsonl -o both.html
    dflash report served -o served.html
    """
    from ..core.files import atomic_write
    from ..evaluation.trace_report import report as page
    from ..evaluation.traces import read_traces

    html = page(read_traces(*traces), texts)
    atomic_write(output, lambda file: file.write_text(html, encoding="utf-8"))
    print(f"{output} ({len(html.encode()) / 1000:.0f} kB)")
