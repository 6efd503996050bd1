"""A run from its recipe to a finished drafter, for any target.

A run that was stopped at any moment continues when it is started again. Its folder holds ``recipe.json`` (the recipe
and a fingerprint of its data), the drafter's ``config.json``, the files of :mod:`~dflash.training.loop.run_folder`
and, at the end, ``drafter/`` in the published format.
"""

import json
import logging
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from dflash import DFlashDraftModel, LoadedTargetModel, load_target
from dflash.adapters.generic import GenericAdapter
from dflash.core.backend import keep_freed_memory, on_cpu, set_blas_threads
from dflash.core.errors import TrainingError, one_line
from dflash.core.files import exclusive_lock, read_json, remove_unfinished, write_json
from dflash.core.progress import progress
from dflash.drafters.kinds import config_of
from dflash.evaluation.acceptance import Acceptance, total
from dflash.evaluation.features import Features
from dflash.evaluation.replay import measure_on
from dflash.evaluation.texts import Text, Texts

from ..core.settings import to_dict
from .batches import Batches
from .callbacks import CALLBACKS, RunInfo, listeners
from .data.dataset import dataset_fingerprint, open_dataset, read_manifest
from .data.mask_token import require_unused
from .data.sequences import Sequences
from .drafters.init import new_drafter
from .drafters.loss import Batch, Scores, drafter_loss
from .evaluate import heldout_batches, heldout_prompts, heldout_scores
from .export import EXPORTED, VOCABULARY, export, require_only_a_drafter, write_vocabulary
from .features import (
    CachedFeatures,
    describe,
    require_features,
    with_cached_features,
    with_target_pass,
    write_features,
)
from .identity import require_same
from .loop.distributed import Ranks
from .loop.fit import fit
from .loop.optimizer import Optimizer
from .loop.run import OnLog, check_identity
from .loop.run_folder import BEFORE_DECAY, BEST, BEST_BEFORE_DECAY, LOG, RECIPE, STATE
from .loop.settings import FitSettings, LoopSettings
from .recipe import Recipe
from .runs import recorded_recipe

logger = logging.getLogger(__name__)


CONFIG, FINISHED = "config.json", "drafter"

_MAY_CHANGE = {
    f"recipe.{name}"
    for name in (
        *("target", "run.folder", "run.log_every", "run.checkpoint_every", "run.peer_timeout", "run.callbacks"),
        *("run.max_loss_spike", "run.grad_checkpoint", "data.folder", "data.cached_features"),
        *("run.steps", "run.epochs"),  # the loop knows whether a run can be made longer
    )
}


def train(recipe: Recipe, on_log: OnLog | None = None, *, trust_remote_code: bool = False) -> Path:
    """Run a recipe, or what is left of it; returns the folder of the finished drafter.

    ``on_log`` gets every line of the log as a dict; by default the lines are printed, unless logging shows them.
    ``trust_remote_code`` is as in :func:`~dflash.load_target`; a recipe cannot set it.

    Raises ``DFlashError`` for bad data, a loss that blows up, and a run folder that belongs to another recipe, is in
    use or cannot be written to; ``OSError`` for a full disk; and, once the step is saved, ``KeyboardInterrupt`` after
    Ctrl-C and ``StopTraining`` where a callback ends the run.
    """
    keep_freed_memory()
    ranks = Ranks.of_this_run(recipe.run.peer_timeout)
    if ranks.size > 1 and on_cpu():
        set_blas_threads(1)  # processes that share a machine would fight for its cores
    if not ranks.is_main:
        logging.getLogger("dflash").setLevel(logging.WARNING)  # rank 0 says it all
    _check_before_loading(recipe, ranks)
    with _own(recipe.run.folder, "run.folder") if ranks.is_main else nullcontext():
        return _train(_Training.load(recipe, trust_remote_code), ranks, on_log)


