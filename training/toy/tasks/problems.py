"""Word problems about one changing quantity, drawn and solved one sentence per event.

Knows: the cast of a story, how events follow one another, the style of a solution.
Must not know: functions, which pairs are held out, how answers are checked.
"""
# ruff: noqa: E501 - a row of a table is one line

from __future__ import annotations

import random
from dataclasses import dataclass

from .stories import AGES_DOMAIN, DOMAIN_WEIGHTS, DOMAINS, LIMIT, MINUS, PLUS, TIMES, Event

PEOPLE = (("Maria", "She"), ("Tom", "He"), ("Anna", "She"), ("Ben", "He"), ("Lucy", "She"), ("Omar", "He"), ("Nina", "She"), ("Carl", "He"),
          ("Sara", "She"), ("Leo", "He"), ("Emma", "She"), ("Jack", "He"), ("Zoe", "She"), ("Ravi", "He"), ("Kim", "She"), ("Paul", "He"),
          ("Ella", "She"), ("Sam", "He"), ("Mei", "She"), ("Hugo", "He"), ("Rosa", "She"), ("Ivan", "He"), ("Lena", "She"), ("Noah", "He"))  # fmt: skip
FRIENDS = ("Alice", "David", "Clara", "Peter", "Julia", "Mark", "Olga", "Felix")
THINGS = ("apple", "pear", "orange", "lemon", "plum", "cookie", "marble", "sticker", "pencil", "card", "shell", "stamp", "coin", "button", "bead",
          "book", "candle", "flower", "egg", "nut", "toy", "balloon", "stone", "muffin", "carrot", "onion", "ribbon", "crayon", "badge", "postcard")  # fmt: skip
PACKS = ("bag", "box", "pack", "basket", "jar", "crate")
SHELVES = ("shelf", "table", "drawer", "bowl", "row")
PLACES = ("in the park", "at school", "on the beach", "in the garden", "at the market", "on the bus", "in the street")
GOODS = ("pen", "cup", "ball", "book", "shirt", "plant", "lamp", "hat", "scarf", "plate", "kite", "mug")
JOBS = ("washing cars", "walking dogs", "cutting grass", "babysitting", "selling lemonade", "feeding cats")


def count(number: int, noun: str) -> str:
    """ "1 apple", "2 apples"."""
    return f"{number} {noun if number == 1 else plural(noun)}"


def plural(noun: str) -> str:
    """ "apples", "boxes", "shelves"."""
    if noun in ("shelf", "scarf"):
        return noun[:-1] + "ves"
    return noun + ("es" if noun.endswith(("s", "x", "ch", "sh")) else "s")


@dataclass(frozen=True)
class Scene:
    """Who acts, on what, where: drawn once for a problem."""

    name: str
    pronoun: str
    friend: str
    thing: str
    pack: str
    shelf: str
    place: str
    good: str
    job: str

    def words(self) -> dict[str, str]:
        return {"name": self.name, "she": self.pronoun, "lower": self.pronoun.lower(), "her": "her" if self.pronoun == "She" else "his",
                "friend": self.friend, "thing": self.thing, "things": plural(self.thing), "pack": self.pack, "packs": plural(self.pack), "shelf": self.shelf,
                "shelves": plural(self.shelf), "place": self.place, "good": self.good, "goods": plural(self.good), "job": self.job}  # fmt: skip


LEADS = (
    "",
    "",
    "",
    "",
    "",
    "Solve this: ",
    "Please solve this problem: ",
    "Solve step by step: ",
    "Help me with this: ",
    "A problem: ",
    "Word problem: ",
)


def compute(symbol: str, left: int, right: int) -> int:
    """One exact step of arithmetic."""
    if symbol == PLUS:
        return left + right
    if symbol == MINUS:
        return left - right
    return left * right if symbol == TIMES else left // right


def calculation(event: Event, total: int, a: int, b: int) -> tuple[str, int]:
    """ "3 * 6 = 18 and 14 + 18 = 32", with the result."""
    texts, previous = [], 0
    for symbol, left, right in event.sums:
        known = {"t": total, "a": a, "b": b, "=": previous, "2": 2, "3": 3}
        x, y = known[left], known[right]
        previous = compute(symbol, x, y)
        texts.append(f"{x} {symbol} {y} = {previous}")
    return " and ".join(texts), previous


def draw_scene(rng: random.Random) -> Scene:
    """A random cast."""
    name, pronoun = rng.choice(PEOPLE)
    return Scene(
        name,
        pronoun,
        rng.choice(FRIENDS),
        rng.choice(THINGS),
        rng.choice(PACKS),
        rng.choice(SHELVES),
        rng.choice(PLACES),
        rng.choice(GOODS),
        rng.choice(JOBS),
    )


@dataclass(frozen=True)
class Problem:
    """A story with its question, the solution, and the number it ends on."""

    prompt: str
    answer: str
    value: int
    operations: tuple[str, ...]


def draw_problem(rng: random.Random, length: int) -> Problem:
    """A random problem with this many events after the opening, an ending event included."""
    while True:
        problem = _try_problem(rng, length)
        if problem is not None:
            return problem


def _try_problem(rng: random.Random, length: int) -> Problem | None:
    """One attempt; None when the numbers do not work out."""
    domain = rng.choices(DOMAINS, DOMAIN_WEIGHTS)[0]
    scene = draw_scene(rng)
    words = scene.words()
    words["her_start"] = words["her"].capitalize()
    words["lower_object"] = "her" if scene.pronoun == "She" else "him"
    chain = [scene.name, *rng.sample(FRIENDS, 4)]
    ending = rng.choice(domain.endings) if length > 1 and rng.random() < 0.4 else None
    middle = rng.sample(domain.events, length - (ending is not None))
    total = rng.randint(*domain.first)
    story: list[str] = []
    steps: list[str] = []

    def noun(number: int, unit: str) -> str:
        return count(number, unit.format(**words))

    words["s"] = noun(total, domain.unit)
    story.append(rng.choice(domain.openings).format(t=total, **words))
    steps.append(domain.start.format(**words))
    for index, event in enumerate([*middle, *([ending[0]] if ending else [])]):
        closing = ending is not None and index == len(middle)
        choices = event.numbers(total)
        if not choices:
            return None
        a, b = rng.choice(choices)
        if closing and domain is AGES_DOMAIN:
            p, q = chain[index], chain[index]
        else:
            p, q = chain[min(index + 1, 4)], chain[min(index, 4)]
        facts = dict(words, p=p, q=q, a=a, b=b)
        story.append(_sentence(rng.choice(event.tellings).format(**facts)))
        text, total = calculation(event, total, a, b)
        unit = ending[2] if closing and ending else domain.unit
        facts["r"] = noun(total, unit)
        steps.append(
            f"{_sentence(event.tellings[0].format(**facts))[:-1]}: {text}. {_sentence(event.now.format(**facts))}"
        )
        words["p"] = p
    question = rng.choice(ending[1] if ending else domain.questions).format(**words)
    if total > LIMIT:
        return None
    result = noun(total, ending[2] if ending else domain.unit)
    prompt = rng.choice(LEADS) + " ".join([*story, question])
    operations = tuple(event.name for event in middle) + ((ending[0].name,) if ending else ())
    return Problem(prompt, "\n".join([*steps, f"So the answer is {result}.", f"Answer: {total}"]), total, operations)


def _sentence(text: str) -> str:
    text = text[:1].upper() + text[1:]
    return text if text.endswith(".") else text + "."
