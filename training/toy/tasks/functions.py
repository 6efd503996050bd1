"""Requests for a function and their answers, composed from a source, one to three steps and a result.

Knows: how operations fit together, how users frame a request, the one style of an answer.
Must not know: what any single operation computes, which pairs are held out, how answers are checked.
"""
# ruff: noqa: E501 - a row of a table is one line

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .operations import NUMBER_FILTERS, NUMBER_MAPS, SEQUENCE_STEPS, SORTS, Operation
from .results import RESULTS
from .sources import NOUNS, SOURCES, Source, argument_choices
from .text_operations import CHARACTER_STEPS, PAIR_STEPS, RECORD_STEPS, WORD_STEPS

STEPS = NUMBER_FILTERS + NUMBER_MAPS + SORTS + SEQUENCE_STEPS + WORD_STEPS + CHARACTER_STEPS + PAIR_STEPS + RECORD_STEPS
STEP_BY_NAME = {row.name: row for row in STEPS}

SLICES = ("slice", "stride")
SOURCE_WEIGHTS = {"numbers": 20, "words": 12, "text": 7, "characters": 14, "range": 4}
OTHER_WEIGHT = 3
ORDER_WEIGHT = 3  # sorting is often asked for, and often refused by `sensible`
COMMON, COMMON_WEIGHT = ("items", "count", "sum", "join_text"), 3

# Steps and results that say nothing about single letters, or about numbers written as text.
ONE_LETTER = ("longer_than", "shorter_than", "exactly_long", "palindromes", "reverse_each", "sort_by_length", "lengths", "ending", "containing",
              "lacking", "longest", "shortest", "total_length", "length_map", "any_longer")  # fmt: skip
UNFIT_AFTER = {
    "initials": ONE_LETTER,
    "finals": ONE_LETTER,
    "to_text": ("starting", "ending", "containing", "lacking", "palindromes", "upper_words", "lower_words", "capitalize", "sort_words",
                "sort_words_down", "initials", "finals", "longer_than", "shorter_than", "exactly_long"),
}  # fmt: skip
NOT_ON_RANGE = ("sign", "absolute", "unique")  # 1 to n holds nothing to drop

# {s} the source, {t} the chain in the third person, {b} the chain as an imperative, {n} the compact form.
FRAMES_THIRD = (
    "Write a function that takes {s}, {t}.", "Write a Python function that takes {s}, {t}.", "I need a function that takes {s}, {t}.",
    "I need a Python function that takes {s}, {t}.", "Can you write a function that takes {s}, {t}?", "Please write a function that takes {s}, {t}.",
    "Could you give me code that takes {s}, {t}?", "Create a function which takes {s}, {t}.", "Python function that takes {s}, {t}.",
    "Give me a function that takes {s}, {t}.", "I want a function that takes {s}, {t}.", "Implement a Python function that takes {s}, {t}.",
    "Help me write a function that takes {s}, {t}.", "Show me a function that takes {s}, {t}.", "Define a function that takes {s}, {t}.",
    "Make a function that takes {s}, {t}, please.", "Can you help me with code that takes {s}, {t}?", "I am looking for a function that takes {s}, {t}.",
)  # fmt: skip
FRAMES_BASE = (
    "Given {s}, {b}.", "Take {s}, {b}.", "Write a function to take {s}, {b}.", "Write Python code to take {s}, {b}.", "How do I take {s}, {b}?",
    "Use Python to take {s}, {b}.", "I have {s}. {B}.", "Write code: given {s}, {b}.", "Please take {s}, {b}.", "In Python, take {s}, {b}.",
    "My input is {s}. {B}.", "For {s}, {b}.", "Write a Python function. Given {s}, {b}.", "I want to take {s}, {b}.", "Can you take {s}, {b}?",
)  # fmt: skip
FRAMES_COMPACT = (
    "Write a function that returns {n}.", "Write a Python function that returns {n}.", "I need a function that returns {n}.",
    "Write a function for {n}.", "Give me {n}.", "How do I get {n}?", "How can I get {n} in Python?", "Can you write a function that finds {n}?",
    "Return {n}.", "Please write code to find {n}.", "Python code for {n}.", "Write a function to get {n}.", "I want {n}.", "Function for {n}.",
    "Create a function that gives {n}.", "Could you write Python code that returns {n}?",
)  # fmt: skip
FRAMES_VERB = (
    "Write a function to {b}.", "Write a Python function to {b}.", "How do I {b}?", "How can I {b} in Python?", "{B}.", "Python function to {b}.",
    "I need code to {b}.", "I need a function to {b}.", "Write a function that {t}.", "Can you write a function to {b}?", "Please {b}.",
    "Give me a Python function that {t}.", "Could you help me {b}?", "Show me how to {b}.", "Code to {b}.", "I want to {b}.", "Create a function that {t}.",
)  # fmt: skip
VERBS = {
    "sum": ("sum", "add up", "total"),
    "count": ("count",),
    "product": ("multiply together",),
    "average": ("average",),
    "items": ("list", "get", "return", "collect", "find"),
}
JOINTS = (
    ((", "), " and "),
    (", ", ", and "),
    (", then ", " and "),
    (", ", " and then "),
    (", then ", ", then "),
    (", ", ", and finally "),
    (" and then ", " and "),
)


