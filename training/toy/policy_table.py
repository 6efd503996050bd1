"""How many drafts should a block verify? Fixed numbers, the adaptive policy and an oracle on the bundled models.

    python -m dflash.training.toy.policy_table dflash/docs/measurements.md

Three kinds of requests: those that the drafter was trained for, text unlike them, and answers that go from one to the
other. Knows the toy tasks, the benchmark and where its table goes. Must not know how anything is decoded or timed.
"""

import argparse
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from dflash import DFlashSpeculativeDecoder, LoadedTargetModel
from dflash.core.files import atomic_write
from dflash.core.progress import progress
from dflash.decoding.block import Decoding
from dflash.decoding.loop import decode, prefill
from dflash.decoding.sampling import GREEDY, DrawingSampler
from dflash.drafters.protocol import Proposal
from dflash.evaluation import HELDOUT, BenchPrompt, PromptResult, compare, dflash_side, plain_side
from dflash.policies.base import Fixed, Policy
from dflash.prompts.conversations import read_conversations

from .stdlib_prompts import beginnings

LENGTHS = (1, 2, 3, 5, 7, 11, 15)
MAX_TOKENS = 200
BEGIN, END = "<!-- policy table: make bench -->", "<!-- end of policy table -->"


class Asleep(Policy):
    """Plain steps only: what the adaptive policy decodes with where drafts do not pay."""

    def sleep(self) -> int:
        """All of an answer."""
        return MAX_TOKENS


@dataclass(frozen=True)
class Case:
    """Requests of one kind."""

    name: str
    prompts: list[BenchPrompt]


def cases(target: LoadedTargetModel, count: int) -> list[Case]:
    """``count`` requests of each kind, always the same."""
    requests = [str(c.messages[-1]["content"]) for c in read_conversations(HELDOUT)]
    functions = list(beginnings())
    draw = random.Random(0)
    inside, outside = draw.sample(requests, 2 * count), draw.sample(functions, 2 * count)
    mixed = [f"{code}\n{request}" for code, request in zip(outside[count:], inside[count:], strict=True)]
    return [
        Case("heldout requests", [BenchPrompt(text, target.build_prompt(text)) for text in inside[:count]]),
        Case("standard library", [BenchPrompt(t, target.build_prompt(t, chat=False)) for t in outside[:count]]),
        Case("both in one prompt", [BenchPrompt(text, target.build_prompt(text)) for text in mixed]),
    ]


@dataclass(frozen=True)
class Row:
    """Median ratios to plain mlx_lm of one case; ``identical`` counts answers of all sides."""

    name: str
    ratios: dict[str, float]
    oracle: float
    waking_oracle: float
    identical: tuple[int, int]


def measure(case: Case, decoder: DFlashSpeculativeDecoder, temperature: float, runs: int) -> Row:
    """Plain steps, every length, the adaptive policy and plain mlx_lm on each request, together."""
    target, sampler = decoder.loaded_target, GREEDY if temperature == 0 else DrawingSampler(temperature)
    lengths = {str(k): k for k in LENGTHS}
    policies: dict[str, str | int | Policy] = {"asleep": Asleep(), **lengths, "adaptive": "adaptive"}
    sides = {name: dflash_side(decoder, MAX_TOKENS, temperature, policy=policy) for name, policy in policies.items()}
    plain = plain_side(target, MAX_TOKENS, sampler=sampler)
    turns = compare(target, plain, sides, case.prompts, runs, threads=decoder.threads, together=True)
    results = list(progress(turns, f"{case.name}, temperature {temperature}", len(case.prompts)))
    ratios = {name: statistics.median(r for result in results for r in result[name].ratios) for name in sides}
    oracles = [_oracles(decoder, sampler, result) for result in results]
    same = [result[name].difference is None for result in results for name in sides]
    name = f"{case.name}, {'greedy' if temperature == 0 else f'temperature {temperature}'}"
    best, waking = (statistics.median(column) for column in zip(*oracles, strict=True))
    return Row(name, ratios, best, waking, (sum(same), len(same)))


