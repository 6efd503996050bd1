"""Carries out a study: trains the missing drafters, then has the cells decode each prompt alternately.

Cells whose speed does not matter are scored on the target's texts where these say the same as decoding. Decoding holds
all drafters in memory. Every result is written at once, so that a study which was stopped continues there, a training
at its last checkpoint.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..core.environment import environment
from ..core.errors import DFlashError, TrainingError, one_line
from ..core.files import exclusive_lock, read_arrays, read_json, remove_unfinished, write_json
from ..core.progress import duration, progress
from ..drafters.protocol import Drafter
from ..drafters.rows import TextByText, for_batches
from ..evaluation.features import Features
from ..evaluation.replay import replay
from ..evaluation.runs import Run, Side, dflash_side, plain_side, time_side
from ..evaluation.texts import Texts
from ..generate import DFlashSpeculativeDecoder
from ..models import ModelOptions
from ..options import decode_options
from ..policies.threads import DecodeThreads, threads_for
from ..target import load_target
from ..training.loop.run_folder import read_log
from ..training.train import FINISHED as DRAFTER
from ..training.train import cache_features, train
from . import plugins
from .cache import FINISHED, Answer, plain_options
from .files import write_results
from .plan import Plan, PlannedCell
from .settings import Study, target_of

SESSIONS = "sessions.json"
_TIMED_BLOCK = 16  # tokens of the pass by which the number of BLAS threads is chosen

logger = logging.getLogger(__name__)


def ablate(study: Study, only: list[str] | None = None, *, trust_remote_code: bool = False) -> Plan:
    """Carry out what is left of a study; ``only`` are names of cells.

    ``trust_remote_code`` is as in :func:`~dflash.load_target`: no study can set it.

    Raises ``DFlashError`` for what cannot be decoded or a folder that another process is using, and
    ``KeyboardInterrupt`` after Ctrl-C, once the work in progress can be continued. For drafters that cannot be trained
    it is raised at the end, with the results of all other cells written.
    """
    plan = open_plan(study, only, trust_remote_code)  # refuses bad settings before the folder exists
    with exclusive_lock(study.folder):
        plugins.keep(study.folder, plan.plugins)
        failed = _train_missing(plan, trust_remote_code)
        trained = [cell.name for cell in plan.cells if cell.training not in failed]
        if trained:
            _answer_missing(Plan(study, plan.target, trained) if failed else plan)
    if failed:
        told = " ".join(failed.values())
        if trained:
            write_results(plan)
            told += f" The tables in {study.folder} have all other cells."
        raise DFlashError(told)
    return plan


def open_plan(study: Study, only: list[str] | None = None, trust_remote_code: bool = False) -> Plan:
    """The study's plan, with its target loaded, after a warning of plug-ins that changed. Raises ``DFlashError``."""
    plan = Plan(study, load_target(target_of(study), trust_remote_code), only or ())
    plugins.tell_changes(study.folder, plan.plugins)
    return plan


# --- training -------------------------------------------------------------------------------------------------


def _train_missing(plan: Plan, trust_remote_code: bool) -> dict[str, str]:
    """Train or finish each drafter that is not complete, and mark it complete; returns the errors of those that fail.

    They are by the training's key.
    """
    failed: dict[str, str] = {}
    for recipe in plan.feature_recipes():
        cache_features(recipe, trust_remote_code=trust_remote_code)
    missing = plan.untrained
    for number, key in enumerate(missing):
        cell = next(cell for cell in plan.cells if cell.training == key)
        logger.info("Training %d of %d: %s", number + 1, len(missing), cell)
        with _errors_name(cell):  # of what would stop every training
            try:
                train(plan.trainings[key], trust_remote_code=trust_remote_code)
            except TrainingError as error:
                failed[key] = f"Cell {cell}: {error}"
                logger.warning("%s", failed[key])
                continue
        done = _trained(plan.run_folder(key))
        remove_unfinished(plan.run_folder(key) / FINISHED)
        write_json(plan.run_folder(key) / FINISHED, done)
        mx.clear_cache()
        if number == 0 and len(missing) > 1 and done["seconds"] is not None:
            logger.info("Drafters left: %d; the first took %s.", len(missing) - 1, duration(done["seconds"]))
    return failed


def _trained(run: Path) -> dict[str, Any]:
    """What ``finished.json`` records of a training."""
    lines = read_log(run)
    weights, _ = read_arrays(run / DRAFTER / "model.safetensors")
    return {
        "seconds": max((line["seconds"] for line in lines if "seconds" in line), default=None),
        "steps": max((line["step"] for line in lines), default=None),
        "parameters": sum(w.size for w in weights.values()),
        "heldout_loss": next((line["heldout_loss"] for line in reversed(lines) if "heldout_loss" in line), None),
    }


