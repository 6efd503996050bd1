"""Draws ``method.svg``: one block of DFlash decoding, position by position. Run ``python method.py [OUTPUT]``."""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyBboxPatch

COMMITTED = ["def", "add", "(", "a", ","]
ANCHOR = "b"
DRAFTS = [")", ":", "return", "a", "+", "1", "\\n"]
CHOICES = [")", ":", "return", "a", "+", "b", "\\n"]  # the target's own token at the place of each draft
ACCEPTED = 5

TARGET, FIXED, DRAFTER, MASK, WRONG = "#1f5fa8", "#dbe7f5", "#fdebcf", "#eeeeee", "#f7d4d0"
EDGE = {FIXED: "#7d9fc7", DRAFTER: "#d79b3c", MASK: "#b0b0b0", WRONG: "#c4574b", "#cfe8cf": "#5a9a5a"}
RIGHT = "#cfe8cf"
WIDTH, HEIGHT = 0.86, 0.52


def main(output: Path) -> None:
    """Write the figure."""
    plt.rcParams |= {"font.family": "DejaVu Sans", "svg.hashsalt": "dflash"}
    figure, axes = plt.subplots(figsize=(12, 6.3))
    axes.set_xlim(-3.9, 12.7)
    axes.set_ylim(0.3, 7.8)
    axes.axis("off")
    _draft(axes)
    _verify(axes)
    _accept(axes)
    _commit(axes)
    undated = {"Date": None} if output.suffix == ".svg" else None
    figure.savefig(output, bbox_inches="tight", facecolor="white", metadata=undated)


def _draft(axes) -> None:
    _step(axes, 6.4, "1  draft", "one pass of the drafter")
    for i, word in enumerate(COMMITTED):
        _box(axes, i, 7.1, word, FIXED)
    for i, word in enumerate([ANCHOR, *["mask"] * len(DRAFTS)]):
        _box(axes, 5 + i, 7.1, word, MASK if i else FIXED)
    _span(axes, 5, 12, 6.4, "drafter: a small block-diffusion model", DRAFTER)
    axes.annotate("", xy=(4.5, 6.4), xytext=(3.9, 6.4), arrowprops={"arrowstyle": "-|>", "color": "#555555", "lw": 1.4})
    axes.text(1.85, 6.4, "hidden states of the target\nfor all committed tokens", ha="center", va="center", size=10.5)
    for i, word in enumerate(DRAFTS):
        _arrow(axes, 6 + i, 6.1, 5.72)
        _box(axes, 6 + i, 5.42, word, DRAFTER)
    _box(axes, 5, 5.42, ANCHOR, FIXED)
    axes.text(5, 7.47, "anchor", ha="center", va="bottom", size=10, color="#555555")
    axes.text(2, 7.47, "committed tokens", ha="center", va="bottom", size=10, color="#555555")


def _verify(axes) -> None:
    _step(axes, 4.38, "2  verify", "one pass of the target")
    for i in range(8):
        _arrow(axes, 5 + i, 5.12, 4.72)
    _span(axes, 5, 12, 4.38, "target: your language model", FIXED)


def _accept(axes) -> None:
    _step(axes, 3.4, "3  accept", "drafts equal to the\ntarget's own choice")
    for i, word in enumerate(CHOICES):
        right, decisive = i < ACCEPTED, i <= ACCEPTED
        _arrow(axes, 6 + i, 4.06, 3.7)
        _box(axes, 6 + i, 3.4, word, FIXED if decisive else MASK, faded=not decisive)
        if decisive:
            mark, colour = ("✓", "#3c843c") if right else ("✗", "#c4574b")
            axes.text(6 + i, 2.83, mark, ha="center", va="center", size=15, color=colour)


def _commit(axes) -> None:
    _step(axes, 2.2, "4  commit", f"{ACCEPTED} drafts and one token\nof the target's own")
    for i, word in enumerate([*COMMITTED, ANCHOR]):
        _box(axes, i, 2.2, word, FIXED)
    for i in range(ACCEPTED + 1):
        _box(axes, 6 + i, 2.2, CHOICES[i], RIGHT if i < ACCEPTED else FIXED)
    _box(axes, 12, 2.2, DRAFTS[-1], WRONG, faded=True)
    axes.text(11, 1.88, "anchor", ha="center", va="top", size=9.5, color="#555555")
    axes.text(12, 1.88, "rejected", ha="center", va="top", size=9.5, color="#c4574b")
    _step(axes, 1.02, "5  rewind", "rejected tokens\nleave no trace")
    _span(axes, 0, 10, 1.02, "both caches hold exactly the tokens before the next anchor", MASK)


def _box(axes, x: float, y: float, word: str, colour: str, faded: bool = False) -> None:
    axes.add_patch(
        FancyBboxPatch(
            (x - WIDTH / 2, y - HEIGHT / 2),
            WIDTH,
            HEIGHT,
            boxstyle="round,pad=0,rounding_size=0.08",
            facecolor=colour,
            edgecolor=EDGE[colour],
            alpha=0.55 if faded else 1,
        )
    )
    style = {
        "family": "DejaVu Sans Mono",
        "size": 11 if len(word) < 5 else 8.6,
        "color": "#999999" if faded or word == "mask" else "black",
    }
    axes.text(x, y, word, ha="center", va="center", **style)


def _span(axes, first: int, last: int, y: float, text: str, colour: str) -> None:
    left, width = first - WIDTH / 2, last - first + WIDTH
    axes.add_patch(
        FancyBboxPatch(
            (left, y - 0.3),
            width,
            0.6,
            boxstyle="round,pad=0,rounding_size=0.12",
            facecolor=colour,
            edgecolor=EDGE[colour],
        )
    )
    axes.text(left + width / 2, y, text, ha="center", va="center", size=11.5)


def _arrow(axes, x: float, top: float, bottom: float, shift: float = 0.0) -> None:
    axes.annotate(
        "",
        xy=(x + shift, bottom),
        xytext=(x, top),
        arrowprops={"arrowstyle": "-|>", "color": "#777777", "lw": 1, "shrinkA": 0, "shrinkB": 0},
    )


def _step(axes, y: float, name: str, meaning: str) -> None:
    axes.text(-3.8, y + 0.16, name, ha="left", va="center", size=13.5, weight="bold", color=TARGET)
    axes.text(-3.8, y - 0.12, meaning, ha="left", va="top", size=10, color="#444444")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".svg"))
