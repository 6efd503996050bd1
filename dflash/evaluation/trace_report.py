"""One page that shows traces: the text by blocks, what each model thought, and plots. It needs no network."""

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from ..core.errors import DataError, DFlashError, install_extra
from ..decoding.trace import Record, shown_pieces
from .traces import CUT, Request, Traces, summary

TEXTS = 8
"""Prompts whose answers are shown; plots and figures are of all."""
HINT = "Point at a block, tap it, or press Tab and the arrow keys, to see what was drafted and what the target thought."


def report(traces: Traces, texts: int = TEXTS) -> str:
    """The page as HTML: figures, the answers to the first ``texts`` prompts, plots.

    Answers of several traces to one prompt stand side by side. Raises ``DataError`` for fewer than one text, and
    ``DFlashError`` without matplotlib.
    """
    if texts < 1:
        raise DataError(f"A report shows at least one text, got {texts}.")
    prompts = list(dict.fromkeys(request.prompt for request in traces.records))
    shown = [[r for r in traces.records if r.prompt == prompt] for prompt in prompts[:texts]]
    data: list[list[dict[str, Any]]] = []
    articles = []
    for number, requests in enumerate(shown, 1):
        sides = []
        for request in requests:
            sides.append(_side(request, len(data), traces))
            data.append(_text_data(request))
        articles.append(_article(number, requests, sides))
    left_out = f"The first {texts} of {len(prompts)} prompts are shown." if len(prompts) > texts else ""
    return Template(_page("page.html")).substitute(
        title=escape(f"DFlash: {', '.join(traces.names)}"),
        style=_page("style.css"),
        subtitle=escape(_subtitle(traces)),
        figures=_figures(traces),
        hint=escape(HINT),
        hidden="" if traces.records else "hidden",
        left_out=left_out,
        articles="".join(articles),
        plots=_plots(traces),
        # "</" would end the script, even inside a string
        data=json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/"),
        script=_page("script.js"),
    )


def _plots(traces: Traces) -> str:
    try:
        from .trace_plots import plots
    except ImportError as error:
        raise DFlashError(f"The plots of a report need matplotlib; {install_extra('study')}.") from error
    return plots(traces)


def _page(name: str) -> str:
    return files(__package__).joinpath("page", name).read_text(encoding="utf-8")


# --- figures -----------------------------------------------------------------------------------------------


def _subtitle(traces: Traces) -> str:
    if not traces.records:
        return f"Recorded by dflash serve, {traces.requests.date.min()} to {traces.requests.date.max()}."
    about = traces.records[0].about
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    return f"Target {_model(about['target'])}. {about['date']}, {about['device']}; {versions}."


def _figures(traces: Traces) -> str:
    """A table with a column for each trace, narrow enough for a phone."""
    rows: dict[str, list[str]] = {"drafter, options": [_first(traces, name) for name in traces.names]}
    for row in summary(traces).to_dict("records"):
        figures = {
            "tokens per block": _with_limits(row, "acceptance_length", 2),
            "tokens/s": _with_limits(row, "tokens_per_second", 1),
            "calibration error": _number(row["calibration_error"], 3),
            "requests": str(row["requests"]),
            "tokens": str(row["tokens"]),
        }
        for name, figure in figures.items():
            rows.setdefault(name, []).append(figure)
    head = "".join(f"<th scope=col>{escape(name)}</th>" for name in traces.names)
    body = "".join(
        f"<tr><th scope=row>{name}</th>{''.join(f'<td>{escape(value)}</td>' for value in values)}</tr>"
        for name, values in rows.items()
    )
    note = "In brackets: 95 % intervals over prompts. " if len(traces.requests) > len(traces.names) else ""
    if traces.blocks.asleep.any():
        note += "In some steps the policy fell back to plain decoding: tokens per block leave them out, and are no "
        note += "property of the drafter; those of --policy full are."
    return (
        "<div class=scroll tabindex=0 role=group aria-label='Figures by trace'><table class=figures>"
        f"<thead><tr><td></td>{head}</tr></thead><tbody>{body}</tbody></table></div><p class=muted>{note}</p>"
    )


def _first(traces: Traces, name: str) -> str:
    """How the first request was decoded."""
    recorded = _model(traces.requests[traces.requests.trace == name].drafter.iloc[0])
    return next((_how(request) for request in traces.records if request.trace == name), recorded)


def _with_limits(row: dict[str, Any], name: str, digits: int) -> str:
    value, low, high = (row[name + end] for end in ("", "_low", "_high"))
    limits = "" if low is None or low != low else f" ({low:.{digits}f} to {high:.{digits}f})"
    return f"{_number(value, digits)}{limits}"


def _number(value: float, digits: int) -> str:
    return "-" if value != value else f"{value:.{digits}f}"


