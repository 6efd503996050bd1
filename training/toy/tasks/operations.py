"""The table form of one operation, and the operations on numbers and on any sequence.

Knows: what an operation means (a reference callable), how users ask for it, and the one way an answer
writes it. Must not know: how requests are framed, how a pipeline is drawn, or which pairs are held out.

Texts are `str.format` templates: `{v}` the variable holding the input, `{item}` and `{items}` the
nouns of the current type ("word", "words"), `{0}`, `{1}` the arguments.
"""
# ruff: noqa: E501 - a row of a table is one line

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SEQUENCES = ("numbers", "words", "characters")


@dataclass(frozen=True)
class Operation:
    """One row: a step of a pipeline, or its final result.

    `phrasings` are imperatives; the first is the canonical one, which the answer repeats.
    `before`, `after`, `noun` are the compact forms ("even" numbers, numbers "divisible by 3",
    "the squares of" the numbers); an empty one means that the row has no such form.
    At most one operation of a `group` appears in a pipeline. `ordered` marks a result that depends
    on the order of its input; `empty` is what a result is when nothing is left.
    """

    name: str
    takes: tuple[str, ...]
    gives: str
    group: str
    phrasings: tuple[str, ...]
    code: str
    part: str
    apply: Callable[..., Any]
    arguments: str = ""
    before: str = ""
    after: str = ""
    noun: str = ""
    ordered: bool = False
    empty: str = ""


def _keep(
    name: str,
    group: str,
    phrasings: tuple[str, ...],
    test: str,
    part: str,
    apply: Callable[..., bool],
    arguments: str = "",
    before: str = "",
    after: str = "",
) -> Operation:
    """A filter on numbers: `test` is the condition in code, `apply` the same as a predicate."""
    return Operation(
        name, ("numbers",), "numbers", group, phrasings,
        "[number for number in {v} if " + test + "]", part,
        lambda values, *a: [x for x in values if apply(x, *a)], arguments, before, after,
    )  # fmt: skip


def _each(
    name: str,
    group: str,
    phrasings: tuple[str, ...],
    expression: str,
    part: str,
    apply: Callable[..., Any],
    arguments: str = "",
    noun: str = "",
    gives: str = "numbers",
) -> Operation:
    """A map over numbers."""
    return Operation(
        name, ("numbers",), gives, group, phrasings,
        "[" + expression + " for number in {v}]", part,
        lambda values, *a: [apply(x, *a) for x in values], arguments, "", "", noun,
    )  # fmt: skip


