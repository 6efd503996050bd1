"""Word problems about one changing quantity: a random story, and its solution with one sentence per event."""

from __future__ import annotations

import random
from dataclasses import dataclass

from .stories import DOMAINS, LIMIT, Domain
from .tables import table
from .wording import count, plural, sentence

CAST = table("cast")


@dataclass(frozen=True)
class Problem:
    """A story with its question, the solution, and the number that it ends on."""

    prompt: str
    answer: str
    value: int
    operations: tuple[str, ...]


def random_problem(rng: random.Random, length: int) -> Problem:
    """A random problem with this many events after the opening, the one that ends it included."""
    while True:
        problem = _try_problem(rng, length)
        if problem is not None:
            return problem


def _random_cast(rng: random.Random) -> dict[str, str]:
    """The words of a problem: who acts, on what, where."""
    name, pronoun = rng.choice(CAST["person"])
    words = {key: rng.choice(CAST[key]) for key in ("friend", "thing", "pack", "shelf", "place", "good", "job")}
    several = {plural(key): plural(words[key]) for key in ("thing", "pack", "shelf", "good")}
    her, him = ("her", "her") if pronoun == "She" else ("his", "him")
    pronouns = {"she": pronoun, "lower": pronoun.lower(), "lower_object": him, "her": her, "her_start": sentence(her)}
    return words | several | pronouns | {"name": name}


def _try_problem(rng: random.Random, length: int) -> Problem | None:
    """One attempt; None when the numbers do not work out."""
    domain: Domain = rng.choices(DOMAINS, [domain.weight for domain in DOMAINS])[0]
    words = _random_cast(rng)
    people = [words["name"], *rng.sample(CAST["friend"], 4)]
    ending = rng.choice(domain.endings) if length > 1 and rng.random() < 0.4 else None
    middle = rng.sample(domain.events, length - (ending is not None))
    events = [*middle, ending] if ending else middle
    total = rng.randint(*domain.first)
    words["s"] = count(total, domain.unit.format(**words))
    story = [rng.choice(domain.openings).format(t=total, **words)]
    steps = [domain.start.format(**words)]
    for index, event in enumerate(events):
        choices = event.numbers(total)
        if not choices:
            return None
        a, b = rng.choice(choices)
        # In a story about ages each event is about the next person; its end is about the last one.
        p, q = people[min(index + 1, 4)], people[min(index, 4)]
        if event is ending and domain.name == "ages":
            p = q = people[index]
        facts = words | {"p": p, "q": q, "a": str(a), "b": str(b)}
        story.append(_full_sentence(rng.choice(event.told).format(**facts)))
        calculation, total = event.calculation(total, a, b)
        facts["r"] = count(total, event.unit.format(**words))
        told = _full_sentence(event.told[0].format(**facts))
        steps.append(f"{told[:-1]}: {calculation}. {_full_sentence(event.now.format(**facts))}")
        words["p"] = p
    question = rng.choice(ending.questions if ending else domain.questions).format(**words)
    if total > LIMIT:
        return None
    result = count(total, events[-1].unit.format(**words))
    prompt = rng.choice(CAST["lead"]) + " ".join([*story, question])
    answer = "\n".join([*steps, f"So the answer is {result}.", f"Answer: {total}"])
    return Problem(prompt, answer, total, tuple(event.name for event in events))


def _full_sentence(text: str) -> str:
    text = sentence(text)
    return text if text.endswith(".") else text + "."
