"""Finished and scripted runs for the tests of benchmarks, and what a terminal shows of their results."""

import io

from rich.console import Console, RenderableType

from dflash.evaluation import BenchPrompt, PromptResult, Run, Step

PROMPTS = [BenchPrompt("one", [65, 66]), BenchPrompt("two", [65, 67], {"kind": "problem", "answer": 3})]


def rendered(shown: RenderableType) -> str:
    console = Console(file=io.StringIO(), width=200, markup=False)
    console.print(shown)
    return console.file.getvalue()


def run(tokens=range(11), seconds=2.0, committed=(4, 6), text="") -> Run:
    return Run(list(tokens), text, seconds, list(committed))


def result(plain: list[Run], dflash: list[Run], difference=None) -> PromptResult:
    return PromptResult(PROMPTS[0], plain, dflash, difference)


def scripted_side(name: str, tokens: list[int], calls: list[str]):
    """Answers with ``tokens`` whatever is asked, and notes that it was asked."""

    def answer(prompt):
        calls.append(name)
        return (Step([token], "x", (0, 0) if i else None) for i, token in enumerate(tokens))

    return answer