def _check_before_loading(recipe: Recipe, ranks: Ranks) -> None:
    """The checks that need no target, so that a mistake fails before minutes of loading."""
    read_manifest(recipe.data.folder)
    if recipe.data.cached_features is not None:
        require_features(recipe.data.cached_features)
    require_only_a_drafter(recipe.run.folder / FINISHED)
    if recipe.run.batches_per_step % ranks.size:
        raise TrainingError(
            f"run.batches_per_step {recipe.run.batches_per_step} cannot be shared evenly by {ranks.size} processes; "
            f"make it a multiple of {ranks.size}."
        )
    for name in recipe.run.callbacks:
        CALLBACKS.get(name)
    if ranks.is_main and (recipe.run.folder / RECIPE).is_file():
        before = _recorded(recipe.run.folder)
        require_same(recipe.run.folder, before, {"recipe": to_dict(recipe)}, {*_MAY_CHANGE, "dataset"})


def _recorded(folder: Path) -> dict[str, Any]:
    """What the run in ``folder`` was started with."""
    return read_json(folder / RECIPE) | {"recipe": recorded_recipe(folder)}


@contextmanager
def _own(folder: Path, key: str) -> Iterator[None]:
    """Lock the folder that the recipe names as ``key``; a folder that nothing was written to is removed again."""
    with ExitStack() as stack:
        try:
            stack.enter_context(exclusive_lock(folder))
        except OSError as error:
            reason = error.strerror or one_line(error)
            raise TrainingError(f"Cannot write to {key} {folder}: {reason}. Set {key} to another folder.") from error
        yield


@dataclass(frozen=True)
class _Training:
    """A recipe with everything that it names, loaded."""

    recipe: Recipe
    target: LoadedTargetModel
    sequences: Sequences
    drafter: DFlashDraftModel
    dtype: mx.Dtype

    @classmethod
    def load(cls, recipe: Recipe, trust_remote_code: bool) -> "_Training":
        target = load_target(recipe.target, trust_remote_code)
        sequences = open_dataset(recipe.data.folder, "train", target)
        drafter = new_drafter(recipe.drafter, target, sequences)
        return cls(recipe, target, sequences, drafter, drafter_dtype(target))

    @cached_property
    def heldout(self) -> Sequences:
        """The other split; the target was checked when the first was opened."""
        return open_dataset(self.recipe.data.folder, "heldout", None)

    @property
    def needs_target_logits(self) -> bool:
        return self.recipe.objective.needs_target_logits or self.drafter.needs_target_logits

    def features(self) -> dict[str, Any]:
        """What a cache must hold for this run."""
        layer_ids = self.drafter.target_layer_ids
        return describe(self.recipe.data, self.sequences, self.target, layer_ids, self.needs_target_logits)

    def batches(self) -> Batches:
        """The batches of all steps, without features."""
        data, run = self.recipe.data, self.recipe.run
        needed = None if run.steps is None else run.steps * run.batches_per_step
        return Batches(self.sequences.first(data.sequences), data, run.epochs, at_least=needed)

    def with_features(self, batches: Batches) -> Callable[[int], Batch]:
        """``batches`` with the target's features, computed or read from the disk."""
        data, drafter = self.recipe.data, self.drafter
        if data.cached_features is not None:
            read = with_cached_features(batches, CachedFeatures(data.cached_features, self.features()))
        else:
            read = with_target_pass(batches, self.target, drafter.target_layer_ids, self.needs_target_logits)
        read = of_all_lengths(read, drafter.block_size - 1, data.seed) if drafter.config.elastic_blocks else read
        count = self.recipe.objective.base_steps * self.recipe.run.batches_per_step
        return from_uncorrected(read, count) if count else read

    def loss(self, model: Any, batch: Batch) -> mx.array:
        """The loss of one batch."""
        recipe, head, dtype = self.recipe, self.drafter.target_head, drafter_dtype(self.target)
        return drafter_loss(
            model, batch, recipe.objective, head, dtype=dtype, grad_checkpoint=recipe.run.grad_checkpoint
        )

    def prompts(self) -> list[list[int]]:
        """The held-out prompts of an evaluation."""
        tokens, most = self.recipe.run.evaluate_tokens, self.target.max_length
        if most is not None and tokens >= most:
            raise TrainingError(
                f"run.evaluate_tokens {tokens} leaves no room for a prompt: the target takes {most} tokens in all. "
                "Lower run.evaluate_tokens."
            )
        longest = None if most is None else most - tokens
        return heldout_prompts(self.heldout, self.recipe.run.evaluate_prompts, longest)

    def evaluation(self, prompts: Sequence[list[int]], ranks: Ranks) -> Callable[[], dict[str, Any]]:
        """Evaluate on all ranks: on the texts after ``prompts``, this rank's, and on as many held-out sequences."""
        recipe, target, drafter = self.recipe, self.target, self.drafter
        first = self.heldout.first(recipe.run.evaluate_prompts)
        layer_ids, with_hidden = drafter.target_layer_ids, self.needs_target_logits
        batches = ranks.shard(heldout_batches(first, recipe.data, target, layer_ids, with_hidden))
        kept, texts = Texts(target), list[Text]()  # written at the first evaluation, if not kept from another run
        features = Features(kept)

        def evaluate() -> dict[str, Any]:
            if not texts:
                texts.extend(kept.all(prompts, recipe.run.evaluate_tokens, show=ranks.is_main))
            bar = progress(texts, "evaluate", show=ranks.is_main)
            own = total((own for (own,) in measure_on(target, [drafter], bar, features)), drafter.block_size)
            counts = [len(prompts), own.blocks, own.committed, *own.verified, *own.accepted]
            decoded, blocks, committed, *by_position = ranks.all_reduce_sum(np.array(counts))
            acceptance = Acceptance(int(blocks), int(committed), *np.split(np.array(by_position), 2))
            mine = heldout_scores(drafter, batches, recipe.objective, drafter.target_head, self.dtype)
            predicted = np.stack([mine.predictions, *mine.hits.values()])
            sums = ranks.all_reduce_sum(np.array([mine.loss, mine.weight, *predicted.flat]))
            predictions, *hits = sums[2:].reshape(predicted.shape)
            scores = Scores(float(sums[0]), float(sums[1]), predictions, dict(zip(mine.hits, hits, strict=True)))
            return acceptance.results() | {"prompts": int(decoded)} | scores.results()

        return evaluate