NUMBER_FILTERS = (
    _keep("even", "parity", ("keep the even numbers", "keep only the even numbers", "keep the even ones",
          "select the even numbers", "filter out the odd numbers", "drop the odd numbers", "pick the even numbers"),
          "number % 2 == 0", "even", lambda x: x % 2 == 0, before="even"),
    _keep("odd", "parity", ("keep the odd numbers", "keep only the odd numbers", "keep the odd ones",
          "select the odd numbers", "filter out the even numbers", "drop the even numbers", "pick the odd numbers"),
          "number % 2 == 1", "odd", lambda x: x % 2 == 1, before="odd"),
    _keep("positive", "sign", ("keep the positive numbers", "keep only the positive numbers",
          "keep the positive ones", "select the positive numbers", "keep the numbers above zero"),
          "number > 0", "positive", lambda x: x > 0, before="positive"),
    _keep("negative", "sign", ("keep the negative numbers", "keep only the negative numbers",
          "keep the negative ones", "select the negative numbers", "keep the numbers below zero"),
          "number < 0", "negative", lambda x: x < 0, before="negative"),
    _keep("not_zero", "sign", ("drop the zeros", "remove the zeros", "remove all zeros", "filter out the zeros",
          "throw away the zeros"),
          "number != 0", "nonzero", lambda x: x != 0, before="nonzero"),
    _keep("greater_than", "lower bound", ("keep the numbers greater than {0}", "keep the numbers above {0}",
          "keep only the numbers larger than {0}", "select the numbers greater than {0}",
          "keep the numbers over {0}", "keep numbers bigger than {0}"),
          "number > {0}", "large", lambda x, a: x > a, "threshold", after="greater than {0}"),
    _keep("at_least", "lower bound", ("keep the numbers that are at least {0}", "keep the numbers of at least {0}",
          "remove the numbers below {0}", "drop the numbers smaller than {0}", "keep the numbers from {0} up"),
          "number >= {0}", "big", lambda x, a: x >= a, "threshold", after="that are at least {0}"),
    _keep("smaller_than", "upper bound", ("keep the numbers smaller than {0}", "keep the numbers below {0}",
          "keep only the numbers less than {0}", "select the numbers smaller than {0}",
          "keep the numbers under {0}", "keep numbers less than {0}"),
          "number < {0}", "small", lambda x, a: x < a, "threshold", after="smaller than {0}"),
    _keep("at_most", "upper bound", ("keep the numbers that are at most {0}", "keep the numbers up to {0}",
          "remove the numbers above {0}", "drop the numbers greater than {0}", "drop the numbers over {0}"),
          "number <= {0}", "limited", lambda x, a: x <= a, "threshold", after="that are at most {0}"),
    _keep("divisible", "divisor", ("keep the numbers divisible by {0}", "keep only the numbers divisible by {0}",
          "keep the multiples of {0}", "select the multiples of {0}", "pick the numbers divisible by {0}"),
          "number % {0} == 0", "divisible", lambda x, a: x % a == 0, "divisor", after="divisible by {0}"),
    _keep("not_divisible", "divisor", ("drop the numbers divisible by {0}", "remove the multiples of {0}",
          "keep the numbers not divisible by {0}", "remove the numbers divisible by {0}", "skip the multiples of {0}"),
          "number % {0} != 0", "indivisible", lambda x, a: x % a != 0, "divisor", after="not divisible by {0}"),
    _keep("ends_in", "digit", ("keep the numbers ending in {0}", "keep the numbers that end in {0}",
          "select the numbers ending with {0}", "keep only the numbers whose last digit is {0}"),
          "abs(number) % 10 == {0}", "ending", lambda x, a: abs(x) % 10 == a, "digit", after="ending in {0}"),
)  # fmt: skip

