"""One request answered twice, plain and with DFlash: both streamed, then timed in turns.

Knows the order of events. Must not know how results are shown, or how an answer is judged.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..core.errors import DFlashError
from ..generate import DFlashSpeculativeDecoder
from .runs import DFLASH, PLAIN, BenchPrompt, PromptResult, Side, compare, dflash_side, plain_side, time_side

MAX_TOKENS = 512
LEAST_TOKENS = 100  # a shorter answer is over before one sees the difference
RUNS = 5

Show = Callable[[str], object]


@dataclass(frozen=True)
class DemoSides:
    """Both ways to answer, with the decoder that they share."""

    decoder: DFlashSpeculativeDecoder
    plain: Side
    dflash: Side


def demo_sides(decoder: DFlashSpeculativeDecoder, prompts: Sequence[BenchPrompt]) -> DemoSides:
    """Greedy sides with as many tokens as the target's limit leaves room for, at most ``MAX_TOKENS``."""
    room = max(1, min(MAX_TOKENS, decoder.max_seq_length - max(len(p.tokens) for p in prompts)))
    return DemoSides(decoder, plain_side(decoder.loaded_target, room), dflash_side(decoder, room))


def choose_request(sides: DemoSides, prompts: Sequence[BenchPrompt]) -> BenchPrompt:
    """The first request that the target, decoding plainly, answers at some length; one with a check, by a function.

    Whether the function is right plays no part in the choice. Raises
    ``DFlashError`` if there is none.
    """
    for prompt in prompts:
        run = time_side(sides.plain, prompt.tokens)
        if len(run.tokens) >= LEAST_TOKENS and (prompt.check is None or "def " in run.text):
            return prompt
    raise DFlashError(
        f"No request is answered by at least {LEAST_TOKENS} tokens, or by a function where it is checked; give one "
        "of your own."
    )


def stream_once(sides: DemoSides, prompt: BenchPrompt, heading: Show, show: Show) -> None:
    """Answer plainly, then with DFlash, each piece of text shown as it comes. A warm-up comes first."""
    with sides.decoder.threads.in_use():  # the same number of threads for both
        for side in (sides.plain, sides.dflash):
            time_side(side, prompt.tokens)
        for name, side in ((PLAIN, sides.plain), (DFLASH, sides.dflash)):
            heading(name)
            time_side(side, prompt.tokens, show)


def measure(sides: DemoSides, prompt: BenchPrompt, runs: int = RUNS) -> PromptResult:
    """``runs`` answers of each side in turns."""
    target, threads = sides.decoder.loaded_target, sides.decoder.threads
    return next(compare(target, sides.plain, {DFLASH: sides.dflash}, [prompt], runs, threads=threads))[DFLASH]