def _train(training: _Training, ranks: Ranks, on_log: OnLog | None) -> Path:
    recipe, drafter, folder = training.recipe, training.drafter, training.recipe.run.folder
    batches = training.batches()
    settings = fit_settings(recipe, batches, training.target)
    prompts = ranks.shard(training.prompts())
    require_unused(drafter.config.mask_token_id, training.target, training.sequences, training.heldout)
    batch = training.with_features(batches)

    identity = {"recipe": to_dict(recipe), "dataset": dataset_fingerprint(training.sequences)}
    ranks.require_same(zlib.crc32(json.dumps(identity).encode()), "The processes have different recipes or datasets.")
    if warning := settings.optimizer.warning(settings.steps):
        logger.warning("%s", warning)
    made, device = settings.steps * settings.batches_per_step, mx.default_device()
    count = len(batches.sequences), made, settings.steps, device, ranks.size
    logger.info("%d sequences, %d batches, %d steps on %s, %d process(es).", *count)
    optimizer = Optimizer(drafter.trainable_parameters(), settings.optimizer, settings.steps)
    listening: list[OnLog] = []
    if ranks.is_main:
        _begin(folder, identity, settings, drafter)
        about = RunInfo(folder, identity["recipe"], drafter, optimizer.inner)
        listening = listeners(recipe.run.callbacks, about, on_log)
    fit(
        drafter,
        batch,
        training.loss,
        settings,
        folder,
        training.evaluation(prompts, ranks),
        score="acceptance_length",
        name_batch=batches.name,
        ranks=ranks,
        on_log=listening,
        optimizer=optimizer,
    )
    finished = folder / FINISHED
    if ranks.is_main:
        export(folder, finished, best=(folder / BEST).exists())
        logger.info("The drafter is in %s.", finished)
    return finished


