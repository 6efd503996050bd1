"""How long what is left of a study will take.

Knows what finished cells took, and short trials where there are none. Must not know how results are shown.
"""

import dataclasses
import logging
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from ..training.batches import Batches
from ..training.data.dataset import open_dataset
from ..training.features import describe, tokens_left, with_target_pass
from ..training.loop.run_folder import STATE, read_log, read_progress
from ..training.recipe import Recipe
from ..training.train import train
from .ablation import make_plain
from .plan import Plan

_TRIAL_STEPS, _TRIAL_TOKENS = 4, 24


@dataclass(frozen=True)
class CellState:
    """What is there of a cell: ``steps`` done of ``of_steps`` of its training (0: none is needed), and answers."""

    name: str
    steps: int
    of_steps: int
    answers: int
    of_answers: int


@dataclass(frozen=True)
class Expected:
    """Seconds that are left, and what each figure comes from."""

    training: float
    training_from: str
    decoding: float
    decoding_from: str


def cell_states(plan: Plan) -> list[CellState]:
    """What is done of each cell, in their order."""
    states = []
    for planned in plan.cells:
        steps = of_steps = 0
        if planned.training is not None:
            steps, of_steps = _steps_done(plan, planned.training), _steps(plan.trainings[planned.training])
        kept = plan.answers(planned.answers)
        done = sum(prompt.key in kept for prompt in plan.prompts)
        states.append(CellState(planned.name, min(steps, of_steps), of_steps, done, len(plan.prompts)))
    return states


def expected_time(plan: Plan) -> Expected:
    """What is left, by the speed of finished cells; without any, by a trial of some steps and tokens."""
    return Expected(*_training_time(plan), *_decoding_time(plan))


def _training_time(plan: Plan) -> tuple[float, str]:
    missing = [key for key in plan.trainings if plan.finished(key) is None]
    if not missing:
        return 0.0, "nothing is left to train"
    finished = [done for key in plan.trainings if (done := plan.finished(key)) and done["seconds"] and done["steps"]]
    if finished:
        each, source = (
            statistics.fmean(done["seconds"] / done["steps"] for done in finished),
            f"{len(finished)} finished training(s)",
        )
    else:
        each, source = _trial_step(plan.trainings[missing[0]]), f"a trial of {_TRIAL_STEPS} steps of the first cell"
    left = sum(_steps(plan.trainings[key]) - _steps_done(plan, key) for key in missing)
    seconds, tokens = _features_time(plan, missing)
    cached = f"; {tokens} tokens of features, {seconds:.2g} s" if tokens else ""
    return each * left + seconds, f"{left} steps of {each:.2g} s, from {source}{cached}"


def _features_time(plan: Plan, missing: Sequence[str]) -> tuple[float, int]:
    """Seconds, by the time of one batch, and tokens of the target's passes that ``missing`` trainings have cached."""
    seconds, total = 0.0, 0
    for folder, key in plan.caches(missing).items():
        data = plan.trainings[key].data
        sequences = open_dataset(data.folder, "train", None)
        wanted = describe(data, sequences, plan.target, *plan.reads[key])
        tokens = tokens_left(folder, data, sequences, wanted)
        if tokens:
            batches = Batches(sequences, data, epochs=1)
            batch = with_target_pass(batches, plan.target, *plan.reads[key])
            batch(0)  # uncounted: it compiles, and makes arrays
            begin = time.perf_counter()
            read = batch(0).tokens.size
            seconds, total = seconds + (time.perf_counter() - begin) / read * tokens, total + tokens
    return seconds, total


def _steps(recipe: Recipe) -> int:
    """Steps of a run, which without ``run.steps`` the data decides."""
    if recipe.run.steps is not None:
        return recipe.run.steps
    sequences = open_dataset(recipe.data.folder, "train", None).first(recipe.data.sequences)
    return len(Batches(sequences, recipe.data, recipe.run.epochs)) // recipe.run.batches_per_step


def _steps_done(plan: Plan, key: str) -> int:
    if plan.finished(key) is not None:
        return _steps(plan.trainings[key])
    return read_progress(plan.run_folder(key) / STATE).step


def _trial_step(recipe: Recipe) -> float:
    """Seconds of a step of the loop itself, in a folder that is removed again."""
    logger = logging.getLogger("dflash")
    level = logger.level
    logger.setLevel(logging.ERROR)  # the trial is no run that anybody would follow
    try:
        with tempfile.TemporaryDirectory() as folder:
            run = dataclasses.replace(
                recipe.run,
                folder=Path(folder) / "trial",
                steps=_TRIAL_STEPS,
                log_every=1,
                evaluate_prompts=1,
                evaluate_tokens=4,
                callbacks=(),
            )
            data = dataclasses.replace(recipe.data, cached_features=None)
            train(dataclasses.replace(recipe, run=run, data=data), on_log=lambda line: None)
            times = [line["seconds"] for line in read_log(run.folder) if "loss" in line]
    finally:
        logger.setLevel(level)
    return float((times[-1] - times[0]) / (len(times) - 1))


def _decoding_time(plan: Plan) -> tuple[float, str]:
    kept = {key: plan.answers(key) for key in plan.sides}
    missing = {key: sum(p.key not in known for p in plan.prompts) for key, known in kept.items()}
    missing = {key: count + 1 for key, count in missing.items() if count}  # and a warm-up
    if not missing:
        return 0.0, "nothing is left to decode"
    seconds = {key: [known[p.key].seconds for p in plan.prompts if p.key in known] for key, known in kept.items()}
    all_seconds = [value for values in seconds.values() for value in values]
    answers = sum(missing.values())
    counted = f"{answers - len(missing)} answers and {len(missing)} warm-ups"
    if not all_seconds:
        most = max(cell.cell.options["max_tokens"] for cell in plan.cells)
        each = _trial_token(plan) * most
        size = f"at most {each:.2g} s ({most} tokens, the cells' max_tokens)"
        return each * answers, f"{counted} of {size}, from {_TRIAL_TOKENS} tokens decoded plainly"
    mean = statistics.fmean(all_seconds)
    total = sum(count * (statistics.fmean(seconds[key]) if seconds[key] else mean) for key, count in missing.items())
    return total, f"{counted} of {total / answers:.2g} s, from {len(all_seconds)} finished answers"


def _trial_token(plan: Plan) -> float:
    """Seconds of a token of plain decoding after the first, on the first prompt."""
    side = make_plain(plan, plan.cells[0])
    times = [time.perf_counter() for _ in islice(side(plan.prompts[0].tokens), _TRIAL_TOKENS)]
    return (times[-1] - times[0]) / max(1, len(times) - 1)
