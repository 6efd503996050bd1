"""One request answered plainly and with DFlash: both streamed, then timed as ``dflash bench`` times them."""

from collections.abc import Callable, Mapping, Sequence

from ..core.errors import DFlashError
from ..generate import DFlashSpeculativeDecoder
from .runs import DFLASH, PLAIN, BenchPrompt, PromptResult, Side, compare, dflash_side, plain_side, time_side

MAX_TOKENS = 512
LEAST_TOKENS = 100  # a shorter answer ends before one sees the difference
RUNS = 5


def demo_sides(decoder: DFlashSpeculativeDecoder, prompts: Sequence[BenchPrompt]) -> dict[str, Side]:
    """Both ways to answer, greedily, with at most ``MAX_TOKENS`` tokens or as many as the target has room for."""
    room = max(1, min(MAX_TOKENS, decoder.max_seq_length - max(len(p.tokens) for p in prompts)))
    return {PLAIN: plain_side(decoder.loaded_target, room), DFLASH: dflash_side(decoder, room)}


def choose_request(plain: Side, prompts: Sequence[BenchPrompt]) -> BenchPrompt:
    """The first request whose plain answer is of some length and, if it has a check, a function.

    Whether the function is right plays no part in the choice. Raises ``DFlashError`` if there is no such request.
    """
    for prompt in prompts:
        run = time_side(plain, prompt.tokens)
        if len(run.tokens) >= LEAST_TOKENS and (prompt.check is None or "def " in run.text):
            return prompt
    raise DFlashError(
        f"No request is answered by at least {LEAST_TOKENS} tokens, or by a function if it has a check; give one "
        "of your own."
    )


def run_demo(
    decoder: DFlashSpeculativeDecoder,
    sides: Mapping[str, Side],
    prompt: BenchPrompt,
    heading: Callable[[str], object],
    show: Callable[[str], object],
) -> PromptResult:
    """Stream each side's answer, its name to ``heading`` and its text to ``show``; then time ``RUNS`` of each."""
    with decoder.threads.in_use():  # the same number of threads for both
        for side in sides.values():
            time_side(side, prompt.tokens)  # a warm-up
        for name, side in sides.items():
            heading(name)
            time_side(side, prompt.tokens, show)
    dflash = {DFLASH: sides[DFLASH]}
    results = compare(decoder.loaded_target, sides[PLAIN], dflash, [prompt], RUNS, threads=decoder.threads)
    return next(results)[DFLASH]
