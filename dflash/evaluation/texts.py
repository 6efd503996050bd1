"""The target's greedy answers, written once by plain batches and kept, so that any drafter can be scored on them.

At temperature 0 an answer depends on the target alone. Each is a file of its own in the folder of its
:func:`identity`, so that several processes can write, and a call that was interrupted keeps what it wrote.
"""

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step, wired_limit

from ..core.environment import device_name, package_version
from ..core.files import atomic_write, flat
from ..core.progress import progress
from ..decoding.block import check_committed
from ..decoding.responses import generate_responses, unbatched_layer
from ..decoding.sampling import GREEDY
from ..decoding.verify import sample_target, token_ids
from ..drafters.autoregressive import agreeing
from ..target import LoadedTargetModel
from ..target.identity import target_fingerprint

logger = logging.getLogger(__name__)

MOST_BYTES = 2**28
"""What a folder of texts may take; texts that were not used for longest go first."""

ABOUT = "about.json"
_ROWS = 32  # answers written at a time
_POSITIONS = 512  # read in one pass, and logits computed at a time


def default_folder() -> Path:
    """``texts`` in the folder that the environment calls ``DFLASH_CACHE``, or in ``~/.cache/dflash``."""
    return Path(os.environ.get("DFLASH_CACHE") or Path.home() / ".cache" / "dflash") / "texts"


def identity(target: LoadedTargetModel, stops: Collection[int]) -> dict[str, Any]:
    """Plain data on all that decides an answer but its prompt and length."""
    return {
        "target": target_fingerprint(target),
        "dtypes": sorted({str(weight.dtype) for weight in flat(target.model.parameters()).values()}),
        "stops": sorted(stops),
        "versions": {name: package_version(name) for name in ("mlx", "mlx-lm")},
        "device": device_name(),
    }


@dataclass(frozen=True)
class Text:
    """A prompt and the target's greedy answer to it, cut at ``max_tokens`` unless it is ``ended`` by a stop token."""

    prompt: list[int]
    answer: list[int]
    max_tokens: int
    ended: bool

    @property
    def tokens(self) -> list[int]:
        """Both."""
        return self.prompt + self.answer


class Texts:
    """The kept answers of one target.

    Args:
        target: Writes what is missing.
        stops: Tokens that end an answer; by default the target's.
        folder: Where answers are kept, in a folder of their :func:`identity`; by default :func:`default_folder`.
        most_bytes: What all of ``folder`` may take.
    """

    def __init__(
        self,
        target: LoadedTargetModel,
        stops: Collection[int] | None = None,
        folder: Path | None = None,
        most_bytes: int = MOST_BYTES,
    ):
        self.target, self.most_bytes = target, most_bytes
        self.stops = frozenset(target.stop_token_ids() if stops is None else stops)
        self._about = identity(target, self.stops)
        self._root = folder or default_folder()
        self.folder = self._root / _sha256(self._about)[:16]
        self._keeps = True

    def answers(self, prompts: Sequence[list[int]], max_tokens: int) -> Iterator[tuple[int, Text]]:
        """The number of each prompt with its text, as soon as it is there: kept ones first.

        An answer has ``max_tokens`` tokens, or ends with a stop token before.
        """
        missing: list[int] = []
        for number, prompt in enumerate(prompts):
            if (answer := self._read(prompt, max_tokens)) is None:
                missing.append(number)
            else:
                yield number, self._text(prompt, answer, max_tokens)
        if not missing:
            return
        asked = [prompts[number] for number in missing]
        for i, answer in write(self.target, asked, max_tokens, self.stops):
            self._keep(asked[i], answer)
            yield missing[i], self._text(asked[i], answer, max_tokens)
        _bound(self._root, self.most_bytes)

    def all(self, prompts: Sequence[list[int]], max_tokens: int, show: bool = True) -> list[Text]:
        """The texts in the order of the prompts, with a progress bar if any has to be written."""
        answers = progress(self.answers(prompts, max_tokens), "texts", len(prompts), show=show)
        return [text for _, text in sorted(answers, key=lambda pair: pair[0])]

    def _text(self, prompt: list[int], answer: list[int], max_tokens: int) -> Text:
        return Text(prompt, answer, max_tokens, ended=answer[-1] in self.stops)

    def _read(self, prompt: list[int], max_tokens: int) -> list[int] | None:
        """The kept answer to ``prompt``, if there is a whole one; a longer one is cut."""
        path = self._path(prompt)
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            answer: list[int] = kept["answer"]
            if kept["sha256"] != _sha256([self._about, prompt, answer]):
                raise ValueError
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError):
            logger.warning("%s is damaged; the text is written again.", path)
            return None
        with suppress(OSError):  # a folder of somebody else's; or another process removed it
            os.utime(path)  # it is used
        return answer[:max_tokens] if len(answer) >= max_tokens or answer[-1] in self.stops else None

    def _keep(self, prompt: list[int], answer: list[int]) -> None:
        if not self._keeps:
            return
        kept = {"sha256": _sha256([self._about, prompt, answer]), "answer": answer}
        about = self._about | {"name": str(self.target.folder or "a model in memory")}
        try:
            for path, value in ((self.folder / ABOUT, about), (self._path(prompt), kept)):
                if value is kept or not path.exists():
                    atomic_write(path, partial(Path.write_text, data=json.dumps(value), encoding="utf-8"))
        except OSError as error:
            logger.warning("The texts are not kept: %s", error)
            self._keeps = False

    def _path(self, prompt: list[int]) -> Path:
        return self.folder / f"{_sha256(prompt)[:32]}.json"


