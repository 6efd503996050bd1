"""The toy tasks: one right answer a request, an honest split, a checker that cannot be hurt."""

import hashlib
import json
import re
import resource
import subprocess
import sys
from itertools import combinations

import pytest

from dflash.core.errors import DFlashError
from dflash.evaluation import HELDOUT
from dflash.evaluation.checks import check_answers as check_by_kind
from dflash.training.toy.tasks import (
    check_answers,
    is_heldout_pair,
    samples,
    split_of,
)
from dflash.training.toy.tasks.__main__ import main
from dflash.training.toy.tasks.known import KNOWN
from dflash.training.toy.tasks.sandbox import may_run, run_programs

SUM_OF_EVEN = {"kind": "function", "source": "numbers", "steps": [["even"]], "result": ["sum"]}
SUM_OF_EVEN_CODE = "def f(numbers):\n    return sum(n for n in numbers if n % 2 == 0)"


def test_requests_are_those_that_the_bundled_pair_was_made_with(monkeypatch, capsys):
    """So what they are like cannot change either: shares, wordings, calculations."""
    monkeypatch.setattr(sys, "argv", ["tasks", *"heldout 100 --seed 2026".split()])
    main()
    assert capsys.readouterr().out == HELDOUT.read_text()
    monkeypatch.setenv("PYTHONHASHSEED", "77")
    command = [sys.executable, "-m", "dflash.training.toy.tasks", *"train 300 --seed 2".split()]
    made = subprocess.run(command, capture_output=True, check=True).stdout
    assert hashlib.sha256(made).hexdigest() == "062929173cd66428a52b707ddf75c2583ac510eca36b92cc57009aab21d94112"


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_every_generated_answer_passes_its_own_check(split):
    generated = [(one.answer, one.check) for one in samples(11, 120, split)]
    generated += [(row.answer(), {"kind": "known", "name": row.name}) for row in KNOWN if split == "train"]
    right = check_answers(json.loads(json.dumps(generated)))  # checks come from files of JSON lines
    assert [one for one, ok in zip(generated, right, strict=True) if not ok] == []


def test_corrupted_answers_fail():
    chosen = list(samples(21, 60, "train"))
    broken = [re.sub(r"return (.*)\n```", r"return [\1, 1]\n```", one.answer) for one in chosen]
    broken = [re.sub(r"Answer: (\d+)", lambda found: f"Answer: {int(found[1]) + 1}", text) for text in broken]
    assert not any(check_answers([(text, one.check) for text, one in zip(broken, chosen, strict=True)]))


@pytest.mark.parametrize(
    ("text", "check", "ok"),
    [
        (SUM_OF_EVEN_CODE, SUM_OF_EVEN, True),
        (f"Sure!\n```python\n{SUM_OF_EVEN_CODE}\n```\nDone.", SUM_OF_EVEN, True),
        (SUM_OF_EVEN_CODE.replace("== 0", "== 1"), SUM_OF_EVEN, False),
        ("def f(n):\n    return n % 2 == 0", {"kind": "known", "name": "is_even"}, True),
        ("def f(n):\n    return 1 - n % 2", {"kind": "known", "name": "is_even"}, False),  # a number is no truth value
        *((text, SUM_OF_EVEN, False) for text in ("", "I do not know.", "```python\n```", "def f(:", "x = 3")),
        ("```python\nprint(3)\n```", SUM_OF_EVEN, False),
        ("Answer: 3\nNo.\nAnswer: 27", {"kind": "problem", "answer": 27}, True),  # the last line counts
        *((text, {"kind": "problem", "answer": 27}, False) for text in ("27", "Answer: 28", "Answer: twenty", "")),
        ("Answer: 27\nAnswer: 28", {"kind": "problem", "answer": 27}, False),
        ("Answer: 2" * 900, {"kind": "problem", "answer": 27}, False),
    ],
)
def test_an_answer_is_judged_by_what_it_computes(text, check, ok):
    assert check_answers([(text, check)]) == [ok]


@pytest.mark.parametrize(
    "check",
    [
        {"kind": "known", "name": "nothing"},
        SUM_OF_EVEN | {"steps": [["nothing"]]},
        SUM_OF_EVEN | {"steps": [["greater_than"]]},
        SUM_OF_EVEN | {"steps": [["greater_than", "exit()"]]},  # never becomes code
        {"kind": "function"},
    ],
)
def test_a_check_of_no_known_request_is_refused(check):
    with pytest.raises(DFlashError, match="check"):
        check_by_kind([(SUM_OF_EVEN_CODE, check)])


REACHING_OUT = [
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
]


def test_code_that_reaches_out_is_refused():
    codes = {body: f"def f(numbers):\n    {body}" for body in REACHING_OUT}
    assert not any(check_answers([(code, SUM_OF_EVEN) for code in codes.values()]))
    of_allowed_syntax = [body for body, code in codes.items() if may_run(code)]
    assert of_allowed_syntax == ["return eval('1')", "return getattr(numbers, 'a' + 'b')"]
    assert run_programs([(codes[body], [[[1]]]) for body in of_allowed_syntax]) == [None, None]


HARMFUL = [
    "return [0] * 10 ** 12",
    "return 9 ** 9 ** 9",  # one operation
    "return f(numbers)",
    "return ['a' * 10 ** 5]",
    "return 10 ** 5000",
    "return {1.5: {(1, 2): 3}}",
]


def test_code_that_would_hang_or_swell_fails_alone():
    """A bad program costs only itself, and no more than its time: those after it are judged."""
    texts = [SUM_OF_EVEN_CODE]
    for body in HARMFUL:
        texts += [f"def f(numbers):\n    {body}", SUM_OF_EVEN_CODE]
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    assert check_answers([(text, SUM_OF_EVEN) for text in texts]) == [True, *[False, True] * len(HARMFUL)]
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < len(HARMFUL)
    assert run_programs([("def f(n):\n    return len('aaaaaa' * 10 ** 8)", [[1]])]) == [None], "600 MB are too many"


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_the_split_is_by_pair_of_operations(split):
    for one in samples(8, 300, split):
        heldout = any(is_heldout_pair(a, b) for a, b in combinations(one.operations, 2))
        assert heldout == (split == "heldout") == (split_of(one.operations) == "heldout"), one
