"""Where a pipeline starts: the parameter of the function, how users describe it, random inputs for tests.

Knows: types, parameter names and argument ranges. Must not know: operations, framing, splits.
"""
# ruff: noqa: E501 - a row of a table is one line

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

NAMES = (
    "Ada",
    "Ben",
    "Clara",
    "David",
    "Emma",
    "Finn",
    "Grace",
    "Hugo",
    "Ivy",
    "Jack",
    "Kate",
    "Leo",
    "Mia",
    "Noah",
    "Olga",
    "Paul",
)
WORDS = ("apple", "Banana", "cat", "level", "noon", "river", "Stone", "tea", "yellow", "dog", "civic", "moon", "green", "sky", "an",
         "elephant", "sun", "garden", "Queen", "ox", "kite", "jam", "vivid", "umbrella", "zoo", "window", "rotor", "hat", "deed", "paper")  # fmt: skip
LETTERS = "abcdefghiklmnoprstw"
NOUNS = {
    "numbers": ("number", "numbers"),
    "words": ("word", "words"),
    "characters": ("character", "characters"),
    "pairs": ("entry", "entries"),
}


@dataclass(frozen=True)
class Source:
    """One kind of input. `opening` is the code that turns it into `gives`, "" when it already is.

    `within` completes the compact form ("the sum of the even numbers in a list").
    `fields` belong to records: the label first, then number fields with their range, then text fields.
    """

    name: str
    gives: str
    parameter: str
    described: tuple[str, ...]
    within: tuple[str, ...]
    opening: str = ""
    opening_text: str = ""
    opening_requests: tuple[str, ...] = ()
    item: str = ""
    items: str = ""
    label: str = ""
    number_fields: tuple[tuple[str, int, int], ...] = ()
    text_fields: tuple[tuple[str, tuple[str, ...]], ...] = ()


SOURCES = (
    Source("numbers", "numbers", "numbers", ("a list of numbers", "a list of integers", "some numbers", "a list of whole numbers", "numbers in a list"),
           ("in a list", "in a list of numbers", "of a list of numbers", "in a given list")),
    Source("range", "numbers", "n", ("the numbers from 1 to n", "all numbers from 1 to n", "the integers from 1 to n", "the numbers 1 to n"),
           ("from 1 to n", "between 1 and n"), "list(range(1, n + 1))", "take the numbers from 1 to n"),
    Source("words", "words", "words", ("a list of words", "a list of strings", "some words", "words in a list"),
           ("in a list", "in a list of words", "of a list of words", "in a given list")),
    Source("text", "words", "text", ("a text", "a sentence", "a string"),
           ("in a text", "in a sentence", "of a text", "of a sentence"), "text.split()", "split the text into words", ("split it into words", "split the text into words", "take its words")),
    Source("characters", "characters", "text", ("a string", "a text", "the characters of a string", "a string of characters"), (),
           "list(text)", "split the text into characters"),
    Source("scores", "pairs", "scores", ("a dictionary of scores", "a dictionary from names to scores", "a dict of names and scores"), ()),
    Source("ages", "pairs", "ages", ("a dictionary of ages", "a dictionary from names to ages", "a dict of names and ages"), ()),
    Source("prices", "pairs", "prices", ("a dictionary of prices", "a dictionary from names to prices", "a dict of names and prices"), ()),
    Source("people", "records", "people", ("a list of people", "a list of people with name, age and city", "people with a name, an age and a city"),
           ("in a list", "in a list of people"), item="person", items="people", label="name", number_fields=(("age", 5, 80),),
           text_fields=(("city", ("Paris", "Rome", "London", "Oslo", "Madrid", "Berlin")),)),
    Source("products", "records", "products", ("a list of products", "a list of products with name, price and stock", "products with a name, a price and a stock"),
           ("in a list", "in a list of products"), item="product", items="products", label="name", number_fields=(("price", 2, 90), ("stock", 1, 50))),
    Source("books", "records", "books", ("a list of books", "a list of books with title, pages and year", "books with a title, pages and a year"),
           ("in a list", "in a list of books"), item="book", items="books", label="title", number_fields=(("pages", 50, 600), ("year", 1950, 2020))),
    Source("students", "records", "students", ("a list of students", "a list of students with name, grade and class", "students with a name, a grade and a class"),
           ("in a list", "in a list of students"), item="student", items="students", label="name", number_fields=(("grade", 1, 20),),
           text_fields=(("class", ("A", "B", "C", "D")),)),
    Source("cities", "records", "cities", ("a list of cities", "a list of cities with name, size and country", "cities with a name, a size and a country"),
           ("in a list", "in a list of cities"), item="city", items="cities", label="name", number_fields=(("size", 10, 90),),
           text_fields=(("country", ("Italy", "France", "Spain", "Norway", "Japan")),)),
)  # fmt: skip
SOURCE_BY_NAME = {source.name: source for source in SOURCES}


def argument_choices(kind: str, source: Source) -> list[tuple[Any, ...]]:
    """Every argument tuple an operation of this argument kind can take on this source."""
    ranges = {
        "threshold": (2, 20),
        "divisor": (3, 9),
        "digit": (0, 9),
        "factor": (4, 10),
        "amount": (1, 10),
        "few": (2, 5),
        "size": (2, 7),
    }
    if kind in ranges:
        low, high = ranges[kind]
        return [(value,) for value in range(low, high + 1)]
    if kind == "letter":
        return [(letter,) for letter in LETTERS]
    if kind == "capital":
        return [(letter.upper(),) for letter in LETTERS]
    if kind == "mark":
        return [(mark,) for mark in ("!", "?", ".", "-", "*", "#", "x", "s")]
    if kind == "field":
        return [(field,) for field, _, _ in source.number_fields]
    if kind == "field number":
        return [(field, value) for field, low, high in source.number_fields for value in range(low, high + 1)
                if high - low < 100 or value % 10 == 0]  # fmt: skip
    if kind == "field text":
        return [(field, value) for field, values in source.text_fields for value in values]
    return [()]


def random_input(source: Source, rng: random.Random) -> Any:
    """One input for the function, empty about one time in eight, short or long enough to survive filters."""
    size = 0 if rng.random() < 0.12 else rng.randint(1, rng.choice((9, 30)))
    if source.name == "numbers":
        return [rng.choice((rng.randint(-30, 40), rng.randint(0, 12))) for _ in range(size)]
    if source.name == "range":
        return size if rng.random() < 0.3 else size * 4
    if source.gives == "words":
        letters = ["".join(rng.choices(LETTERS, k=rng.randint(1, 8))) for _ in range(size)]
        words = [rng.choice((rng.choice(WORDS), word)) for word in letters]
        return words if source.name == "words" else " ".join(words)
    if source.gives == "characters":
        return "".join(rng.choices("abcdeimnorst AEIRT 0123456789 !", k=size * 3))
    names = rng.sample(NAMES, k=min(size, len(NAMES)))
    if source.gives == "pairs":
        return {name: rng.randint(0, 30) for name in names}
    return [
        {source.label: name}
        | {field: rng.randint(low, high) for field, low, high in source.number_fields}
        | {field: rng.choice(values) for field, values in source.text_fields}
        for name in names
    ]
