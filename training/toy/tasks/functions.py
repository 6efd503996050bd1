"""Requests for a function and their answers, composed of a source, up to three steps and a result."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .operations import RESULT_BY_NAME, RESULTS, STEP_BY_NAME, STEPS, Operation
from .sources import NOUNS, SOURCE_BY_NAME, SOURCES, Source, argument_choices
from .wording import FRAMES, as_typed, chain, fenced, sentence, third_person

SOURCE_WEIGHTS = {"numbers": 20, "words": 12, "text": 7, "characters": 14, "range": 4}
OTHER_WEIGHT = 3
ORDER_WEIGHT = 3  # sorting is often asked for, and often refused by `sensible`
COMMON, COMMON_WEIGHT = ("items", "count", "sum", "join_text"), 3

# Steps and results that say nothing about single letters, or about numbers written as text.
ONE_LETTER = (
    "longer_than shorter_than exactly_long palindromes reverse_each sort_by_length lengths ending containing lacking "
    "longest shortest total_length length_map any_longer"
).split()
DIGITS = (
    "starting ending containing lacking palindromes upper_words lower_words capitalize sort_words sort_words_down "
    "initials finals longer_than shorter_than exactly_long"
).split()
UNFIT_AFTER = {"initials": ONE_LETTER, "finals": ONE_LETTER, "to_text": DIGITS}
SLICES = ("slice", "stride")
NOT_ON_RANGE = ("sign", "absolute", "unique")  # 1 to n holds nothing to drop

VERBS = {
    "sum": ("sum", "add up", "total"),
    "count": ("count",),
    "product": ("multiply together",),
    "average": ("average",),
    "items": ("list", "get", "return", "collect", "find"),
}
JOINTS = (
    (", ", " and "),
    (", ", ", and "),
    (", then ", " and "),
    (", ", " and then "),
    (", then ", ", then "),
    (", ", ", and finally "),
    (" and then ", " and "),
)


@dataclass(frozen=True)
class Bound:
    """An operation with its arguments, on a value of type `kind` that comes from `source`."""

    row: Operation
    arguments: tuple[Any, ...]
    kind: str
    source: Source

    def fill(self, template: str, variable: str = "result") -> str:
        """A template of the row with its arguments and the nouns of the type in place."""
        item, items = NOUNS.get(self.kind, (self.source.item, self.source.items))
        return template.format(*self.arguments, v=variable, item=item, items=items, label=self.source.label)


@dataclass(frozen=True)
class Pipeline:
    """The meaning of a request: a source, steps and a result."""

    source: Source
    steps: list[Bound]
    result: Bound

    @property
    def rows(self) -> list[Bound]:
        """The steps and the result."""
        return [*self.steps, self.result]

    @property
    def operations(self) -> tuple[str, ...]:
        """Names of the steps and of the result."""
        return tuple(bound.row.name for bound in self.rows)

    def check(self) -> dict[str, Any]:
        """What :func:`from_check` needs to make this pipeline again, as plain data."""
        *steps, result = ([bound.row.name, *bound.arguments] for bound in self.rows)
        return {"kind": "function", "source": self.source.name, "steps": steps, "result": result}


def bind(source: Source, operations: Sequence[tuple[Operation, Sequence[Any]]]) -> Pipeline:
    """A pipeline of these operations, the last of which is its result."""
    bound, kind = [], source.gives
    for row, arguments in operations:
        bound.append(Bound(row, tuple(arguments), kind, source))
        kind = row.after_type(kind)
    return Pipeline(source, bound[:-1], bound[-1])


def from_check(check: dict[str, Any]) -> Pipeline:
    """The pipeline of :meth:`Pipeline.check`. Raises ``KeyError`` for an operation or argument that does not exist."""
    source = SOURCE_BY_NAME[check["source"]]
    operations = [(STEP_BY_NAME[name], arguments) for name, *arguments in check["steps"]]
    operations.append((RESULT_BY_NAME[check["result"][0]], check["result"][1:]))
    for row, arguments in operations:
        if tuple(arguments) not in argument_choices(row.arguments, source):
            raise KeyError(f"{row.name} of {source.name} takes no {arguments}")
    return bind(source, operations)


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


def random_pipeline(rng: random.Random, length: int) -> Pipeline:
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
            kind = step.after_type(kind)
        results = [row for row in RESULTS if kind in row.takes]
        result = rng.choices(results, [COMMON_WEIGHT if row.name in COMMON else 1 for row in results])[0]
        if sensible(steps, result):
            rows = (*steps, result)
            return bind(source, [(row, rng.choice(argument_choices(row.arguments, source))) for row in rows])


def code(pipeline: Pipeline) -> str:
    """The one canonical function, named by its result, its steps from last to first, and its parameter."""
    source, variable = pipeline.source, pipeline.source.parameter
    phrases = [bound.fill(bound.row.asked[0]) for bound in pipeline.rows]
    opening = [source.opening_text] if source.opening else []
    noun = NOUNS[source.gives][1] if source.opening else source.parameter
    parts = [bound.fill(bound.row.part) for bound in reversed(pipeline.steps)]
    name = "_".join([pipeline.result.row.part, *parts, noun])
    lines = [f"def {name}({source.parameter}):", f'    """{sentence(chain(opening + phrases))}."""']
    if source.opening:
        lines += [f"    # {sentence(source.opening_text)}.", f"    result = {source.opening}"]
        variable = "result"
    for bound, phrase in zip(pipeline.steps, phrases, strict=False):
        lines += [f"    # {sentence(phrase)}.", f"    result = {bound.fill(bound.row.code, variable)}"]
        variable = "result"
    last = pipeline.result.fill(pipeline.result.row.code, variable).split("\n")
    lines += [f"    # {sentence(phrases[-1])}."]
    lines += [f"    {line}" for line in last] if len(last) > 1 else [f"    return {last[0]}"]
    return "\n".join(lines)


def answer(pipeline: Pipeline) -> str:
    """The one canonical answer: the function, and what it does."""
    opening = [pipeline.source.opening_text] if pipeline.source.opening else []
    phrases = opening + [bound.fill(bound.row.asked[0]) for bound in pipeline.rows]
    does = chain([third_person(phrase) for phrase in phrases])
    return fenced(code(pipeline), f"The function {does}. If nothing is left, it returns {pipeline.result.row.empty}.")


def request(pipeline: Pipeline, rng: random.Random) -> str:
    """One of the many ways to ask for the pipeline."""
    compact = _compact_form(pipeline, rng)
    direct = _direct_form(pipeline, rng)
    if direct and rng.random() < 0.4:
        text = _framed_verb(direct, rng)
    elif compact and rng.random() < 0.65:
        text = _framed_compact(pipeline, *compact, rng)
    else:
        text = _framed_steps(pipeline, rng)
    return as_typed(text, rng)


def _compact_form(pipeline: Pipeline, rng: random.Random) -> tuple[str, str] | None:
    """ "the squares of the even numbers in a list" and ", sorted ...", where word order leaves no doubt, else None.

    At most one filter before the noun, one after it, one map around it, in that order; an ordering only at the end.
    """
    result, source = pipeline.result, pipeline.source
    if not (result.row.noun and source.within) or result.arguments:
        return None
    stage, before, after, noun, tail = 0, "", "", "", ""
    for bound in pipeline.steps:
        row = bound.row
        if row.before and stage < 1:
            stage, before = 1, row.before + " "
        elif row.after and row.group != "order" and stage < 2:
            stage, after = 2, " " + bound.fill(row.after)
        elif row.noun and stage < 3:
            stage, noun = 3, bound.fill(row.noun) + " "
        elif row.after and row.group == "order" and stage < 4 and result.row.name == "items":
            stage, tail = 4, ", " + bound.fill(row.after)
        else:
            return None
    items = NOUNS[source.gives][1] if source.gives in NOUNS else source.items
    return f"{noun}the {before}{items}{after} {rng.choice(source.within)}", tail


def _direct_form(pipeline: Pipeline, rng: random.Random) -> str | None:
    """ "double each number in a list" for a single step whose result is the list, else None."""
    if len(pipeline.steps) != 1 or pipeline.result.row.name != "items" or not pipeline.source.within:
        return None
    step = pipeline.steps[0]
    fitting = [text for text in step.row.asked if "number" in text or "word" in text or "{item" in text]
    if step.row.group == "order" or not fitting:
        return None
    return f"{step.fill(rng.choice(fitting))} {rng.choice(pipeline.source.within)}"


def _framed_verb(phrase: str, rng: random.Random) -> str:
    """The imperative in a frame that needs no source."""
    return rng.choice(FRAMES["verb"]).format(b=phrase, B=sentence(phrase), t=third_person(phrase))


def _framed_compact(pipeline: Pipeline, what: str, tail: str, rng: random.Random) -> str:
    """The compact form in a frame for verbs or for nouns."""
    row = pipeline.result.row
    if row.name in VERBS and rng.random() < 0.5:
        return _framed_verb(f"{rng.choice(VERBS[row.name])} {what}{tail}", rng)
    if row.name == "count":
        what = what.removeprefix("the ")
    return rng.choice(FRAMES["compact"]).format(n=row.noun.format(x=what) + tail)


def _framed_steps(pipeline: Pipeline, rng: random.Random) -> str:
    """All steps and the result, one after another."""
    source = pipeline.source
    phrases = [rng.choice(source.opening_requests)] if source.opening_requests else []
    phrases += [bound.fill(rng.choice(bound.row.asked)) for bound in pipeline.rows]
    between, last = rng.choice(JOINTS)
    described = rng.choice(source.described)
    if rng.random() < 0.55:
        joined = chain([third_person(phrase) for phrase in phrases], between, last)
        frame = rng.choice(FRAMES["third"])
        if len(phrases) == 1:
            frame = frame.replace("{s}, {t}", "{s} and {t}")
        return frame.format(s=described, t=joined)
    joined = chain(phrases, between, last)
    return rng.choice(FRAMES["base"]).format(s=described, b=joined, B=sentence(joined))
