"""The steps and results that a pipeline is made of: rows of ``tables/steps.yaml`` and ``tables/results.yaml``.

In their templates ``{v}`` is the variable holding the input, ``{item}`` and ``{items}`` the nouns of the current type
("word", "words"), and ``{0}``, ``{1}`` the arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .tables import table

KEEP = {
    "numbers": "[number for number in {{v}} if {}]",
    "words": "[word for word in {{v}} if {}]",
    "characters": "[character for character in {{v}} if {}]",
    "pairs": "{{{{name: value for name, value in {{v}}.items() if {}}}}}",
    "records": "[{{item}} for {{item}} in {{v}} if {}]",
}
"""Code that keeps what fulfils a condition, by the type of the input."""

MAP = {
    "numbers": "[{} for number in {{v}}]",
    "words": "[{} for word in {{v}}]",
    "characters": "[{} for character in {{v}}]",
    "pairs": "{{{{{} for name, value in {{v}}.items()}}}}",
    "records": "[{} for {{item}} in {{v}}]",
}
"""Code that changes every item, by the type of the input."""


@dataclass(frozen=True)
class Operation:
    """One row: a step of a pipeline, or its result.

    `asked` are imperatives; the first is the canonical one, which the answer repeats. `part` is its part of the
    function's name, `arguments` the kind of its arguments. `before`, `after` and `noun` are the compact forms ("even"
    numbers, numbers "divisible by 3", "the squares of" the numbers); an empty one means that the row has no such form.
    At most one step of a `group` appears in a pipeline. `ordered` marks a result that depends on the order of its
    input; `empty` is what a result is when nothing is left.
    """

    name: str
    takes: list[str]
    asked: list[str]
    code: str
    part: str
    gives: str = "same"
    group: str = ""
    arguments: str = ""
    before: str = ""
    after: str = ""
    noun: str = ""
    ordered: bool = False
    empty: str = ""

    def after_type(self, kind: str) -> str:
        """The type that a value of type ``kind`` has after this step."""
        return kind if self.gives == "same" else self.gives


def _operation(row: dict[str, Any]) -> Operation:
    """A row of a table, whose code may be given by the condition (`keep`) or the expression (`map`) alone."""
    row = dict(row)
    for key, templates in (("keep", KEEP), ("map", MAP)):
        if key in row:
            row["code"] = templates[row["takes"][0]].format(row.pop(key))
    return Operation(**row)


STEPS = [_operation(row) for row in table("steps")]
RESULTS = [_operation(row) for row in table("results")]
STEP_BY_NAME = {row.name: row for row in STEPS}
RESULT_BY_NAME = {row.name: row for row in RESULTS}
