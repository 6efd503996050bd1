"""Plain decoding and DFlash in turns on the same target and prompts: speed, acceptance, identity.

Knows how to time a stream of tokens and how to compare two. Must not know the command line, how
results are shown, or how an answer is judged.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx_lm.generate import generation_stream
from mlx_lm.sample_utils import make_sampler

from ..errors import DFlashError, GenerationError
from ..generate import PAIR, DFlashSpeculativeDecoder
from ..target import LoadedTargetModel

HELDOUT = PAIR / "heldout.jsonl"
"""Held-out requests of the pair that ships, one JSON object a line: ``prompt`` and ``check``."""

PLAIN, DFLASH = "plain mlx_lm", "DFlash"

Step = tuple[list[int], str, int]
"""New tokens, the text that became certain, and how many tokens a block committed (0: no block)."""

Score = Callable[[list[tuple[str, dict[str, Any]]]], list[bool]]
"""Judges answers, given as text and ``check`` of the request, all in one call."""

Side = Callable[[list[int]], Iterator[Step]]
"""One way to answer a prompt of token ids. Its first step brings exactly one token."""


@dataclass(frozen=True)
class BenchPrompt:
    """A request and, where known, plain data from which its answer can be judged."""

    text: str
    check: dict[str, Any] | None = None


@dataclass(frozen=True)
class Run:
    """One side's answer; ``seconds`` since the first token, ``accepted`` tokens per block (plain: empty)."""

    tokens: list[int]
    text: str
    seconds: float
    accepted: list[int]

    @property
    def tps(self) -> float | None:
        """Tokens after the first per second since the first; ``None`` where there is only one."""
        return (len(self.tokens) - 1) / self.seconds if len(self.tokens) > 1 and self.seconds > 0 else None


@dataclass(frozen=True)
class Difference:
    """Where two answers part: tokens at ``position`` (``None`` past an end), and how close the choice was.

    ``margin`` is the target's top logit less that of the other token, from a fresh forward pass over the
    common prefix; ``None`` where one answer merely ends.
    """

    position: int
    plain: int | None
    dflash: int | None
    margin: float | None = None


@dataclass(frozen=True)
class PromptResult:
    """All runs of one prompt, plain and DFlash; run ``i`` of one side belongs to run ``i`` of the other."""

    prompt: BenchPrompt
    prompt_tokens: list[int]
    plain: list[Run]
    dflash: list[Run]
    difference: Difference | None

    @property
    def ratios(self) -> list[float]:
        """DFlash's speed over plain's, run by run, where both have one."""
        pairs = zip(self.plain, self.dflash, strict=True)
        return [d.tps / p.tps for p, d in pairs if p.tps is not None and d.tps is not None]


# --- prompts ------------------------------------------------------------------------------------------


