"""The toy tasks: one right answer a request, an honest split, a checker that cannot be hurt."""

import json
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from itertools import combinations, permutations

import pytest

from dflash.training.toy.tasks import (
    FUNCTION_SHARE,
    check_answer,
    check_answers,
    distinct_meanings,
    is_heldout_pair,
    sample,
    samples,
    split_of,
)
from dflash.training.toy.tasks.functions import STEPS
from dflash.training.toy.tasks.known import KNOWN
from dflash.training.toy.tasks.results import RESULTS
from dflash.training.toy.tasks.stories import DOMAINS

EVENTS = [event for domain in DOMAINS for event in (*domain.events, *(ending[0] for ending in domain.endings))]
OPERATIONS = [row.name for row in (*STEPS, *RESULTS, *EVENTS)]
SUM_OF_EVEN = {"kind": "function", "source": "numbers", "steps": [["even"]], "result": ["sum"]}
SUM_OF_EVEN_CODE = "def f(numbers):\n    return sum(n for n in numbers if n % 2 == 0)"


def test_operation_names_are_unique():
    names = [*OPERATIONS, *(row.name for row in KNOWN)]
    assert [name for name, number in Counter(names).items() if number > 1] == []


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_samples_depend_on_the_seed_only(split):
    first, again, other = (list(samples(seed, 60, split)) for seed in (5, 5, 6))
    assert first == again
    assert first != other
    assert len({drawn.prompt for drawn in first}) == 60


def test_samples_do_not_depend_on_the_hash_seed():
    program = (
        "from dflash.training.toy.tasks import samples; "
        "print([s.prompt + s.answer for split in ('train', 'heldout') for s in samples(3, 20, split)])"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "77")
    ]
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_every_generated_answer_passes_its_own_check(split):
    drawn = list(samples(11, 200, split))
    # The check survives a trip through JSON, as in a file of samples.
    verdicts = check_answers([(one.answer, json.loads(json.dumps(one.check))) for one in drawn])
    assert [(one, verdict) for one, verdict in zip(drawn, verdicts, strict=True) if not verdict.ok] == []


def test_every_known_function_passes_its_own_check():
    verdicts = check_answers([(row.answer(), {"kind": "known", "name": row.name}) for row in KNOWN])
    assert [verdict.reason for verdict in verdicts if not verdict.ok] == []


def test_equal_requests_have_equal_answers():
    answers = {}
    for drawn in samples(2, 1500, "train"):
        key = drawn.prompt.lower().rstrip(".?")
        assert answers.setdefault(key, drawn.answer) == drawn.answer, drawn.prompt


def test_a_problem_is_told_in_full():
    """A solution uses no number that neither the story nor an earlier line gives, but 2 and 3 (half, thrice)."""
    for drawn in samples(4, 300, "train"):
        if drawn.kind == "problem":
            known = {*re.findall(r"\d+", drawn.prompt), "2", "3"}
            for line in drawn.answer.split("\n"):
                for left, right, result in re.findall(r"(\d+) [-+*/] (\d+) = (\d+)", line):
                    assert {left, right} <= known
                    known.add(result)
                assert set(re.findall(r"\d+", line)) <= known, drawn


def test_arithmetic_in_solutions_is_right_and_small():
    for drawn in samples(9, 300, "heldout"):
        for left, sign, right, result in re.findall(
            r"(\d+) ([-+*/]) (\d+) = (\d+)", drawn.answer * (drawn.kind == "problem")
        ):
            a, b, c = int(left), int(right), int(result)
            assert {"+": a + b, "-": a - b, "*": a * b, "/": a / b}[sign] == c
            assert 0 <= c <= 150


def test_corrupted_answers_fail():
    drawn = list(samples(21, 100, "train"))
    broken = []
    for one in drawn:
        if one.kind == "problem":
            broken.append(re.sub(r"Answer: (\d+)", lambda m: f"Answer: {int(m.group(1)) + 1}", one.answer))
        else:
            broken.append(re.sub(r"return (.*)\n```", r"return [\1, 1]\n```", one.answer))
    verdicts = check_answers([(text, one.check) for text, one in zip(broken, drawn, strict=True)])
    assert [one.prompt for one, verdict in zip(drawn, verdicts, strict=True) if verdict.ok] == []
    assert all(verdict.reason and "\n" not in verdict.reason for verdict in verdicts)


