"""A run from its recipe to a finished drafter, for any target.

Knows the order of the stages and where each leaves its files. Must not know how a stage works, the command
line, or any one architecture. A run that was stopped at any moment continues when given again.

The run folder holds ``recipe.json`` (the recipe, a fingerprint of its data), the drafter's ``config.json``,
what :mod:`~dflash.training.loop.checkpoints` says, and in the end ``drafter/`` in the published format.
"""

import json
import logging
import zlib
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import mlx.core as mx
from tqdm import tqdm

from dflash import LoadedTargetModel, load_target
from dflash.adapters.generic import GenericAdapter
from dflash.backend import keep_freed_memory, on_cpu, set_blas_threads
from dflash.errors import TrainingError
from dflash.files import exclusive_lock, remove_unfinished, write_json

from .batches import Batches
from .data.dataset import dataset_fingerprint, open_dataset, read_manifest
from .drafters.init import drafter_config, new_drafter
from .drafters.loss import Batch, drafter_loss
from .evaluate import heldout_prompts, measure
from .export import EXPORTED, export, require_only_a_drafter
from .features import (
    CachedFeatures,
    describe,
    require_features,
    with_cached_features,
    with_target_pass,
    write_features,
)
from .loop.checkpoints import BEST, LOG, STATE
from .loop.claims import check_same_run
from .loop.distributed import Ranks
from .loop.fit import FitSettings, fit
from .recipe import Recipe
from .settings import to_dict

logger = logging.getLogger(__name__)

RECIPE, CONFIG, FINISHED = "recipe.json", "config.json", "drafter"

_MAY_CHANGE = {
    f"recipe.{name}"
    for name in (
        *("target", "run.folder", "run.log_every", "run.checkpoint_every", "run.peer_timeout"),
        *("run.max_loss_spike", "run.grad_checkpoint", "data.folder", "data.cached_features"),
    )
}


def train(recipe: Recipe) -> Path:
    """Run a recipe, or what is left of it; returns the folder of the finished drafter.

    Raises :class:`~dflash.errors.DFlashError` for bad data, a run folder of another recipe or process, or a loss that
    blows up, ``OSError`` where the folder cannot be written to, and ``KeyboardInterrupt`` after Ctrl-C, once
    the step is saved.
    """
    keep_freed_memory()
    ranks = Ranks.of_this_run(recipe.run.peer_timeout)
    if ranks.size > 1 and on_cpu():
        set_blas_threads(1)  # processes that share a machine would fight for its cores
    _require_what_needs_no_target(recipe, ranks)
    with exclusive_lock(recipe.run.folder) if ranks.is_main else nullcontext():
        return _train(recipe, ranks)


def _require_what_needs_no_target(recipe: Recipe, ranks: Ranks) -> None:
    """What would be a pity to find out after a large target has loaded."""
    read_manifest(recipe.data.folder)
    if recipe.data.cached_features is not None:
        require_features(recipe.data.cached_features)
    require_only_a_drafter(recipe.run.folder / FINISHED)
    if recipe.run.batches_per_step % ranks.size:
        raise TrainingError(
            f"run.batches_per_step {recipe.run.batches_per_step} cannot be shared evenly by {ranks.size} processes; "
            f"make it a multiple of {ranks.size}."
        )


