"""The five prompt sets on which papers on speculative decoding report the acceptance length.

Datasets, splits and the words around a row are those of z-lab's benchmark (github.com/z-lab/dflash,
``dflash/benchmark.py``; DFlash, arXiv:2602.06036). Papers report parts of them, which a limit takes; it takes the
first prompts, while z-lab's script shuffles:

    ==========  =====  =====  ========  =====
    prompts     split  z-lab  DeepSpec  EAGLE
    ==========  =====  =====  ========  =====
    gsm8k        1319    128       500     80
    math500       500    128       500      -
    humaneval     164    164       164     80
    mbpp          257    128       256      -
    mt-bench       80     80        80     80
    ==========  =====  =====  ========  =====

z-lab: its README for gsm8k, the others as in the ``run_benchmark.sh`` that later papers' code copies. DeepSpec:
``eval.py`` of github.com/deepseek-ai/DeepSpec, which asks mt-bench's first turn only. EAGLE: issue 124 of
github.com/SafeAILab/EAGLE.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..core.errors import DFlashError, did_you_mean
from ..prompts.conversations import Conversation, read_conversations

logger = logging.getLogger(__name__)

ALL = "all"
_BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{{}}."
_SOLVE = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{prompt}\n```"


@dataclass(frozen=True)
class Suite:
    """A dataset on the hub, and how its rows become prompts.

    Args:
        name: What the command line and tables call it; the ``kind`` of its prompts.
        dataset: Its name on the hub.
        subset: Its configuration there, if it has several.
        split: The split that is reported.
        size: Rows of the split.
        template: Makes the prompt from a row's columns.
        turns: In place of ``template``, the column that lists the user's turns; each is asked after the target's own
            answer to the previous one.
    """

    name: str
    dataset: str
    subset: str | None
    split: str
    size: int
    template: str | None = None
    turns: str | None = None

    def read(self, file: str | None = None, limit: int | None = None) -> list[Conversation]:
        """The first ``limit`` prompts, from the hub or from a JSONL ``file`` of rows with the hub's columns.

        Raises ``DataError`` as :func:`~dflash.prompts.conversations.read_conversations`.
        """
        part = {"split": self.split, "subset": self.subset} if file is None else {}
        source = self.dataset if file is None else file
        found = read_conversations(source, template=self.template, turns=self.turns, limit=limit, **part)
        wanted = self.size if limit is None else min(limit, self.size)
        if len(found) != wanted:
            logger.warning("%s has %d prompts here; expected %d.", self.name, len(found), wanted)
        return [replace(c, extra=c.extra | {"kind": self.name}) for c in found]


SUITES = {
    suite.name: suite
    for suite in (
        Suite("gsm8k", "openai/gsm8k", "main", "test", 1319, "{question}" + _BOXED),
        Suite("math500", "HuggingFaceH4/MATH-500", None, "test", 500, "{problem}" + _BOXED),
        Suite("humaneval", "openai/openai_humaneval", None, "test", 164, _SOLVE),
        Suite("mbpp", "google-research-datasets/mbpp", "sanitized", "test", 257, "{prompt}"),
        Suite("mt-bench", "HuggingFaceH4/mt_bench_prompts", None, "train", 80, turns="prompt"),
    )
}


def named_suites(names: Iterable[str]) -> list[tuple[Suite, str | None]]:
    """Suites by ``NAME``, ``NAME=FILE`` or ``all``, each with its file if one was given.

    Raises ``DFlashError`` for an unknown name, one given twice, and ``=`` without a file.
    """
    found: dict[str, tuple[Suite, str | None]] = {}
    for given in names:
        name, equals, file = given.partition("=")
        if equals and (not file or name == ALL):
            raise DFlashError(
                f"--suite {given} names no file of one suite; expected NAME=FILE.jsonl, such as gsm8k=FILE."
            )
        if name != ALL and name not in SUITES:
            raise DFlashError(f"--suite {name!r} is unknown: {did_you_mean(name, [*SUITES, ALL])}")
        for one in SUITES if name == ALL else [name]:
            if one in found:
                raise DFlashError(f"--suite names {one} twice; give each suite once.")
            found[one] = SUITES[one], file or None
    return list(found.values())