# --- writing -----------------------------------------------------------------------------------------------


def write(
    target: LoadedTargetModel, prompts: Sequence[list[int]], max_tokens: int, stops: Collection[int]
) -> Iterator[tuple[int, list[int]]]:
    """The number of each prompt with the target's greedy answer, as soon as it is complete.

    Answers are written in plain batches and then read in one pass. From the first token on that the pass would not have
    chosen (a near tie, or a model that batches wrongly), and where mlx-lm cannot batch, plain decoding goes on alone.
    """
    drafts: Iterator[tuple[int, list[int]]] = ((number, []) for number in range(len(prompts)))
    if unbatched_layer(target.model) is None:
        drafts = generate_responses(target.model, prompts, stops, [max_tokens] * len(prompts), _ROWS)
    with wired_limit(target.model):
        for number, draft in drafts:
            answer = draft[: _agreed(target, prompts[number], draft)]
            if not answer or len(answer) < len(draft):
                answer += _plain(target, prompts[number] + answer, max_tokens - len(answer), stops)
            yield number, answer


def _plain(target: LoadedTargetModel, text: list[int], max_tokens: int, stops: Collection[int]) -> Iterator[int]:
    for token, _ in generate_step(mx.array(text), target.model, max_tokens=max_tokens):
        yield int(token)
        if token in stops:
            return


def _agreed(target: LoadedTargetModel, prompt: list[int], draft: list[int]) -> int:
    """How many leading tokens of ``draft`` one pass over it would have chosen.

    Raises ``GenerationError`` if the target's logits are not a number.
    """
    tokens, agreed = mx.array([[*prompt, *draft][:-1]]), 0
    cache, first = target.make_cache(), len(prompt) - 1  # the position that predicts the answer's first token
    for start in range(0, tokens.shape[1] if draft else 0, _POSITIONS):
        hidden, _ = target.forward_hidden(tokens[:, start : start + _POSITIONS], cache, ())
        mx.eval(hidden, [layer.state for layer in cache])
        if (after := hidden[:, max(first - start, 0) :]).shape[1]:
            chosen = token_ids(sample_target(target.head(after)[0], GREEDY))
            check_committed(target, chosen)
            agreed += (same := agreeing(chosen, draft[agreed:]))
            if same < len(chosen):
                break
    return agreed


# --- the folder --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kept:
    """The texts of one target with its stop tokens: how many, their bytes, and the time of the last use."""

    folder: Path
    name: str
    texts: int
    nbytes: int
    used: float


def kept_texts(folder: Path) -> list[Kept]:
    """What :class:`Texts` kept in ``folder``, the latest used first."""
    found = []
    for own in _folders(folder):
        try:
            name = str(json.loads((own / ABOUT).read_text(encoding="utf-8"))["name"])
        except (OSError, ValueError, KeyError, TypeError):
            name = "(damaged)"
        stats = [stat for _, stat in _texts(own)]
        used = max((stat.st_mtime for stat in stats), default=own.stat().st_mtime)
        found.append(Kept(own, name, len(stats), sum(stat.st_size for stat in stats), used))
    return sorted(found, key=lambda kept: -kept.used)


def delete_texts(folder: Path) -> None:
    """Delete all that :class:`Texts` kept in ``folder``, and nothing else."""
    for own in _folders(folder):
        shutil.rmtree(own, ignore_errors=True)
    with suppress(OSError):  # it holds something else, or is not there
        folder.rmdir()


def _folders(root: Path) -> list[Path]:
    return [about.parent for about in root.glob(f"*/{ABOUT}") if re.fullmatch("[0-9a-f]{16}", about.parent.name)]


def _texts(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for path in folder.glob("*.json"):
        with suppress(FileNotFoundError):  # another process removed it
            if path.name != ABOUT:
                yield path, path.stat()


def _bound(root: Path, most_bytes: int) -> None:
    """Remove the texts that were not used for longest until the others take at most ``most_bytes``."""
    texts = [text for own in _folders(root) for text in _texts(own)]
    held = sum(stat.st_size for _, stat in texts)
    for path, stat in sorted(texts, key=lambda text: text[1].st_mtime):
        if held <= most_bytes:
            return
        with suppress(OSError):
            path.unlink()
        held -= stat.st_size


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