@dataclass(frozen=True)
class Pipeline:
    """The meaning of a request: a source, bound steps, a bound result."""

    source: Source
    steps: tuple[tuple[Operation, tuple[Any, ...]], ...]
    result: tuple[Operation, tuple[Any, ...]]

    @property
    def operations(self) -> tuple[str, ...]:
        return (*(step.name for step, _ in self.steps), self.result[0].name)

    def check(self) -> dict[str, Any]:
        """What the checker needs to rebuild the reference, as plain data."""
        return {
            "kind": "function",
            "source": self.source.name,
            "steps": [[step.name, *arguments] for step, arguments in self.steps],
            "result": [self.result[0].name, *self.result[1]],
        }


def sensible(steps: Sequence[Operation], result: Operation) -> bool:
    """No two steps of one group, no ordering that the result cannot show, at least one choice to make."""
    groups = [step.group for step in steps]
    if len(set(groups)) < len(groups):
        return False
    if not steps and result.name in ("items", "entries"):
        return False
    names = [step.name for step in steps] + [result.name]
    if any(later in UNFIT_AFTER.get(name, ()) for index, name in enumerate(names) for later in names[index + 1 :]):
        return False
    if "order" in groups and not result.ordered:
        later = groups[groups.index("order") + 1 :]
        return any(group in SLICES for group in later)
    return True


def next_steps(kind: str, source: Source) -> list[Operation]:
    """The steps that fit a value of this type on this source."""
    fitting = [row for row in STEPS if kind in row.takes and not (source.name == "range" and row.group in NOT_ON_RANGE)]
    return [row for row in fitting if argument_choices(row.arguments, source)]


def following(kind: str, step: Operation) -> str:
    """The type after the step."""
    return kind if step.gives == "same" else step.gives


def draw_pipeline(rng: random.Random, length: int) -> Pipeline:
    """A random pipeline with this many steps."""
    weights = [SOURCE_WEIGHTS.get(source.name, OTHER_WEIGHT) for source in SOURCES]
    while True:
        source = rng.choices(SOURCES, weights)[0]
        kind = source.gives
        steps: list[Operation] = []
        for _ in range(length):
            fitting = next_steps(kind, source)
            step = rng.choices(fitting, [ORDER_WEIGHT if row.group == "order" else 1 for row in fitting])[0]
            steps.append(step)
            kind = following(kind, step)
        results = [row for row in RESULTS if kind in row.takes]
        result = rng.choices(results, [COMMON_WEIGHT if row.name in COMMON else 1 for row in results])[0]
        if not sensible(steps, result):
            continue
        bound = [(row, rng.choice(argument_choices(row.arguments, source))) for row in (*steps, result)]
        return Pipeline(source, tuple(bound[:-1]), bound[-1])


