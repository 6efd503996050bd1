"""A run from its recipe to a finished drafter, for any target.

Knows the order of the stages and where each leaves its files. Must not know how a stage works, the command
line, or any one architecture. A run that was stopped at any moment continues when given again.

The run folder holds ``recipe.json`` (the recipe, a fingerprint of its data), the drafter's ``config.json``,
what :mod:`~dflash.training.loop.run_folder` says, and in the end ``drafter/`` in the published format.
"""

import json
import logging
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from dflash import DFlashDraftModel, LoadedTargetModel, load_target
from dflash.adapters.generic import GenericAdapter
from dflash.core.backend import keep_freed_memory, on_cpu, set_blas_threads, wait_for_this_thread
from dflash.core.errors import TrainingError, one_line
from dflash.core.files import exclusive_lock, read_json, remove_unfinished, write_json
from dflash.core.progress import progress
from dflash.drafters.kinds import config_of
from dflash.drafters.protocol import Drafter
from dflash.evaluation.acceptance import Acceptance, measure

from ..core.settings import to_dict
from . import reporting as _registers_its_callbacks  # noqa: F401
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
from .identity import check_same_run, require_same
from .loop.clock import duration
from .loop.distributed import Ranks
from .loop.fit import fit
from .loop.run import OnLog, checkpoint_to_continue
from .loop.run_folder import BEFORE_DECAY, BEST, LOG, RECIPE, STATE
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

    ``on_log`` gets every line of the log as a dict; without it they are printed, unless logging shows them.
    ``trust_remote_code`` is as in :func:`~dflash.load_target`: no recipe can set it.

    Raises ``DFlashError`` for bad data, a run folder of another recipe or process or one that
    cannot be written to, or a loss that blows up, ``OSError`` for a full disk, and ``KeyboardInterrupt`` after Ctrl-C,
    once the step is saved.
    """
    keep_freed_memory()
    wait_for_this_thread()
    ranks = Ranks.of_this_run(recipe.run.peer_timeout)
    if ranks.size > 1 and on_cpu():
        set_blas_threads(1)  # processes that share a machine would fight for its cores
    if not ranks.is_main:
        logging.getLogger("dflash").setLevel(logging.WARNING)  # the first one tells it
    _check_before_loading(recipe, ranks)
    with _own(recipe.run.folder, "run.folder") if ranks.is_main else nullcontext():
        return _train(recipe, ranks, on_log, trust_remote_code)


def _check_before_loading(recipe: Recipe, ranks: Ranks) -> None:
    """Checks that need no target, so that a mistake fails before minutes of loading."""
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
    """Keep other processes out of the folder that the recipe names as ``key``; what wrote nothing leaves no folder."""
    with ExitStack() as stack:
        if not folder.exists():
            stack.callback(_remove_unused, folder)
        try:
            stack.enter_context(exclusive_lock(folder))
        except OSError as error:
            reason = error.strerror or one_line(error)
            raise TrainingError(f"Cannot write to {key} {folder}: {reason}. Set {key} to another folder.") from error
        yield


def _remove_unused(folder: Path) -> None:
    """Remove a folder with nothing but its lock: what was to be written there was refused."""
    if folder.is_dir() and [path.name for path in folder.iterdir()] == [".lock"]:
        (folder / ".lock").unlink()
        folder.rmdir()


def _train(recipe: Recipe, ranks: Ranks, on_log: OnLog | None, trust_remote_code: bool) -> Path:
    target = load_target(recipe.target, trust_remote_code)
    sequences = open_dataset(recipe.data.folder, "train", target)
    batches = Batches(
        sequences.first(recipe.data.sequences), recipe.data, recipe.run.epochs, at_least=_batches_needed(recipe)
    )
    settings = fit_settings(recipe, batches, target)
    heldout = open_dataset(recipe.data.folder, "heldout", None)  # "train" was checked
    prompts = list(ranks.shard(_prompts(recipe, heldout, target)))
    drafter = new_drafter(recipe.drafter, target, sequences)
    require_unused(drafter.config.mask_token_id, target, sequences, heldout)
    batch = _with_features(recipe, batches, target, drafter, sequences)
    if drafter.config.elastic_blocks:
        batch = of_all_lengths(batch, drafter.block_size - 1, recipe.data.seed)

    folder = recipe.run.folder
    identity = {"recipe": to_dict(recipe), "dataset": dataset_fingerprint(sequences)}
    ranks.require_same(zlib.crc32(json.dumps(identity).encode()), "The processes have different recipes or datasets.")
    _announce(settings, batches, ranks)

    dtype = drafter_dtype(target)

    def loss(model: Any, batch: Batch) -> mx.array:
        checkpointed = recipe.run.grad_checkpoint
        head = drafter.target_head
        return drafter_loss(model, batch, recipe.objective, head, dtype=dtype, grad_checkpoint=checkpointed)

    listening: list[OnLog] = []
    if ranks.is_main:
        _begin(folder, identity, settings, config_of(drafter), drafter.token_ids)
        listening = listeners(recipe.run.callbacks, RunInfo(folder, identity["recipe"]), on_log)
        if not (folder / STATE).exists():
            _tell_evaluation_time(target, drafter, prompts, recipe)
    fit(
        drafter,
        batch,
        loss,
        settings,
        folder,
        _evaluation(recipe, target, drafter, prompts, heldout, ranks),
        score="acceptance_length",
        name_batch=batches.name,
        ranks=ranks,
        identity=identity,
        on_log=listening,
    )
    finished = folder / FINISHED
    if ranks.is_main:
        export(folder, finished, best=(folder / BEST).exists())
        logger.info("The drafter is in %s.", finished)
    return finished


def _announce(settings: FitSettings, batches: Batches, ranks: Ranks) -> None:
    """Say what the run consists of, and what is unlikely to be meant."""
    if warning := settings.optimizer.warning(settings.steps):
        logger.warning("%s", warning)
    logger.info(
        "%d sequences, %d batches, %d steps on %s, %d process(es).",
        len(batches.sequences),
        settings.steps * settings.batches_per_step,
        settings.steps,
        mx.default_device(),
        ranks.size,
    )


def _begin(
    folder: Path, identity: dict[str, Any], settings: FitSettings, config: dict[str, Any], token_ids: mx.array | None
) -> None:
    """Make ``folder`` this run's: refuse another run's, remove what killed processes left, write what a drafter needs.

    That is its config and, if it knows a part of the vocabulary, the tables of its ``token_ids``.
    """
    for name in (CONFIG, VOCABULARY, STATE, BEFORE_DECAY, BEST, LOG, *(f"{FINISHED}/{name}" for name in EXPORTED)):
        remove_unfinished(folder / name)
    if (folder / RECIPE).exists():
        require_same(folder, _recorded(folder), identity, _MAY_CHANGE)
        checkpoint_to_continue(folder, settings)  # or a run that cannot become this long would be recorded as if it had
        write_json(folder / RECIPE, identity)
    check_same_run(folder / RECIPE, identity)
    write_json(folder / CONFIG, config)
    if token_ids is not None:
        write_vocabulary(folder, token_ids, config["vocab_size"])


def _tell_evaluation_time(
    target: LoadedTargetModel, drafter: Drafter, prompts: list[list[int]], recipe: Recipe
) -> None:
    """Log how long an evaluation takes at most: a pass for every token, as with a drafter that is never right."""
    if not prompts or recipe.run.evaluate_tokens < 4:
        return
    begin = time.perf_counter()
    blocks = measure(target, drafter, prompts[:1], 4).blocks
    seconds = (time.perf_counter() - begin) / (blocks + 1) * len(prompts) * recipe.run.evaluate_tokens
    logger.info(
        "An evaluation decodes %d prompts of up to %d tokens: at most about %s, less as the drafter improves.",
        *(len(prompts), recipe.run.evaluate_tokens, duration(seconds)),
    )


def _with_features(
    recipe: Recipe,
    batches: Batches,
    target: LoadedTargetModel,
    drafter: DFlashDraftModel,
    sequences: Sequences,
) -> Callable[[int], Batch]:
    """Batches with the target's features, computed or read from the disk."""
    layer_ids, with_hidden = drafter.target_layer_ids, _needs_target_logits(recipe, drafter)
    if recipe.data.cached_features is None:
        return with_target_pass(batches, target, layer_ids, with_hidden)
    wanted = describe(recipe.data, sequences, target, layer_ids, with_hidden)
    return with_cached_features(batches, CachedFeatures(recipe.data.cached_features, wanted))


