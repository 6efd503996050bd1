"""A drafter continued on what a server recorded, and compared with the one before on requests that neither was shown.

    NEW.adapt/data         the record as it was at the start, with other data if there is some
    NEW.adapt/recipe.yaml  the recipe
    NEW.adapt/run          the training
    NEW.adapt/drafter      the drafter at its end
    NEW                    the same, if it is better

Every stage can be resumed and finished stages are skipped, so the same call continues an interrupted one.
"""

import math
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dflash import LoadedTargetModel, load_drafter, load_target
from dflash.core.errors import DataError
from dflash.core.files import atomic_write, exclusive_lock, read_json, write_json
from dflash.core.progress import progress
from dflash.evaluation.acceptance import Acceptance, length_over, total
from dflash.evaluation.replay import measure_on
from dflash.evaluation.statistics import Interval
from dflash.evaluation.texts import Text, Texts
from dflash.prompts.conversations import Conversation

from .data.dataset import check_target, open_dataset, read_manifest
from .data.join import join
from .data.split import HeldoutRule, opening_digest
from .data.text import read_dataset
from .export import export, require_only_a_drafter
from .new_recipe import as_yaml, check_overrides, propose_recipe
from .pipeline import DATA, DRAFTER, RECIPE, RUN, announce
from .recipe import load_recipe
from .train import FINISHED, cache_features, train

BEGUN, FEATURES = "adapt.json", "features"

_BATCH = 3072  # tokens: many short answers, or one long one
_BLOCKS = 256  # of a step, so that a few hundred steps pass a few times over some hundred answers
_RATE = 3e-4  # half of what new drafters are trained with
_CHECKED = ("run.evaluate_prompts=16", "run.evaluate_tokens=64")  # while it trains; both drafters are compared later


@dataclass(frozen=True)
class Adaptation:
    """A drafter to continue for ``steps`` on the record of a server, with the training of ``mix``, another dataset.

    Where that has more tokens, the record's requests are repeated until at least half of all tokens are theirs.
    ``recipe_settings`` override the proposed recipe. ``target`` and ``drafter`` are folders or hub names.
    """

    record: Path
    drafter: str
    output: Path
    target: str
    steps: int = 300
    mix: Path | None = None
    recipe_settings: Sequence[str] = ()
    trust_remote_code: bool = False

    @property
    def folder(self) -> Path:
        """Where everything but the result goes."""
        output = self.output.resolve()
        return output.with_name(f"{output.name}.adapt")

    def run(self) -> "Comparison":
        """Run what is left, and write ``output`` if the new drafter is better by more than the interval.

        Raises ``DataError`` for a record that is empty, of another target or without held-out requests whose answers
        have a block, and where the folder holds another adaptation; otherwise what training raises.
        """
        require_only_a_drafter(self.output)
        with exclusive_lock(self.folder):
            return self._run()

    def _run(self) -> "Comparison":
        if not (self.folder / BEGUN).exists():
            self._begin()
        elif read_json(self.folder / BEGUN) != self._given():
            raise DataError(f"{self.folder} was begun with other options; give the same ones, or another output.")
        recipe = load_recipe(self.folder / RECIPE)
        if not (recipe.run.folder / FINISHED / "model.safetensors").exists():
            if recipe.data.cached_features is not None:
                announce("features of the target", None)
                cache_features(recipe, trust_remote_code=self.trust_remote_code)
            announce("training", None)
            train(recipe, trust_remote_code=self.trust_remote_code)
        export(recipe.run.folder, self.folder / DRAFTER, best=False)  # the best was chosen on held-out requests
        announce("comparison", None)
        found = self._compare(load_target(self.target, self.trust_remote_code))
        if found.better:
            export(recipe.run.folder, self.output, best=False)
        return found

    def _given(self) -> dict[str, str]:
        return {name: str(value) for name, value in asdict(self).items()}

    def _begin(self) -> None:
        """Copy the record, which may grow while this runs, and propose a recipe; then the options are settled."""
        check_overrides(self.recipe_settings)
        if not (manifest := read_manifest(self.record)).get("recorded"):
            raise DataError(f"{self.record} is no record of dflash serve; dflash train continues a drafter on it.")
        self.folder.chmod(0o700)  # as the record's
        data = self.folder / DATA
        shutil.rmtree(data, ignore_errors=True)
        if self.mix is None:
            join([self.record], data)
        else:
            own, mixed = (_tokens(made) for made in (manifest, read_manifest(self.mix)))
            rule = self._heldout_rule(HeldoutRule(**manifest["heldout"]))
            join([self.record, self.mix], data, rule, max(math.ceil(mixed / own), 1))
        if not any("greedy" in row.text and row.response_tokens > 1 for row in read_dataset(data, "heldout")):
            raise DataError(
                f"No request of {self.record} with an answer of two tokens or more is held out to compare drafters on; "
                "record more requests."
            )
        tokens = len(open_dataset(data, "train", None).tokens)
        settings = [f"drafter.from={self.drafter}", f"data.batch_tokens={_BATCH}", "run.batches_per_step=1", *_CHECKED]
        settings += [f"data.max_blocks_per_batch={_BLOCKS}", f"data.anchors={_BLOCKS}"]
        settings += [f"optimizer.learning_rate={_RATE}", f"run.steps={self.steps}", f"run.evaluate_every={self.steps}"]
        if self.steps * _BATCH > 2 * tokens:  # the target would read each sequence several times
            settings.append(f"data.cached_features={self.folder / FEATURES}")
        settings += self.recipe_settings
        text = as_yaml(propose_recipe(self.target, data, self.folder / RUN, settings, self.trust_remote_code))
        atomic_write(self.folder / RECIPE, lambda file: file.write_text(text, encoding="utf-8"))
        write_json(self.folder / BEGUN, self._given())

    def _heldout_rule(self, rule: HeldoutRule) -> HeldoutRule:
        """The record's ``rule``, with a share that holds out the same requests beside another dataset's too."""
        held = read_dataset(self.record, "heldout")
        digests = [opening_digest(Conversation(tuple(row.text["messages"]), "")) for row in held]
        share = max(digests, default=0) / 2**64 * (1 + 1e-9)  # digests below the share are held out, so a little more
        return replace(rule, percent=max(rule.percent, min(100 * share, 99.9)))

    def _compare(self, target: LoadedTargetModel) -> "Comparison":
        check_target(read_manifest(self.folder / DATA), target, self.folder / DATA)
        texts = heldout_texts(self.folder / DATA, target)
        drafters = [load_drafter(name) for name in (self.drafter, self.folder / DRAFTER)]
        counts = measure_on(target, drafters, progress([text for _, text in texts], "compare"))
        by_conversation: dict[int, list[list[Acceptance]]] = {}
        for (conversation, _), found in zip(texts, counts, strict=True):
            by_conversation.setdefault(conversation, []).append(found)
        old, new = (
            [total((each[i] for each in group), drafter.block_size) for group in by_conversation.values()]
            for i, drafter in enumerate(drafters)
        )
        lengths = [total(own, d.block_size).length for own, d in zip((old, new), drafters, strict=True)]
        if lengths[0] is None or lengths[1] is None:
            raise DataError(f"The target's answers to what {self.record} holds out are too short for a block.")
        return Comparison(len(texts), lengths[0], lengths[1], length_over(new, old))


