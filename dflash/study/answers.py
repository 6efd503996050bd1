"""The answers of a study on disk: one file for each way of decoding, an answer a prompt.

Knows files and plain data. Must not know models, settings or statistics. What is there is never made again, and a
process that is killed loses the answer that it was writing.
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.errors import CheckpointError
from ..core.files import atomic_write, read_json, remove_unfinished
from ..evaluation.runs import Run

FOLDER = "answers"


@dataclass(frozen=True)
class Answer:
    """What one prompt's decoding brought: a :class:`~dflash.evaluation.Run` as it is kept.

    ``at`` names the process that measured it: speeds of one are comparable, those of another day less so.
    """

    tokens: list[int]
    seconds: float
    committed: list[int]
    drafted: list[int]
    accepted: list[int]
    at: str

    @classmethod
    def of(cls, run: Run, at: str) -> "Answer":
        """The answer of a timed run."""
        return cls(run.tokens, round(run.seconds, 6), run.committed, run.drafted, run.accepted, at)

    @property
    def timed_tokens(self) -> int:
        """Tokens after the first, which :attr:`seconds` is the time of."""
        return len(self.tokens) - 1


class Answers:
    """The answers of one way of decoding, by the key of the prompt."""

    def __init__(self, folder: Path, key: str, about: dict[str, Any]):
        self.path, self.about = folder / FOLDER / f"{key}.json", about
        self._known: dict[str, Answer] = {}
        if self.path.exists():
            values = read_json(self.path)
            try:
                self._known = {prompt: Answer(**answer) for prompt, answer in values["answers"].items()}
            except (KeyError, TypeError, AttributeError) as error:
                raise CheckpointError(f"{self.path} holds no answers; remove it, and they are made again.") from error

    def __contains__(self, prompt: str) -> bool:
        return prompt in self._known

    def __getitem__(self, prompt: str) -> Answer:
        return self._known[prompt]

    def __len__(self) -> int:
        return len(self._known)

    def get(self, prompt: str) -> Answer | None:
        """The answer to a prompt, if it is there."""
        return self._known.get(prompt)

    def keep(self, prompt: str, answer: Answer) -> None:
        """Add an answer, on the disk too."""
        self._known[prompt] = answer
        remove_unfinished(self.path)
        text = json.dumps(self.about | {"answers": {k: dataclasses.asdict(a) for k, a in self._known.items()}})
        atomic_write(self.path, lambda file: file.write_text(text, encoding="utf-8"))