def test_another_style_of_the_same_function_passes():
    assert check_answer(SUM_OF_EVEN_CODE, SUM_OF_EVEN).ok
    assert check_answer(f"Sure!\n```python\n{SUM_OF_EVEN_CODE}\n```\nDone.", SUM_OF_EVEN).ok
    assert not check_answer(SUM_OF_EVEN_CODE.replace("== 0", "== 1"), SUM_OF_EVEN).ok


@pytest.mark.parametrize(
    "text", ["", "I do not know.", "```python\n```", "def f(:", "x = 3", "```python\nprint(3)\n```"]
)
def test_text_without_a_function_fails(text):
    assert not check_answer(text, SUM_OF_EVEN).ok


@pytest.mark.parametrize(
    "text", ["27", "Answer: 28", "Answer: 27\nAnswer: 28", "Answer: twenty", "", "Answer: 2" * 900]
)
def test_wrong_numbers_fail(text):
    assert not check_answer(text, {"kind": "problem", "answer": 27}).ok


def test_the_last_answer_line_counts():
    assert check_answer("Answer: 3\nNo.\nAnswer: 27", {"kind": "problem", "answer": 27}).ok


@pytest.mark.parametrize(
    "body",
    [
        "import os",
        "return __import__('os').system('true')",
        "return numbers.__class__.__mro__",
        "return ().__class__.__bases__[0].__subclasses__()",
        "return open('/etc/passwd').read()",
        "return eval('1')",
        "return getattr(numbers, 'a' + 'b')",
        "return '{0.__class__}'.format(numbers)",
        "with numbers:\n        pass",
        "try:\n        pass\n    except:\n        pass",
        "global x",
        "yield 1",
    ],
)
def test_code_that_reaches_out_is_refused(body):
    assert not check_answer(f"def f(numbers):\n    {body}", SUM_OF_EVEN).ok


@pytest.mark.parametrize(
    "body",
    [
        "while True:\n        pass",
        "return [0] * 10 ** 12",
        "return 9 ** 9 ** 9",
        "return f(numbers)",
        "return ['a' * 10 ** 6] * 20",
        "return 10 ** 5000",
        "return {1.5: {(1, 2): 3}}",
    ],
)
def test_code_that_would_hang_or_swell_fails_alone(body):
    """The bad program costs only itself: its neighbours in the batch are judged."""
    start = time.monotonic()
    bad, good = f"def f(numbers):\n    {body}", SUM_OF_EVEN_CODE
    assert [verdict.ok for verdict in check_answers([(text, SUM_OF_EVEN) for text in (good, bad, good)])] == [
        True,
        False,
        True,
    ]
    assert time.monotonic() - start < 15


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_the_split_is_by_pair_of_operations(split):
    for drawn in samples(8, 300, split):
        heldout = any(is_heldout_pair(a, b) for a, b in combinations(drawn.operations, 2))
        assert heldout == (split == "heldout"), drawn
        assert split_of(drawn.operations) == split


def test_about_a_tenth_of_the_pairs_is_heldout_whatever_their_order():
    pairs = list(combinations(OPERATIONS, 2))
    assert all(is_heldout_pair(a, b) == is_heldout_pair(b, a) for a, b in pairs)
    assert 0.07 < sum(is_heldout_pair(a, b) for a, b in pairs) / len(pairs) < 0.11


def test_no_operation_is_starved_in_training():
    counts: Counter[str] = Counter()
    partners: dict[str, set[str]] = {name: set() for name in OPERATIONS}
    for drawn in samples(1, 4000, "train"):
        counts.update(drawn.operations)
        for a, b in permutations(drawn.operations, 2):
            partners[a].add(b)
    assert {name: counts[name] for name in OPERATIONS if counts[name] < 8} == {}
    # The smallest stories have seven kinds of events.
    assert {name: partners[name] for name in OPERATIONS if len(partners[name]) < 4} == {}


def test_over_a_million_requests_exist():
    assert distinct_meanings() > 1_000_000


def test_kinds_have_their_shares():
    rng = random.Random(0)
    kinds = Counter(sample(rng, "train").kind for _ in range(2000))
    assert abs(kinds["function"] / 2000 - FUNCTION_SHARE) < 0.04