@dataclass(frozen=True)
class Comparison:
    """The acceptance lengths of both drafters on ``requests`` held-out ones, and the new one's over the old one's.

    The interval is over conversations, since requests of one are alike.
    """

    requests: int
    old: float
    new: float
    ratio: Interval

    @property
    def better(self) -> bool:
        """Whether the new drafter is better by more than the interval."""
        return self.ratio.low is not None and self.ratio.low > 1


def _tokens(manifest: dict[str, Any]) -> int:
    """Tokens of a dataset, in both splits."""
    return sum(split["tokens"] for split in manifest["splits"].values())


def heldout_texts(data: Path, target: LoadedTargetModel) -> list[tuple[int, Text]]:
    """The held-out requests of a copied record, each once: its conversation's digest, and its greedy text.

    Recorded answers are the texts where they are greedy; the target writes the others.
    """
    sequences, stops = open_dataset(data, "heldout", None), target.stop_token_ids()
    ends = sequences.lengths.cumsum()
    texts: dict[tuple[int, ...], tuple[int, Text]] = {}
    sampled: dict[tuple[int, ...], int] = {}
    most = 1
    for row, end, length in zip(read_dataset(data, "heldout"), ends, sequences.lengths, strict=True):
        about: dict[str, Any] = row.text
        if "greedy" not in about:  # it is not of the record
            continue
        tokens, begin = sequences.tokens[end - length : end].tolist(), int(length) - row.response_tokens
        prompt, answer = tokens[:begin], tokens[begin:]
        conversation = opening_digest(Conversation(tuple(about["messages"]), ""))
        if about["greedy"]:
            texts[tuple(prompt)] = conversation, Text(prompt, answer, len(answer), answer[-1] in stops)
        else:
            sampled[tuple(prompt)], most = conversation, max(most, len(answer))
    missing = [list(prompt) for prompt in sampled if prompt not in texts]
    written = Texts(target).all(missing, most)
    return [*texts.values(), *((sampled[tuple(text.prompt)], text) for text in written)]