def of_all_lengths(batches: Callable[[int], Batch], most: int, seed: int) -> Callable[[int], Batch]:
    """``batches`` whose blocks hold 1 to ``most`` drafts, the same number in a batch, each as likely."""

    def batch(number: int) -> Batch:
        drafts = int(np.random.default_rng([seed, number, most]).integers(1, most, endpoint=True))
        return batches(number)._replace(drafts=drafts)

    return batch


def cache_features(recipe: Recipe, *, trust_remote_code: bool = False) -> Path:
    """Compute the features that a recipe trains on, or what is left of them, into its ``data.cached_features``.

    ``trust_remote_code`` is as in :func:`train`.

    Raises ``DFlashError`` if the recipe names no folder or one that cannot be written to, for bad
    data, for a folder of other features or that another process is writing to, and for a disk without room.
    """
    folder = recipe.data.cached_features
    if folder is None:
        raise TrainingError("The recipe does not say where the features go: set data.cached_features to a folder.")
    keep_freed_memory()
    target = load_target(recipe.target, trust_remote_code)
    sequences = open_dataset(recipe.data.folder, "train", target)
    drafter = new_drafter(recipe.drafter, target, sequences)
    with_hidden = _needs_target_logits(recipe, drafter)
    wanted = describe(recipe.data, sequences, target, drafter.target_layer_ids, with_hidden)
    with _own(folder, "data.cached_features"):
        write_features(folder, recipe.data, sequences, target, wanted)
    return folder


