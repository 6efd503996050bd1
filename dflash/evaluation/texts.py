"""The target's greedy answers, written once by plain batches and kept, so that any drafter can be scored on them.

At temperature 0 an answer depends on the target alone, and so do its features. Each is a file of its own in the folder
of its :func:`identity`, so that several processes can write, and a call that was interrupted keeps what it wrote.
"""

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generate_step, wired_limit

from ..adapters.registry import ADAPTERS
from ..core.environment import device_name, package_version
from ..core.files import atomic_write, flat, read_arrays
from ..core.progress import progress
from ..decoding.block import check_committed
from ..decoding.responses import generate_responses, rows_that_fit, unbatched_layer
from ..decoding.sampling import GREEDY
from ..decoding.text import TextStream
from ..decoding.verify import sample_target, token_ids
from ..drafters.autoregressive import agreeing
from ..target import LoadedTargetModel
from ..target.identity import target_fingerprint

logger = logging.getLogger(__name__)

MOST_BYTES = 2**30
"""What a folder of texts may take; features, and then texts, that were not used for longest go first."""

ABOUT = "about.json"
_ROWS = 32  # answers written at a time, at most
_POSITIONS = 512  # read in one pass, and logits computed at a time


def default_folder() -> Path:
    """``texts`` in the folder that the environment calls ``DFLASH_CACHE``, or in ``~/.cache/dflash``."""
    return Path(os.environ.get("DFLASH_CACHE") or Path.home() / ".cache" / "dflash") / "texts"


def identity(target: LoadedTargetModel, stops: Collection[int]) -> dict[str, Any]:
    """Plain data on all that decides an answer and its features but its prompt and length."""
    adapter = ADAPTERS.source(getattr(target.model, "model_type", ""))
    return {
        "target": target_fingerprint(target),
        "dtypes": sorted({str(weight.dtype) for weight in flat(target.model.parameters()).values()}),
        "stops": sorted(stops),
        "versions": {name: package_version(name) for name in ("mlx", "mlx-lm")},
        "device": device_name(),
        **({} if adapter is None else {"adapter": adapter}),  # a plug-in's, which its author may change
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
        self._keeps, self._room = True, most_bytes // 2

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

    def shown(self, text: Text) -> str:
        """The answer as decoding shows it, without the token that ends it."""
        stream = TextStream(self.target.tokenizer.detokenizer)
        return stream.add(text.answer[: len(text.answer) - text.ended])[0] + stream.finish()[0]

    def features(self, tokens: list[int], layer_ids: Sequence[int]) -> mx.array | None:
        """What :meth:`keep_features` kept of these tokens and layers, if it is whole."""
        if not (path := self._features_path(tokens, layer_ids)).exists():
            return None
        try:
            arrays, about = read_arrays(path)
            features = arrays["features"]
            if about["sha256"] != self._features_sha256(tokens, layer_ids, features):
                raise ValueError
        except (OSError, RuntimeError, ValueError, KeyError):
            logger.warning("%s is damaged; the target reads the text again.", path)
            return None
        _use(path)
        self._room -= features.nbytes
        return features

    def keep_features(self, tokens: list[int], layer_ids: Sequence[int], features: mx.array) -> None:
        """Keep what the target's layers made of ``tokens``: ``[1, S, F]``.

        Those of one call may take half of the folder. The rest is left out, so that they do not drive each other out.
        """
        if features.nbytes > self._room:
            if self._room > 0:
                logger.warning("Features beyond %.0f MB are not kept: each call reads them.", self.most_bytes / 2e6)
            self._room = 0
            return
        self._room -= features.nbytes
        if self._keeps:
            _bound(self._root, self.most_bytes - features.nbytes)
            about = {"sha256": self._features_sha256(tokens, layer_ids, features)}
            arrays, path = {"features": features}, self._features_path(tokens, layer_ids)
            self._write(path, lambda file: mx.save_safetensors(str(file), arrays, about))

    def _features_path(self, tokens: list[int], layer_ids: Sequence[int]) -> Path:
        return self.folder / f"{_sha256([tokens, list(layer_ids)])[:32]}.safetensors"

    def _features_sha256(self, tokens: list[int], layer_ids: Sequence[int], features: mx.array) -> str:
        total = hashlib.sha256(np.array(features.view(mx.uint8)).data)
        total.update(_sha256([self._about, tokens, list(layer_ids), str(features.dtype), features.shape]).encode())
        return total.hexdigest()

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
        _use(path)
        return answer[:max_tokens] if len(answer) >= max_tokens or answer[-1] in self.stops else None

    def _keep(self, prompt: list[int], answer: list[int]) -> None:
        kept = {"sha256": _sha256([self._about, prompt, answer]), "answer": answer}
        self._write(self._path(prompt), partial(Path.write_text, data=json.dumps(kept), encoding="utf-8"))

    def _write(self, path: Path, write: Callable[[Path], object]) -> None:
        """Write a file of the folder, and before the first one what the folder is about."""
        if not self._keeps:
            return
        about = json.dumps(self._about | {"name": str(self.target.folder or "a model in memory")})
        try:
            if not (self.folder / ABOUT).exists():
                atomic_write(self.folder / ABOUT, partial(Path.write_text, data=about, encoding="utf-8"))
            atomic_write(path, write)
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
        rows = min(_ROWS, rows_that_fit(target.model, max(map(len, prompts)) + max_tokens))
        drafts = generate_responses(target.model, prompts, stops, [max_tokens] * len(prompts), rows)
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
    """The texts of one target with its stop tokens: how many, bytes of them and of features, time of the last use."""

    folder: Path
    name: str
    texts: int
    nbytes: int
    features_nbytes: int
    used: float


def kept_texts(folder: Path) -> list[Kept]:
    """What :class:`Texts` kept in ``folder``, the latest used first."""
    found = []
    for own in _folders(folder):
        try:
            name = str(json.loads((own / ABOUT).read_text(encoding="utf-8"))["name"])
        except (OSError, ValueError, KeyError, TypeError):
            name = "(damaged)"
        files = list(_files(own))
        texts, features = ([s.st_size for path, s in files if path.suffix == kind] for kind in _KINDS)
        used = max((stat.st_mtime for _, stat in files), default=own.stat().st_mtime)
        found.append(Kept(own, name, len(texts), sum(texts), sum(features), used))
    return sorted(found, key=lambda kept: -kept.used)


def delete_texts(folder: Path) -> None:
    """Delete all that :class:`Texts` kept in ``folder``, and nothing else."""
    for own in _folders(folder):
        shutil.rmtree(own, ignore_errors=True)
    with suppress(OSError):  # it holds something else, or is not there
        folder.rmdir()


def _folders(root: Path) -> list[Path]:
    return [about.parent for about in root.glob(f"*/{ABOUT}") if re.fullmatch("[0-9a-f]{16}", about.parent.name)]


_KINDS = (".json", ".safetensors")


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # another process removed it
            if path.suffix in _KINDS and path.name != ABOUT:
                yield path, path.stat()


def _use(path: Path) -> None:
    with suppress(OSError):  # a folder of somebody else's; or another process removed it
        os.utime(path)


def _bound(root: Path, most_bytes: int) -> None:
    """Remove what was not used for longest, features first, until the others take at most ``most_bytes``."""
    files = [file for own in _folders(root) for file in _files(own)]
    held = sum(stat.st_size for _, stat in files)
    for path, stat in sorted(files, key=lambda file: (file[0].suffix == ".json", file[1].st_mtime)):
        if held <= most_bytes:
            return
        with suppress(OSError):
            path.unlink()
        held -= stat.st_size


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
