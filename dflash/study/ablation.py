"""A study carried out: drafters trained that are not there yet, then every prompt decoded by each cell in turns.

Knows the training loop and timed decoding, and the order of things. Must not know tables, plots or the command line.

On each prompt all cells take their turn, another one first on each, so that a machine that grows slower or warmer
does so for all alike. All drafters are in memory for that. Everything is kept as soon as it is there; given again, a
study goes on where it was stopped, trainings at their last checkpoint.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..core.environment import environment
from ..core.errors import DFlashError, one_line
from ..core.files import atomic_write, exclusive_lock, remove_unfinished, write_json
from ..core.progress import progress
from ..drafters.checkpoints.checkpoint import load_drafter
from ..evaluation.runs import Side, dflash_side, plain_side, time_side
from ..generate import DFlashSpeculativeDecoder
from ..options import decode_options
from ..policies.threads import DecodeThreads, threads_for
from ..target import load_target
from ..training.loop.run_folder import read_log
from ..training.recipe import Recipe
from ..training.train import FINISHED as DRAFTER
from ..training.train import cache_features, train
from .answers import Answer, Answers
from .identity import plain_options
from .plan import FINISHED, Plan, PlannedCell, drafter_source
from .settings import Study, target_of

SESSIONS = "sessions.json"
_TIMED_BLOCK = 16  # tokens of the pass by which the number of BLAS threads is chosen

logger = logging.getLogger(__name__)


def ablate(study: Study, only: list[str] | None = None, *, trust_remote_code: bool = False) -> Plan:
    """Carry out what is left of a study; ``only`` are names of cells.

    ``trust_remote_code`` is as in :func:`~dflash.load_target`: no study can set it.

    Raises ``DFlashError`` for what cannot be trained or decoded or a folder that another process
    is using, and ``KeyboardInterrupt`` after Ctrl-C, once what is under way can be continued.
    """
    plan = open_plan(study, only, trust_remote_code)  # refuses what cannot be before there is a folder
    with exclusive_lock(study.folder):
        train_missing(plan, trust_remote_code)
        decode_missing(plan)
    return plan


def open_plan(study: Study, only: list[str] | None = None, trust_remote_code: bool = False) -> Plan:
    """The study's plan, with its target loaded. Raises ``DFlashError``."""
    return Plan(study, load_target(target_of(study), trust_remote_code), only or ())


# --- training -------------------------------------------------------------------------------------------------


def train_missing(plan: Plan, trust_remote_code: bool = False) -> None:
    """Train each drafter that is not complete, one after the other."""
    missing = [key for key in plan.trainings if plan.finished(key) is None]
    for training in plan.caches(missing).values():
        cache_features(plan.trainings[training], trust_remote_code=trust_remote_code)
    for number, key in enumerate(missing, 1):
        cell = next(cell for cell in plan.cells if cell.training == key)
        logger.info("Training %d of %d: %s", number, len(missing), cell)
        train_one(plan, key, plan.trainings[key], trust_remote_code)


def train_one(plan: Plan, key: str, recipe: Recipe, trust_remote_code: bool = False) -> None:
    """Train one drafter, or what is left of it, and mark it complete."""
    folder = plan.run_folder(key)
    train(recipe, trust_remote_code=trust_remote_code)
    lines = read_log(folder)
    weights = mx.load(str(folder / DRAFTER / "model.safetensors"))
    assert isinstance(weights, dict)
    done = {
        "seconds": max((line["seconds"] for line in lines if "seconds" in line), default=None),
        "steps": max((line["step"] for line in lines), default=None),
        "parameters": sum(w.size for w in weights.values()),
        "heldout_loss": next((line["heldout_loss"] for line in reversed(lines) if "heldout_loss" in line), None),
    }
    remove_unfinished(folder / FINISHED)
    write_json(folder / FINISHED, done)
    mx.clear_cache()