def _begin(folder: Path, identity: dict[str, Any], settings: FitSettings, drafter: DFlashDraftModel) -> None:
    """Make ``folder`` this run's: refuse another run's, remove unfinished files, write the drafter's config.

    A drafter of a part of the vocabulary also gets the table of its tokens.
    """
    of_loop = (STATE, BEFORE_DECAY, BEST, BEST_BEFORE_DECAY, LOG)
    for name in (CONFIG, VOCABULARY, *of_loop, *(f"{FINISHED}/{name}" for name in EXPORTED)):
        remove_unfinished(folder / name)
    if (folder / RECIPE).exists():
        write_json(folder / RECIPE, _recorded(folder))  # an older one by today's names
    check_identity(folder, identity, _MAY_CHANGE, settings)
    write_json(folder / CONFIG, config_of(drafter))
    if drafter.token_ids is not None:
        write_vocabulary(folder, drafter.token_ids, drafter.config.vocab_size)


def of_all_lengths(batches: Callable[[int], Batch], most: int, seed: int) -> Callable[[int], Batch]:
    """``batches`` whose blocks hold 1 to ``most`` drafts: one uniformly sampled number for each batch."""

    def batch(number: int) -> Batch:
        drafts = int(np.random.default_rng([seed, number, most]).integers(1, most, endpoint=True))
        return batches(number)._replace(drafts=drafts)

    return batch


def from_uncorrected(batches: Callable[[int], Batch], count: int) -> Callable[[int], Batch]:
    """``batches`` whose loss begins as that of uncorrected logits, and is that of corrected ones after ``count``."""
    return lambda number: batches(number)._replace(base_weight=max(0.0, 1 - number / count))


def cache_features(recipe: Recipe, *, trust_remote_code: bool = False) -> Path:
    """Compute the features that a recipe trains on, or what is left of them, into its ``data.cached_features``.

    ``trust_remote_code`` is as in :func:`train`.

    Raises ``DFlashError`` for bad data, a disk without room, and if the recipe names no folder or one that holds other
    features, is in use or cannot be written to.
    """
    folder = recipe.data.cached_features
    if folder is None:
        raise TrainingError("The recipe does not say where the features go: set data.cached_features to a folder.")
    keep_freed_memory()
    training = _Training.load(recipe, trust_remote_code)
    wanted = training.features()
    with _own(folder, "data.cached_features"):
        write_features(folder, recipe.data, training.sequences, training.target, wanted)
    return folder


def fit_settings(recipe: Recipe, batches: Batches, target: LoadedTargetModel) -> FitSettings:
    """The loop's settings, with epochs converted to whole steps.

    Raises ``TrainingError`` if the batches do not make one step, or the target's head cannot run in several threads.
    """
    run = recipe.run
    steps = run.steps if run.steps is not None else len(batches) // run.batches_per_step
    if not steps:
        raise TrainingError(
            f"The data makes {len(batches)} batches in {run.epochs} epochs, but one step takes "
            f"run.batches_per_step {run.batches_per_step}; lower that or data.batch_tokens."
        )
    if run.threads > 1 and isinstance(target.adapter, GenericAdapter):
        raise TrainingError("run.threads must be 1 for this target: its head is found by the generic adapter.")
    shared = {field.name: getattr(run, field.name) for field in fields(LoopSettings)}
    return FitSettings(**(shared | {"steps": steps}), optimizer=recipe.optimizer)


def drafter_dtype(target: LoadedTargetModel) -> mx.Dtype:
    """What a new drafter computes in: bfloat16 if the target does, otherwise float32 (float16 overflows too easily)."""
    dtype = target.embed(mx.zeros((1, 1), mx.int32)).dtype
    return dtype if dtype == mx.bfloat16 else mx.float32