def _needs_target_logits(recipe: Recipe, drafter: DFlashDraftModel) -> bool:
    return recipe.objective.needs_target_logits or drafter.needs_target_logits


def _batches_needed(recipe: Recipe) -> int | None:
    return None if recipe.run.steps is None else recipe.run.steps * recipe.run.batches_per_step


def fit_settings(recipe: Recipe, batches: Batches, target: LoadedTargetModel) -> FitSettings:
    """The loop's settings; epochs become steps, of which the last may lack a few batches and is left out.

    Raises ``TrainingError`` if there are fewer batches than one step takes, or the target's
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
    shared = {field.name: getattr(run, field.name) for field in fields(LoopSettings)}
    return FitSettings(**(shared | {"steps": steps}), optimizer=recipe.optimizer)


def drafter_dtype(target: LoadedTargetModel) -> mx.Dtype:
    """What a new drafter computes in: bfloat16 beside a target that does, else float32 (float16 has too few exponents).

    A CPU loads every target as float32.
    """
    dtype = target.embed(mx.zeros((1, 1), mx.int32)).dtype
    return dtype if dtype == mx.bfloat16 else mx.float32


def _prompts(recipe: Recipe, heldout: Sequences, target: LoadedTargetModel) -> list[list[int]]:
    tokens = recipe.run.evaluate_tokens
    if target.max_length is not None and tokens >= target.max_length:
        raise TrainingError(
            f"run.evaluate_tokens {tokens} leaves no room for a prompt: the target takes {target.max_length} tokens in "
            "all. Lower run.evaluate_tokens."
        )
    longest = None if target.max_length is None else target.max_length - tokens
    return heldout_prompts(heldout, recipe.run.evaluate_prompts, longest)


def _evaluation(
    recipe: Recipe,
    target: LoadedTargetModel,
    drafter: DFlashDraftModel,
    prompts: list[list[int]],
    heldout: Sequences,
    ranks: Ranks,
) -> Callable[[], dict[str, Any]]:
    """All ranks' evaluation: decode the prompts, and score as many heldout sequences without decoding."""
    first = heldout.select(np.arange(len(heldout)) < recipe.run.evaluate_prompts)
    with_hidden, dtype = _needs_target_logits(recipe, drafter), drafter_dtype(target)
    batches = ranks.shard(heldout_batches(first, recipe.data, target, drafter.target_layer_ids, with_hidden))

    def evaluate() -> dict[str, Any]:
        bar = progress(prompts, "evaluate", show=ranks.is_main)
        own = measure(target, drafter, bar, recipe.run.evaluate_tokens)
        counts = [len(prompts), own.blocks, own.committed, *own.verified, *own.accepted]
        decoded, blocks, committed, *by_position = ranks.all_reduce_sum(np.array(counts))
        acceptance = Acceptance(int(blocks), int(committed), *np.split(np.array(by_position), 2))
        mine = heldout_scores(drafter, batches, recipe.objective, drafter.target_head, dtype)
        predicted = np.stack([mine.predictions, *mine.hits.values()])
        sums = ranks.all_reduce_sum(np.array([mine.loss, mine.weight, *predicted.flat]))
        predictions, *hits = sums[2:].reshape(predicted.shape)
        scores = Scores(float(sums[0]), float(sums[1]), predictions, dict(zip(mine.hits, hits, strict=True)))
        return acceptance.results() | {"prompts": int(decoded)} | scores.results()

    return evaluate
