"""Small pieces of English that requests and answers share."""

import random
from collections.abc import Sequence

from .tables import table

FRAMES: dict[str, list[str]] = table("frames")


def sentence(text: str) -> str:
    """The text with a capital first letter."""
    return text[:1].upper() + text[1:]


def chain(phrases: Sequence[str], between: str = ", ", last: str = " and ") -> str:
    """The phrases as one part of a sentence."""
    return between.join(phrases[:-1]) + last + phrases[-1] if len(phrases) > 1 else phrases[0]


def third_person(phrase: str) -> str:
    """The imperative in the third person: "multiply each" gives "multiplies each".

    One kind of phrase has two verbs: "divide each number and drop the remainder".
    """
    verb, space, rest = phrase.partition(" ")
    if verb.endswith("y") and verb[-2] not in "aeiou":
        verb = verb[:-1] + "ies"
    else:
        verb += "es" if verb.endswith(("s", "sh", "ch", "x", "z")) else "s"
    return (verb + space + rest).replace(" and drop ", " and drops ")


def plural(noun: str) -> str:
    """ "apples", "boxes", "shelves"."""
    if noun in ("shelf", "scarf"):
        return noun[:-1] + "ves"
    return noun + ("es" if noun.endswith(("s", "x", "ch", "sh")) else "s")


def count(number: int, noun: str) -> str:
    """ "1 apple", "2 apples"."""
    return f"{number} {noun if number == 1 else plural(noun)}"


def as_typed(request: str, rng: random.Random) -> str:
    """The request, sometimes without its capital letter or its last sign."""
    if rng.random() < 0.2 and not request.startswith(("I ", "Python")):
        request = request[:1].lower() + request[1:]
    return request.rstrip(".?") if rng.random() < 0.2 else request


def fenced(code: str, closing: str) -> str:
    """An answer: code in a fence, then a sentence on it."""
    return f"```python\n{code}\n```\n{closing}"