def types_along(pipeline: Pipeline) -> Iterator[str]:
    """The type before each step, then before the result."""
    kind = pipeline.source.gives
    yield kind
    for step, _ in pipeline.steps:
        kind = following(kind, step)
        yield kind


def fill(template: str, source: Source, kind: str, arguments: tuple[Any, ...], variable: str = "result") -> str:
    """A template of a row with its arguments and the nouns of the type in place."""
    item, items = NOUNS.get(kind, (source.item, source.items))
    return template.format(*arguments, v=variable, item=item, items=items, label=source.label)


def third_person(phrase: str) -> str:
    """The imperative with its verb in the third person: "multiply each" gives "multiplies each"."""
    verb, _, rest = phrase.partition(" ")
    if verb.endswith("y") and verb[-2] not in "aeiou":
        verb = verb[:-1] + "ies"
    else:
        verb += "es" if verb.endswith(("s", "sh", "ch", "x", "z")) else "s"
    return f"{verb} {rest}" if rest else verb


def third_person_all(phrase: str) -> str:
    """The same for the one kind of phrase with two verbs, "divide each number and drop the remainder"."""
    return third_person(phrase).replace(" and drop ", " and drops ")


def chain(phrases: Sequence[str], between: str = ", ", last: str = " and ") -> str:
    """The phrases as one sentence part."""
    return between.join(phrases[:-1]) + last + phrases[-1] if len(phrases) > 1 else phrases[0]


def sentence(text: str) -> str:
    """The text with a capital first letter."""
    return text[:1].upper() + text[1:]


def canonical_phrases(pipeline: Pipeline) -> list[str]:
    """The imperative of every step and of the result, in the answer's own words."""
    rows = (*pipeline.steps, pipeline.result)
    return [
        fill(row.phrasings[0], pipeline.source, kind, arguments)
        for (row, arguments), kind in zip(rows, types_along(pipeline), strict=True)
    ]


def function_name(pipeline: Pipeline) -> str:
    """The result, the steps from last to first, the parameter: `sum_squared_even_numbers`."""
    parts = [fill(row.part, pipeline.source, "numbers", arguments) for row, arguments in reversed(pipeline.steps)]
    noun = NOUNS[pipeline.source.gives][1] if pipeline.source.opening else pipeline.source.parameter
    return "_".join([pipeline.result[0].part, *parts, noun])


def answer(pipeline: Pipeline) -> str:
    """The one canonical answer."""
    source = pipeline.source
    phrases = canonical_phrases(pipeline)
    opening = [source.opening_text] if source.opening else []
    lines = [f"def {function_name(pipeline)}({source.parameter}):", f'    """{sentence(chain(opening + phrases))}."""']
    variable = source.parameter
    if source.opening:
        lines += [f"    # {sentence(source.opening_text)}.", f"    result = {source.opening}"]
        variable = "result"
    kinds = list(types_along(pipeline))
    for (step, arguments), kind, phrase in zip(pipeline.steps, kinds, phrases, strict=False):
        lines += [f"    # {sentence(phrase)}.", f"    result = {fill(step.code, source, kind, arguments, variable)}"]
        variable = "result"
    row, arguments = pipeline.result
    code = fill(row.code, source, kinds[-1], arguments, variable).split("\n")
    lines += [f"    # {sentence(phrases[-1])}."]
    lines += [f"    {line}" for line in code] if len(code) > 1 else [f"    return {code[0]}"]
    does = chain([third_person_all(phrase) for phrase in opening + phrases])
    closing = f"The function {does}. If nothing is left, it returns {row.empty}."
    return "```python\n" + "\n".join(lines) + "\n```\n" + closing