NUMBER_MAPS = (
    _each("square", "power", ("square each number", "square every number", "square them", "square all of them",
          "square all the numbers"), "number ** 2", "squared", lambda x: x**2, noun="the squares of"),
    _each("cube", "power", ("cube each number", "cube every number", "cube them", "cube all the numbers",
          "raise each number to the power of 3"), "number ** 3", "cubed", lambda x: x**3, noun="the cubes of"),
    _each("double", "scale", ("double each number", "double every number", "double them", "double all the numbers",
          "multiply each number by 2"), "number * 2", "doubled", lambda x: x * 2, noun="the doubles of"),
    _each("triple", "scale", ("triple each number", "triple every number", "triple them", "triple all the numbers",
          "multiply each number by 3"), "number * 3", "tripled", lambda x: x * 3, noun="the triples of"),
    _each("multiply", "scale", ("multiply each number by {0}", "multiply every number by {0}", "multiply them by {0}",
          "multiply all the numbers by {0}"), "number * {0}", "multiplied", lambda x, a: x * a, "factor"),
    _each("halve", "scale", ("halve each number with whole division", "halve every number with whole division",
          "divide each number by 2 and drop the remainder", "divide each number by 2 with whole division"),
          "number // 2", "halved", lambda x: x // 2),
    _each("add", "shift", ("add {0} to each number", "add {0} to every number", "add {0} to each of them",
          "increase each number by {0}", "increase all the numbers by {0}"),
          "number + {0}", "increased", lambda x, a: x + a, "amount"),
    _each("subtract", "shift", ("subtract {0} from each number", "subtract {0} from every number",
          "take {0} away from each number", "decrease each number by {0}", "decrease all the numbers by {0}"),
          "number - {0}", "decreased", lambda x, a: x - a, "amount"),
    _each("negate", "negate", ("negate each number", "negate every number", "negate them",
          "flip the sign of each number", "change the sign of each number"),
          "-number", "negated", lambda x: -x, noun="the negatives of"),
    _each("absolute", "absolute", ("take the absolute value of each number", "take absolute values",
          "take the absolute value of every number", "make each number absolute", "drop the sign of each number"),
          "abs(number)", "absolute", abs, noun="the absolute values of"),
    _each("remainder", "remainder", ("take the remainder of each number divided by {0}",
          "take each number modulo {0}", "take every number modulo {0}", "compute each number modulo {0}"),
          "number % {0}", "reduced", lambda x, a: x % a, "divisor"),
    _each("cap", "cap", ("cap each number at {0}", "cap every number at {0}", "limit each number to at most {0}",
          "cap the numbers at {0}"), "min(number, {0})", "capped", lambda x, a: min(x, a), "threshold"),
    _each("to_text", "to text", ("turn each number into a string", "convert each number to a string",
          "convert the numbers to strings", "make each number a string", "change every number into a string"),
          "str(number)", "printed", str, gives="words"),
)  # fmt: skip

SORTS = (
    Operation("sort_up", ("numbers",), "numbers", "order", ("sort the numbers in ascending order",
              "sort the numbers", "sort them in ascending order", "sort them from smallest to largest",
              "order the numbers from smallest to largest", "put the numbers in ascending order"),
              "sorted({v})", "sorted", sorted, after="sorted in ascending order"),
    Operation("sort_down", ("numbers",), "numbers", "order", ("sort the numbers in descending order",
              "sort them in descending order", "sort them from largest to smallest",
              "order the numbers from largest to smallest", "put the numbers in descending order"),
              "sorted({v}, reverse=True)", "descending", lambda v: sorted(v, reverse=True),
              after="sorted in descending order"),
)  # fmt: skip

SEQUENCE_STEPS = (
    Operation("reverse", (*SEQUENCES, "records"), "same", "order", ("reverse the order of the {items}",
              "reverse the list", "put the {items} in reverse order", "flip the order of the {items}",
              "reverse their order"), "{v}[::-1]", "reversed", lambda v: v[::-1], after="in reverse order"),
    Operation("unique", SEQUENCES, "same", "unique", ("remove the duplicate {items}", "remove duplicates",
              "drop the duplicates", "remove repeated {items}", "keep each {item} only once", "get rid of duplicates"),
              "list(dict.fromkeys({v}))", "unique", lambda v: list(dict.fromkeys(v)), before="unique"),
    Operation("first_n", (*SEQUENCES, "records"), "same", "slice", ("keep the first {0} {items}", "take the first {0} {items}",
              "keep only the first {0}", "take the first {0}", "pick the first {0} {items}"),
              "{v}[:{0}]", "first", lambda v, a: v[:a], "few"),
    Operation("last_n", (*SEQUENCES, "records"), "same", "slice", ("keep the last {0} {items}", "take the last {0} {items}",
              "keep only the last {0}", "take the last {0}", "pick the last {0} {items}"),
              "{v}[-{0}:]", "last", lambda v, a: v[-a:], "few"),
    Operation("skip_first", (*SEQUENCES, "records"), "same", "slice", ("skip the first {0} {items}",
              "drop the first {0} {items}", "remove the first {0} {items}", "skip the first {0}", "ignore the first {0} {items}"),
              "{v}[{0}:]", "remaining", lambda v, a: v[a:], "few"),
    Operation("skip_last", (*SEQUENCES, "records"), "same", "slice", ("drop the last {0} {items}",
              "skip the last {0} {items}", "remove the last {0} {items}", "drop the last {0}", "ignore the last {0} {items}"),
              "{v}[:-{0}]", "leading", lambda v, a: v[:-a], "few"),
    Operation("every_other", SEQUENCES, "same", "stride", ("take every second {item}", "keep every second {item}",
              "pick every second {item}", "take every other {item}", "keep every other {item}"),
              "{v}[::2]", "alternate", lambda v: v[::2]),
)  # fmt: skip