def _train(recipe: Recipe, ranks: Ranks) -> Path:
    target = load_target(recipe.target)
    sequences = open_dataset(recipe.data.folder, "train", target)
    batches = Batches(sequences, recipe.data, recipe.run.epochs, at_least=_batches_needed(recipe))
    settings = fit_settings(recipe, batches, target)
    prompts = _prompts(recipe, target)
    drafter = new_drafter(recipe.drafter, target)
    layer_ids, with_hidden = drafter.target_layer_ids, recipe.objective.needs_target_logits
    if recipe.data.cached_features is None:
        with_features = with_target_pass(batches, target, layer_ids, with_hidden)
    else:
        wanted = describe(recipe.data, sequences, target, layer_ids, with_hidden)
        with_features = with_cached_features(batches, CachedFeatures(recipe.data.cached_features, wanted))

    folder = recipe.run.folder
    identity = {"recipe": to_dict(recipe), "dataset": dataset_fingerprint(sequences)}
    ranks.require_same(zlib.crc32(json.dumps(identity).encode()), "The processes have different recipes or datasets.")
    logger.info(
        "%d sequences, %d batches, %d steps on %s, %d process(es).",
        len(batches.sequences),
        settings.steps * settings.batches_per_step,
        settings.steps,
        mx.default_device(),
        ranks.size,
    )

    def evaluate() -> dict[str, Any]:
        bar = tqdm(ranks.shard(prompts), "evaluate", leave=False, disable=None if ranks.is_main else True)
        return ranks.all_reduce_sum(measure(target, drafter, bar, recipe.run.evaluate_tokens)).results()

    def loss(model: Any, batch: Batch) -> mx.array:
        checkpointed = recipe.run.grad_checkpoint
        return drafter_loss(
            model, batch, recipe.objective, target.head, dtype=drafter_dtype(target), grad_checkpoint=checkpointed
        )

    finished = folder / FINISHED
    if ranks.is_main:
        for name in (CONFIG, STATE, BEST, LOG, *(f"{FINISHED}/{name}" for name in EXPORTED)):
            remove_unfinished(folder / name)
        check_same_run(folder / RECIPE, identity, _MAY_CHANGE)
        write_json(folder / CONFIG, drafter.config.to_dict())
    fit(
        drafter,
        with_features,
        loss,
        settings,
        folder,
        evaluate,
        score="acceptance_length",
        name_batch=batches.name,
        ranks=ranks,
    )
    if ranks.is_main:
        export(folder, finished, best=(folder / BEST).exists())
        logger.info("The drafter is in %s.", finished)
    return finished


def cache_features(recipe: Recipe) -> Path:
    """Compute the features that a recipe trains on, or what is left of them, into its ``data.cached_features``.

    Raises :class:`~dflash.errors.DFlashError` if the recipe names no folder, for bad data, for a folder of other
    features or that another process is writing to, and for a disk without room; ``OSError`` if it takes nothing.
    """
    folder = recipe.data.cached_features
    if folder is None:
        raise TrainingError("The recipe does not say where to: set data.cached_features to a folder.")
    keep_freed_memory()
    target = load_target(recipe.target)
    sequences = open_dataset(recipe.data.folder, "train", target)
    layer_ids = drafter_config(recipe.drafter, target).target_layer_ids
    wanted = describe(recipe.data, sequences, target, layer_ids, recipe.objective.needs_target_logits)
    with exclusive_lock(folder):
        write_features(folder, recipe.data, sequences, target, wanted)
    return folder


def _batches_needed(recipe: Recipe) -> int | None:
    return None if recipe.run.steps is None else recipe.run.steps * recipe.run.batches_per_step


def fit_settings(recipe: Recipe, batches: Batches, target: LoadedTargetModel) -> FitSettings:
    """The loop's settings; epochs become steps, of which the last may lack a few batches and is left out.

    Raises :class:`~dflash.errors.TrainingError` if there are fewer batches than one step takes, or the target's
    head cannot run in several threads.
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
    return FitSettings(
        steps=steps,
        batches_per_step=run.batches_per_step,
        threads=run.threads,
        log_every=run.log_every,
        checkpoint_every=run.checkpoint_every,
        evaluate_every=run.evaluate_every,
        max_loss_spike=run.max_loss_spike,
        optimizer=recipe.optimizer,
    )


def drafter_dtype(target: LoadedTargetModel) -> mx.Dtype:
    """What a new drafter computes in: bfloat16 beside a target that does, else float32 (float16 has too few exponents).

    A CPU loads every target as float32.
    """
    dtype = target.embed(mx.zeros((1, 1), mx.int32)).dtype
    return dtype if dtype == mx.bfloat16 else mx.float32


def _prompts(recipe: Recipe, target: LoadedTargetModel) -> list[list[int]]:
    longest = None if target.max_length is None else target.max_length - recipe.run.evaluate_tokens
    heldout = open_dataset(recipe.data.folder, "heldout", target)
    return heldout_prompts(heldout, recipe.run.evaluate_prompts, longest)