def _oracles(
    decoder: DFlashSpeculativeDecoder, sampler: Callable[[mx.array], mx.array], result: dict[str, PromptResult]
) -> tuple[float, float]:
    """Ratios of an oracle that drafts every block, and of one that also lets the drafter sleep where that is quicker.

    Both know how many drafts of a block at each position match the text, and what a block of each length takes in
    this answer. The least time from each position to the end is found backwards.
    """
    asleep = result["asleep"]
    matched = list(_matched_everywhere(decoder, sampler, asleep.prompt.tokens, asleep.plain[0].tokens))
    plain_step, step = (
        statistics.median(run.seconds / (len(run.tokens) - 1) for run in runs if len(run.tokens) > 1)
        for runs in (asleep.plain, asleep.dflash)
    )
    costs = {k: _block_seconds(result[str(k)]) for k in LENGTHS}
    ratios = []
    for sleep in (float("inf"), step):
        rest = [0.0] * (len(matched) + 1)
        for i in range(len(matched) - 1, -1, -1):
            blocks = (costs[k] + rest[min(i + 1 + min(matched[i], k), len(matched))] for k in LENGTHS)
            rest[i] = min(sleep + rest[i + 1], *blocks)
        ratios.append(plain_step * len(matched) / rest[0])
    return ratios[0], ratios[1]


def _block_seconds(result: PromptResult) -> float:
    return statistics.median(run.seconds / len(run.committed) for run in result.dflash)


def _matched_everywhere(
    decoder: DFlashSpeculativeDecoder,
    sampler: Callable[[mx.array], mx.array],
    prompt: list[int],
    text: list[int],
) -> Iterator[int]:
    """For each token of ``text`` after the first: how many drafts of a block that begins there match the text."""

    def drafts(proposal: Proposal, logits_LV: mx.array) -> dict[str, mx.array]:
        return {"drafts": proposal.tokens}

    mx.random.seed(0)
    run = Decoding(decoder.loaded_target, decoder.draft_model, sampler, policy=Fixed(0), inspect=drafts)
    state = prefill(run, prompt)
    for i, block in enumerate(decode(run, state, len(text), decoder.block_size), 1):
        assert block.inspected is not None
        drafted: Sequence[int] = block.inspected["drafts"][0].tolist()  # type: ignore[assignment]
        rest = text[i:]
        yield next((n for n, (a, b) in enumerate(zip(drafted, rest, strict=False)) if a != b), len(rest))


def table(rows: Sequence[Row]) -> str:
    """Markdown: one line a case."""
    fixed = ["asleep", *(str(k) for k in LENGTHS)]
    head = ["speed over plain mlx_lm", *fixed, "**adaptive**", "oracle", "oracle that may sleep"]
    lines = [f"| {' | '.join(head)} |", f"|---|{'---|' * (len(head) - 1)}"]
    for row in rows:
        cells = [f"{x:.2f}" for x in (*map(row.ratios.__getitem__, fixed), row.oracle, row.waking_oracle)]
        cells.insert(len(fixed), f"**{row.ratios['adaptive']:.2f}**")
        lines.append(f"| {row.name} | {' | '.join(cells)} |")
    same, all_of_them = (sum(column) for column in zip(*(row.identical for row in rows), strict=True))
    return "\n".join([*lines, "", f"Tokens identical to plain mlx_lm in {same} of {all_of_them} answers."])


def main() -> None:
    """Measure and print the table, or put it between its marks in a file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path, nargs="?", help="Markdown file to write the table into")
    parser.add_argument("--count", type=int, default=12, help="requests of each kind")
    parser.add_argument("--runs", type=int, default=1, help="runs of each request")
    arguments = parser.parse_args()
    decoder = DFlashSpeculativeDecoder.from_pretrained()
    rows = []
    for case in cases(decoder.loaded_target, arguments.count):
        for temperature in (0.0, 0.8):
            rows.append(measure(case, decoder, temperature, arguments.runs))
            print(table(rows[-1:]), flush=True)
    text = table(rows)
    if arguments.file is None:
        print(text)
        return
    before, rest = arguments.file.read_text(encoding="utf-8").split(BEGIN)
    after = rest.split(END)[1]
    whole = f"{before}{BEGIN}\n{text}\n{END}{after}"
    atomic_write(arguments.file, lambda file: file.write_text(whole, encoding="utf-8"))


if __name__ == "__main__":
    main()