# --- decoding -------------------------------------------------------------------------------------------------


def decode_missing(plan: Plan) -> None:
    """Answer every prompt by each side that has not answered it, in turns."""
    answers = {key: plan.answers(key) for key in plan.sides}
    turns = [(prompt, _missing(prompt.key, answers, number)) for number, prompt in enumerate(plan.prompts)]
    turns = [(prompt, keys) for prompt, keys in turns if keys]
    if not turns:
        return
    threads = threads_for(plan.target, _TIMED_BLOCK)
    session = _begin_session(plan, threads)
    missing = dict.fromkeys(key for _, keys in turns for key in keys)
    logger.info("Decoding %d prompts by %d cells%s", len(turns), len(plan.cells), ", and plainly" * plan.study.plain)
    sides = make_sides(plan, list(missing))
    for key, side in sides.items():
        _run(side, turns[0][0].tokens, plan.sides[key])  # uncounted: it compiles, and makes arrays
    for prompt, keys in progress(turns, "decode", len(turns)):
        with threads.in_use():  # the same number for all sides
            for key in keys:
                answers[key].keep(prompt.key, _run(sides[key], prompt.tokens, plan.sides[key], session))


def _missing(prompt: str, answers: Mapping[str, Answers], number: int) -> list[str]:
    """The sides that have not answered ``prompt``, in the order of their turns."""
    keys = list(answers)
    first = number % len(keys)
    return [key for key in keys[first:] + keys[:first] if prompt not in answers[key]]


def make_sides(plan: Plan, keys: list[str]) -> dict[str, Side]:
    """How each side answers. Cells that differ in their options alone share a drafter."""
    drafters: dict[tuple[Any, ...], Any] = {}
    sides = {}
    for key in keys:
        planned = plan.sides[key]
        if key == planned.plain:
            sides[key] = make_plain(plan, planned)
            continue
        who = dict(planned.cell.drafter)
        loaded = (drafter_path(plan, planned), who.get("draft_bits"), who.get("draft_window"))
        if loaded not in drafters:
            drafters[loaded] = load_drafter(*loaded)
        decoder = DFlashSpeculativeDecoder(plan.target, drafters[loaded], block_size=who.get("block_size"))
        options = dict(planned.cell.options)
        most, temperature = options.pop("max_tokens"), options.pop("temp", 0.0)
        sides[key] = dflash_side(decoder, most, temperature, decoder.max_seq_length, **options)
    return sides


def make_plain(plan: Plan, planned: PlannedCell) -> Side:
    """How plain mlx_lm answers with the cell's options of sampling."""
    asked = decode_options(plain_options(planned.cell))
    ways = asked.build_sampler(), asked.build_processors() or None
    return plain_side(plan.target, planned.cell.options["max_tokens"], plan.target.max_length, *ways)


def drafter_path(plan: Plan, planned: PlannedCell) -> str | Path:
    """Where the drafter of a cell is loaded from."""
    if planned.training is not None:
        return plan.run_folder(planned.training) / DRAFTER
    return drafter_source(str(planned.cell.drafter["drafter"]))


def _run(side: Side, tokens: list[int], planned: PlannedCell, session: str = "") -> Answer:
    seed = planned.cell.options.get("seed")
    if seed is not None:
        mx.random.seed(seed)
    try:
        return Answer.of(time_side(side, tokens), session)
    except DFlashError as error:
        raise DFlashError(f"Cell {planned}: {one_line(error)}") from error


def _begin_session(plan: Plan, threads: DecodeThreads) -> str:
    """Record on what this process measures; returns its name."""
    path = plan.folder / SESSIONS
    sessions = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    here = environment(threads)
    name = f"{here['date']} #{len(sessions) + 1}"
    remove_unfinished(path)
    text = json.dumps(sessions | {name: here}, indent=1)
    atomic_write(path, lambda file: file.write_text(text + "\n", encoding="utf-8"))
    return name