# --- decoding -------------------------------------------------------------------------------------------------


def _answer_missing(plan: Plan) -> None:
    """Answer each prompt with the sides that have not answered it, alternately where speed is a question."""
    if not plan.turns():
        return
    threads = threads_for(plan.target, _TIMED_BLOCK)
    session = _begin_session(plan, threads)
    if not plan.study.plain:
        _score_missing(plan, session)
    if not (turns := plan.turns()):
        return
    logger.info("Decoding %d prompts by %d cells%s", len(turns), len(plan.cells), ", and plainly" * plan.study.plain)
    sides = _make_sides(plan, list(dict.fromkeys(key for _, keys in turns for key in keys)))
    answers = {key: plan.answers(key) for key in sides}
    for key, side in sides.items():
        _time(side, turns[0][0].tokens, plan.sides[key])  # uncounted: it compiles, and makes arrays
    for prompt, keys in progress(turns, "decode", len(turns)):
        with threads.in_use():  # the same number for all sides
            for key in keys:
                answers[key].keep(prompt.key, Answer.of(_time(sides[key], prompt.tokens, plan.sides[key]), session))


def _score_missing(plan: Plan, session: str) -> None:
    """Score cells on the target's texts, untimed, where decoding would say the same and the drafter learns nothing."""
    kept = Texts(plan.target)
    features = Features(kept)
    for key, planned in plan.sides.items():
        asked, answers = decode_options(planned.cell.options), plan.answers(key)
        left = [prompt for prompt in plan.prompts if prompt.key not in answers]
        if not left or not asked.on_texts or asked.stop_token_ids is not None:
            continue
        decoder = _decoder(plan, planned, {})
        if isinstance(for_batches(decoder.draft_model), TextByText):  # it may learn from text to text
            continue
        most = planned.cell.options["max_tokens"]
        left = [prompt for prompt in left if len(prompt.tokens) + most <= decoder.max_seq_length]
        with _errors_name(planned):
            texts = kept.all([prompt.tokens for prompt in left], most)
            found = progress(replay([decoder], texts, features=features), "score", len(left))
            for prompt, text, (blocks,) in zip(left, texts, found, strict=True):
                answers.keep(prompt.key, Answer.on_text(text, blocks, session))


def _make_sides(plan: Plan, keys: list[str]) -> dict[str, Side]:
    """What answers for each key. Cells that differ only in their options share a drafter."""
    drafters: dict[ModelOptions, Drafter] = {}
    sides = {}
    for key in keys:
        planned = plan.sides[key]
        options = dict(planned.cell.options)
        most, temperature = options.pop("max_tokens"), options.pop("temp", 0.0)
        if key == planned.plain:
            asked = decode_options(plain_options(planned.cell))
            ways = asked.build_sampler(plan.target.tokenizer), asked.build_processors() or None
            sides[key] = plain_side(plan.target, most, plan.target.max_length, *ways)
        else:
            decoder = _decoder(plan, planned, drafters)
            sides[key] = dflash_side(decoder, most, temperature, decoder.max_seq_length, **options)
    return sides


def _decoder(plan: Plan, planned: PlannedCell, drafters: dict[ModelOptions, Drafter]) -> DFlashSpeculativeDecoder:
    """The cell's decoder; its drafter is one of ``drafters``, or is loaded and added to them."""
    who = planned.cell.drafter
    chosen = ModelOptions(**who | {"block_size": None})
    if planned.training is not None:
        chosen = replace(chosen, drafter=plan.run_folder(planned.training) / DRAFTER)
    if chosen not in drafters:
        drafters[chosen] = chosen.load_drafter(None)
    return DFlashSpeculativeDecoder(plan.target, drafters[chosen], block_size=who.get("block_size"))


def _time(side: Side, tokens: list[int], planned: PlannedCell) -> Run:
    seed = planned.cell.options.get("seed")
    if seed is not None:
        mx.random.seed(seed)
    with _errors_name(planned):
        return time_side(side, tokens)


@contextmanager
def _errors_name(planned: PlannedCell) -> Iterator[None]:
    try:
        yield
    except DFlashError as error:
        raise DFlashError(f"Cell {planned}: {one_line(error)}") from error


def _begin_session(plan: Plan, threads: DecodeThreads) -> str:
    """Record the environment of this process under a name, which is returned."""
    path = plan.folder / SESSIONS
    sessions = read_json(path) if path.exists() else {}
    here = environment(threads)
    name = f"{here['date']} #{len(sessions) + 1}"
    remove_unfinished(path)
    write_json(path, sessions | {name: here})
    return name