def compact_form(pipeline: Pipeline, rng: random.Random) -> tuple[str, str] | None:
    """ "the squares of the even numbers in a list" and ", sorted ...", where word order leaves no doubt, else None.

    At most one filter before the noun, one after it, one map around it, in that order; an ordering only at the end.
    """
    result, result_arguments = pipeline.result
    source = pipeline.source
    if not (result.noun and source.within) or result_arguments:
        return None
    stage, before, after, noun, tail = 0, "", "", "", ""
    for (step, arguments), kind in zip(pipeline.steps, types_along(pipeline), strict=False):
        if step.before and stage < 1:
            stage, before = 1, step.before + " "
        elif step.after and step.group != "order" and stage < 2:
            stage, after = 2, " " + fill(step.after, source, kind, arguments)
        elif step.noun and stage < 3:
            stage, noun = 3, fill(step.noun, source, kind, arguments) + " "
        elif step.after and step.group == "order" and stage < 4 and result.name == "items":
            stage, tail = 4, ", " + fill(step.after, source, kind, arguments)
        else:
            return None
    items = fill("{items}", source, source.gives, ())
    core = f"{before}{items}{after} {rng.choice(source.within)}"
    return noun + "the " + core, tail


def direct_form(pipeline: Pipeline, rng: random.Random) -> str | None:
    """ "double each number in a list" for a single step whose result is the list, else None."""
    if len(pipeline.steps) != 1 or pipeline.result[0].name != "items" or not pipeline.source.within:
        return None
    (step, arguments), kind = pipeline.steps[0], pipeline.source.gives
    fitting = [text for text in step.phrasings if "number" in text or "word" in text or "{item" in text]
    if step.group == "order" or not fitting:
        return None
    return f"{fill(rng.choice(fitting), pipeline.source, kind, arguments)} {rng.choice(pipeline.source.within)}"


def framed_verb(phrase: str, rng: random.Random) -> str:
    """The imperative in a frame that needs no source."""
    return rng.choice(FRAMES_VERB).format(b=phrase, B=sentence(phrase), t=third_person_all(phrase))


def request(pipeline: Pipeline, rng: random.Random) -> str:
    """One of the many ways to ask for the pipeline."""
    source = pipeline.source
    compact = compact_form(pipeline, rng)
    direct = direct_form(pipeline, rng)
    if direct and rng.random() < 0.4:
        text = framed_verb(direct, rng)
    elif compact and rng.random() < 0.65:
        what, tail = compact
        row = pipeline.result[0]
        if row.name in VERBS and rng.random() < 0.5:
            text = framed_verb(f"{rng.choice(VERBS[row.name])} {what}{tail}", rng)
        else:
            if row.name == "count":
                what = what.removeprefix("the ")
            text = rng.choice(FRAMES_COMPACT).format(n=row.noun.format(x=what) + tail)
    else:
        rows = (*pipeline.steps, pipeline.result)
        phrases = [rng.choice(source.opening_requests)] if source.opening_requests else []
        phrases += [
            fill(rng.choice(row.phrasings), source, kind, arguments)
            for (row, arguments), kind in zip(rows, types_along(pipeline), strict=True)
        ]
        between, last = rng.choice(JOINTS)
        described = rng.choice(source.described)
        if rng.random() < 0.55:
            joined = chain([third_person_all(phrase) for phrase in phrases], between, last)
            if len(phrases) == 1:
                text = rng.choice(FRAMES_THIRD).replace("{s}, {t}", "{s} and {t}").format(s=described, t=joined)
            else:
                text = rng.choice(FRAMES_THIRD).format(s=described, t=joined)
        else:
            joined = chain(phrases, between, last)
            text = rng.choice(FRAMES_BASE).format(s=described, b=joined, B=sentence(joined))
    if rng.random() < 0.2 and not text.startswith(("I ", "Python")):
        text = text[:1].lower() + text[1:]
    if rng.random() < 0.2:
        text = text.rstrip(".?")
    return text