def _how(request: Request) -> str:
    shown = {name: value for name, value in request.about["options"].items() if name != "max_tokens"}
    options = ", ".join(f"{name} {value}" for name, value in shown.items())
    return f"{_model(request.about['drafter'])}{', ' + options if options else ''}"


def _model(name: str) -> str:
    """The last two parts of a local path say enough."""
    return "/".join(name.rstrip("/").split("/")[-2:])


# --- texts -------------------------------------------------------------------------------------------------


def _article(number: int, requests: Sequence[Request], sides: Sequence[str]) -> str:
    prompt = escape(requests[0].about["prompt"])
    several = " several" if len(sides) > 1 else ""
    same = "" if len(sides) == 1 else f"<p class=muted>{_agreement(requests)}</p>"
    return (
        f"<article><h3>Prompt {number}</h3>"
        f"<details><summary>Show the prompt</summary><pre tabindex=0>{prompt}</pre></details>"
        f'{same}<div class="sides{several}">{"".join(sides)}</div></article>'
    )


def _agreement(requests: Sequence[Request]) -> str:
    texts = {"".join(block["text"] for block in request.blocks) for request in requests}
    return "All wrote the same text." if len(texts) == 1 else f"{len(texts)} different texts were written."


def _side(request: Request, index: int, traces: Traces) -> str:
    """One answer; its blocks can be pointed at, and linked to as ``#text0-block3``."""
    blocks = request.blocks
    of_request, of_blocks = (
        table[(table.trace == request.trace) & (table.request == request.number)]
        for table in (traces.requests, traces.blocks)
    )
    drafted = of_blocks[(of_blocks.block > 0) & ~of_blocks.asleep].committed
    facts = f"{of_request.tokens.iloc[0]} tokens, {len(drafted)} blocks of {_number(drafted.mean(), 2)} tokens, "
    facts += f"{_number(of_request.tokens_per_second.iloc[0], 1)} tokens/s"
    facts += "" if request.finished else f"; of the answer {CUT}"
    texts: dict[str, str] = {}
    for block in blocks:
        texts |= block["texts"]
    by_block: dict[int, list[tuple[str, int]]] = {block["number"]: [] for block in blocks}
    for pieces in shown_pieces(blocks):
        for piece, number, token in pieces:
            by_block[number].append((piece, token))
    spans = [_span(request, block, by_block[block["number"]], index, texts) for block in blocks]
    name = escape(request.trace)
    return (
        f"<section><h4>{name}</h4><p class=facts>{escape(_how(request))}</p><p class=facts>{facts}</p>"
        f'<div class=text role=group aria-label="Text of {name}, by blocks">{"".join(spans)}</div></section>'
    )


def _span(request: Request, block: Record, pieces: list[tuple[str, int]], index: int, texts: dict[str, str]) -> str:
    number = block["number"]
    runs: list[tuple[str, str]] = []
    for piece, token in pieces:
        kind = "plain" if block["asleep"] else "accepted" if token < block["accepted"] else "own"
        runs = [*runs[:-1], (kind, runs[-1][1] + piece)] if runs and runs[-1][0] == kind else [*runs, (kind, piece)]
    inside = "".join(f"<span class={kind}>{escape(text)}</span>" for kind, text in runs)
    rejected = "".join(texts[str(token)] for token in block["drafts"][block["accepted"] : block["verified"]])
    if rejected:
        inside += f"<del class=tail>{escape(rejected.replace(chr(10), '⏎'))}</del>"
    return (
        f"<span class=block id=text{index}-block{number} role=button aria-pressed=false aria-controls=detail "
        f"tabindex={0 if number == 0 else -1} data-text={index} data-block={number} "
        f'data-trace="{escape(request.trace)}">{inside}</span>'
    )


def _text_data(request: Request) -> list[dict[str, Any]]:
    """What the script shows of each block."""
    texts: dict[str, str] = {}
    data = []
    for block in request.blocks:
        texts |= block["texts"]
        chances = block.get("draft_probability", [None] * len(block["drafts"]))
        given = ("number", "position", "asleep", "source", "verified", "accepted", "why")
        data.append(
            {key: block[key] for key in given}
            | {
                "tokens": len(block["tokens"]),
                "drafts": [[texts[str(t)], p] for t, p in zip(block["drafts"], chances, strict=True)],
                "draft": _likeliest(block.get("draft_top"), texts),
                "target": _likeliest(block.get("target_top"), texts),
                "ms": {part: round(1000 * seconds, 2) for part, seconds in block["seconds"].items()},
            }
        )
    return data


def _likeliest(top: dict[str, Any] | None, texts: dict[str, str]) -> list[list[tuple[str, float]]]:
    if top is None:
        return []
    rows = zip(top["tokens"], top["probabilities"], strict=True)
    return [[(texts[str(t)], round(p, 4)) for t, p in zip(*row, strict=True)] for row in rows]