def read_prompts(path: Path) -> list[BenchPrompt]:
    """Prompts of a JSONL file, ``{"prompt": str, "check": {...}}`` a line; ``check`` may be missing.

    Raises :class:`~dflash.errors.DFlashError`, naming the line, if the file is missing, broken or empty.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # splitlines would part JSON text at U+2028 too
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise DFlashError(f"Cannot read the prompts in {path}: {reason}.") from error
    prompts = [_parse_prompt(line, f"{path}, line {n}") for n, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise DFlashError(f'{path} holds no prompts; expected lines such as {{"prompt": "..."}}.')
    return prompts


def _parse_prompt(line: str, where: str) -> BenchPrompt:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise DFlashError(f"{where} is not valid JSON: {error.msg} at column {error.colno}.") from error
    text = value.get("prompt") if isinstance(value, dict) else None
    if not isinstance(text, str) or not text.strip():
        raise DFlashError(f'{where} has no "prompt", or not a text that says something.')
    check = value.get("check")
    if check is not None and not isinstance(check, dict):
        raise DFlashError(f'{where}: "check" must be an object, got {type(check).__name__}.')
    return BenchPrompt(text, check)


# --- the two sides ------------------------------------------------------------------------------------


def plain_side(target: LoadedTargetModel, max_tokens: int, temperature: float = 0.0) -> Side:
    """``mlx_lm.stream_generate`` as its users call it.

    Raises :class:`~dflash.errors.GenerationError` for fewer than one token: -1 would mean no end to mlx-lm.
    """
    if max_tokens < 1:
        raise GenerationError(f"max_tokens must be at least 1 to compare, got {max_tokens}.")
    sampler = make_sampler(temp=temperature)

    def answer(prompt: list[int]) -> Iterator[Step]:
        stream = mlx_lm.stream_generate(target.model, target.tokenizer, prompt, max_tokens, sampler=sampler)
        return (([r.token], r.text, 0) for r in stream)

    return answer


def dflash_side(decoder: DFlashSpeculativeDecoder, max_tokens: int, temperature: float = 0.0) -> Side:
    """:meth:`~dflash.DFlashSpeculativeDecoder.stream_generate` as its users call it."""

    def answer(prompt: list[int]) -> Iterator[Step]:
        stream = decoder.stream_generate(prompt, max_tokens, temperature)
        return ((r.tokens, r.text, r.accepted) for r in stream)

    return answer


def time_side(side: Side, prompt: list[int], show: Callable[[str], object] | None = None) -> Run:
    """Let ``side`` answer and take the time; ``show`` gets the text piece by piece."""
    mx.synchronize(generation_stream)  # plain decoding leaves one step more than it needs in flight
    tokens: list[int] = []
    pieces: list[str] = []
    accepted: list[int] = []
    first = now = time.perf_counter()
    for new, piece, committed in side(prompt):
        now = time.perf_counter()
        first = first if tokens else now
        tokens += new
        pieces.append(piece)
        if committed:
            accepted.append(committed)
        if show is not None:
            show(piece)
    return Run(tokens, "".join(pieces), now - first, accepted)


def compare(
    target: LoadedTargetModel,
    plain: Side,
    dflash: Side,
    prompts: Sequence[BenchPrompt],
    runs: int = 1,
    *,
    greedy: bool = True,
    seed: int = 0,
    chat: bool = True,
) -> Iterator[PromptResult]:
    """Answer every prompt ``runs`` times by both sides in turns, the first to go changing each time.

    One uncounted run of each side on the first prompt comes first. Unless ``greedy``, tokens come from two
    random streams and are not compared.

    Raises :class:`~dflash.errors.DFlashError`, naming side and prompt, if one side fails.
    """
    if runs < 1:
        raise GenerationError(f"runs must be at least 1, got {runs}.")
    token_lists = [target.build_prompt(p.text, chat) for p in prompts]
    sides = {PLAIN: plain, DFLASH: dflash}
    for name in sides:
        _run(sides, name, token_lists[0], 1)
    for i, (prompt, tokens) in enumerate(zip(prompts, token_lists, strict=True)):
        done: dict[str, list[Run]] = {PLAIN: [], DFLASH: []}
        for run in range(runs):
            for name in (PLAIN, DFLASH) if (i + run) % 2 == 0 else (DFLASH, PLAIN):
                mx.random.seed(seed + run)
                done[name].append(_run(sides, name, tokens, i + 1))
        difference = find_difference(target, tokens, done[PLAIN], done[DFLASH]) if greedy else None
        yield PromptResult(prompt, tokens, done[PLAIN], done[DFLASH], difference)


def _run(sides: dict[str, Side], name: str, tokens: list[int], number: int) -> Run:
    try:
        run = time_side(sides[name], tokens)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DFlashError(f"{name} failed on prompt {number}: {reason}") from error
    if not run.tokens:
        raise DFlashError(f"{name} wrote nothing for prompt {number}.")
    return run


# --- identity -----------------------------------------------------------------------------------------


def first_difference(plain: Sequence[int], dflash: Sequence[int]) -> Difference | None:
    """The first position at which two token lists differ, their ends included; ``None`` if they do not."""
    if list(plain) == list(dflash):
        return None
    shorter = min(len(plain), len(dflash))
    position = next((i for i in range(shorter) if plain[i] != dflash[i]), shorter)
    return Difference(position, *(t[position] if position < len(t) else None for t in (plain, dflash)))


def find_difference(
    target: LoadedTargetModel, prompt: list[int], plain: Sequence[Run], dflash: Sequence[Run]
) -> Difference | None:
    """The first difference between runs that belong together, with its margin."""
    for p, d in zip(plain, dflash, strict=True):
        found = first_difference(p.tokens, d.tokens)
        if found is not None:
            margin = logit_margin(target, prompt + p.tokens[: found.position], found.plain, found.dflash)
            return Difference(found.position, found.plain, found.dflash, margin)
    return None


def logit_margin(target: LoadedTargetModel, prefix: list[int], a: int | None, b: int | None) -> float | None:
    """The top logit after ``prefix`` less that of the less likely of tokens ``a`` and ``b``."""
    if a is None or b is None:
        return None
    hidden, _ = target.forward_hidden(mx.array([prefix]), target.make_cache(), ())
    logits_V = target.head(hidden[:, -1:])[0, 0].astype(mx.float32)
    return float((logits_V.max() - mx.minimum(logits_V[a], logits_V[b])).item())  # type: ignore[arg-type]


# --- statistics ---------------------------------------------------------------------------------------


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Median, least and greatest of ``values``; ``None`` of nothing."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)} if values else None


def acceptance_length(runs: Iterable[Run]) -> float | None:
    """Tokens committed per block over all ``runs``; ``None`` where no block was decoded."""
    committed = [n for run in runs for n in run.accepted]
    return sum(committed) / len(committed) if committed else None


def overall_tps(runs: Sequence[Run]) -> float | None:
    """Tokens after the first of each run over all the time since those."""
    timed = [run for run in runs if run.tps is not None]
    return sum(len(r.tokens) - 1 for r in timed) / sum(r.seconds for r in timed) if timed else None


def summarize(results: Sequence[PromptResult]) -> dict[str, Any]:
    """Speeds, ratios over prompts and runs, acceptance length and the number of identical answers."""
    plain = [run for r in results for run in r.plain]
    dflash = [run for r in results for run in r.dflash]
    plain_tps, dflash_tps = overall_tps(plain), overall_tps(dflash)
    return {
        "prompts": len(results),
        "plain_tps": plain_tps,
        "dflash_tps": dflash_tps,
        "overall_ratio": dflash_tps / plain_tps if plain_tps and dflash_tps else None,
        "ratio": spread([ratio for r in results for ratio in r.ratios]),
        "acceptance_length": acceptance_length(dflash),
        "identical": sum(r.difference is None for r in results),
    }


def judge(results: Sequence[PromptResult], score: Score) -> list[tuple[bool, bool] | None]:
    """Whether each prompt's first answer is correct, plain and DFlash; ``None`` for prompts without check."""
    pairs = [(run.text, r.prompt.check) for r in results if r.prompt.check for run in (r.plain[0], r.dflash[0])]
    verdicts = iter(score(pairs)) if pairs else iter(())
    return [(next(verdicts), next(verdicts)) if r.prompt.check else None for r in results]
