"""A complete recipe for one target: layers to read, mask token, batches that fit this machine, expected time."""

import logging
import math
import textwrap
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import yaml

from dflash import DFlashDraftModel, LoadedTargetModel, load_target
from dflash.core.backend import machine_memory
from dflash.core.errors import TrainingError
from dflash.core.files import flat
from dflash.core.progress import duration
from dflash.drafters.checkpoints.config import spread_layer_ids

from ..core.settings import settings_help, to_dict, with_overrides
from .batches import Batches
from .cpu import forward_hidden
from .data.dataset import open_dataset, read_manifest
from .data.mask_token import unused_tokens
from .data.sequences import Sequences
from .drafters.init import new_drafter
from .drafters.loss import Batch, drafter_loss
from .recipe import DataSettings, DrafterShape, Recipe, RunSettings
from .train import drafter_dtype

logger = logging.getLogger(__name__)

_PART = 0.75  # of the machine's memory: other programs and fragments need some too
_LAYER_AT_WORK = 3.55  # what a layer holds in its forward and backward pass, in units of its forward values
_TRIAL_TOKENS, _TRIAL_ANCHORS = 256, 16
_LINES = 10  # of a short run's log, at least
_FEW_STEPS = 100
QUICK_SECONDS = 180
QUICK = (
    "drafter.num_hidden_layers=1", "data.anchors=16", "data.max_blocks_per_batch=32", "run.batches_per_step=1",
    "run.evaluate_prompts=8", "run.evaluate_tokens=32",
)  # fmt: skip
_PROPOSED = "the proposed recipe"  # in errors


@dataclass(frozen=True)
class Proposal:
    """A recipe with the reasons for its values, by dotted key, and lines on its memory and time."""

    recipe: Recipe
    reasons: dict[str, str]
    estimates: list[str]


def propose_recipe(
    target: str,
    data: Path | None = None,
    run: Path | None = None,
    overrides: Sequence[str] = (),
    trust_remote_code: bool = False,
    quick: bool = False,
) -> Proposal:
    """A recipe for ``target`` (a folder or a hub name), and what it costs on this machine.

    With ``data``, a dataset made by ``dflash prepare``, sequence lengths follow the data and the mask token is one that
    the data does not contain. ``overrides`` are settings such as ``"drafter.num_hidden_layers=2"``; the rest of the
    recipe is chosen to go with them. A ``quick`` one trains for about :data:`QUICK_SECONDS` in small steps, to try what
    that does. ``trust_remote_code`` is as in :func:`~dflash.load_target`.

    Raises ``DFlashError`` for a target or dataset that cannot be used, and
    :class:`~dflash.core.settings.SettingsError` for an impossible override.
    """
    overrides = [*(QUICK if quick else ()), *overrides]
    check_overrides(overrides)
    if data is not None:
        read_manifest(data)  # before the target loads, which may take minutes
    loaded = load_target(target, trust_remote_code)
    sequences = None if data is None else open_dataset(data, "train", loaded)
    name = Path(target).resolve().name.lower()
    reasons: dict[str, str] = {}
    given = {override.partition("=")[0].strip() for override in overrides}
    drafter = _shape(loaded, sequences, reasons, given)
    settings = _data_settings(data or Path("data") / name, loaded, sequences, reasons)
    checked = Recipe(target, settings, RunSettings(folder=run or Path("runs") / name), drafter)
    checked = with_overrides(checked, overrides, _PROPOSED)
    if "drafter.window" not in given and checked.drafter.from_ is None:
        checked = replace(checked, drafter=replace(checked.drafter, window=checked.data.max_length))
        reasons["drafter.window"] = "data.max_length: training shows no longer context, and drafts in one are worse"
    model = new_drafter(checked.drafter, loaded, sequences)
    checked = _fitting(checked, loaded, model, reasons, overrides)
    batch_seconds = _trial(checked, loaded, model)
    if quick and "run.steps" not in given:
        steps = max(_FEW_STEPS, int(QUICK_SECONDS / batch_seconds / checked.run.batches_per_step))
        checked = replace(checked, run=replace(checked.run, steps=steps))
        reasons["run.steps"] = f"for about {duration(QUICK_SECONDS)} of training"
    if sequences is not None:
        checked = with_overrides(_paced(checked, sequences, reasons), overrides, _PROPOSED)
    for name in given:
        reasons.pop(name, None)
    estimates = [_memory_line(training_memory(checked, loaded, model)), _time_line(checked, batch_seconds, sequences)]
    return Proposal(checked, reasons, estimates)


def check_overrides(overrides: Sequence[str]) -> None:
    """Raise ``SettingsError`` for settings that no recipe takes, whatever its target."""
    with_overrides(Recipe("target", DataSettings(Path("data")), RunSettings(folder=Path("run"))), overrides, _PROPOSED)


def _shape(
    target: LoadedTargetModel, sequences: Sequences | None, reasons: dict[str, str], given: Collection[str]
) -> DrafterShape:
    if "drafter.from" in given:
        return DrafterShape()  # that drafter's own
    layers = max(1, min(5, target.num_layers // 4))
    taps = spread_layer_ids(target.num_layers, min(5, max(1, target.num_layers - 4), target.num_layers))
    taps = tuple(sorted(set(taps)))
    reasons["drafter.num_hidden_layers"] = f"the target has {target.num_layers}"
    reasons["drafter.target_layer_ids"] = f"evenly spread over {target.num_layers} layers"
    if "drafter.mask_token" in given:
        return DrafterShape(num_hidden_layers=layers, target_layer_ids=taps)
    unused = unused_tokens(target, *([] if sequences is None else [sequences]))
    if not unused:
        raise TrainingError(
            "Every token of this target occurs in text, so there is no mask token. Set drafter.mask_token to one that "
            "your data does not hold, or add a special token to its tokenizer, with a row in the embedding."
        )
    mask = unused[0]
    reasons["drafter.mask_token"] = (
        f"no text uses {mask}" if sequences is None else f"neither the tokenizer nor the dataset uses {mask}"
    )
    return DrafterShape(num_hidden_layers=layers, target_layer_ids=taps, mask_token=mask.text or mask.id)


def _data_settings(
    folder: Path, target: LoadedTargetModel, sequences: Sequences | None, reasons: dict[str, str]
) -> DataSettings:
    limit = min(3072, target.max_length or 3072)
    if sequences is not None and len(sequences):
        longest = int(sequences.lengths.max())
        limit = min(limit, math.ceil(longest / 64) * 64)
        reasons["data.max_length"] = f"the longest sequence has {longest} tokens"
    elif target.max_length is not None and target.max_length < 3072:
        reasons["data.max_length"] = f"the target takes {target.max_length} tokens"
    return DataSettings(folder, max_length=limit, batch_tokens=limit)


def _fitting(
    recipe: Recipe,
    target: LoadedTargetModel,
    drafter: DFlashDraftModel,
    reasons: dict[str, str],
    overrides: Sequence[str],
) -> Recipe:
    """``recipe`` with the most blocks per batch that fit in this machine's memory, and 8192 blocks per step."""
    reasons["run.grad_checkpoint"] = reasons["data.max_blocks_per_batch"] = "for this machine's memory"
    for blocks in (1024, 512, 256, 128, 64, 32):
        for checkpointed in (False, True):
            tried = replace(
                recipe,
                data=replace(recipe.data, max_blocks_per_batch=blocks, anchors=min(512, blocks)),
                run=replace(recipe.run, batches_per_step=8 * 1024 // blocks, grad_checkpoint=checkpointed),
            )
            tried = with_overrides(tried, overrides, _PROPOSED)
            peak = training_memory(tried, target, drafter).peak
            if peak <= _PART * machine_memory():
                reasons["run.batches_per_step"] = "so that a step has 8192 blocks, as with larger batches"
                return tried
    raise TrainingError(
        f"Training for this target needs {peak / 1e9:.0f} GB even with small batches; "
        f"this machine has {machine_memory() / 1e9:.0f} GB. Use a quantised target or a larger machine."
    )


def _paced(recipe: Recipe, sequences: Sequences, reasons: dict[str, str]) -> Recipe:
    """``recipe`` that logs and evaluates on the way, however few its steps; warns if the data makes few."""
    batches = len(Batches(sequences, recipe.data, recipe.run.epochs))
    per_step = min(recipe.run.batches_per_step, batches)
    if per_step < recipe.run.batches_per_step:
        reasons["run.batches_per_step"] = f"the data makes {batches} in {recipe.run.epochs} epochs"
    from_data = batches // per_step
    if from_data < _FEW_STEPS:
        found = f"{from_data} step{'' if from_data == 1 else 's'} in {recipe.run.epochs} epochs"
        logger.warning("The data makes %s: so little data teaches a drafter little.", found)
    steps = recipe.run.steps or from_data
    log_every = min(recipe.run.log_every, max(1, steps // _LINES))
    evaluate_every = min(recipe.run.evaluate_every, math.ceil(steps / 2))
    run = replace(recipe.run, batches_per_step=per_step, log_every=log_every, evaluate_every=evaluate_every)
    for name in ("log_every", "evaluate_every"):
        if getattr(run, name) < getattr(recipe.run, name):
            reasons[f"run.{name}"] = f"the run has {steps} steps"
    return replace(recipe, run=run)


# --- memory -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Memory:
    """Bytes of one training run, part by part."""

    target: int
    drafter: int
    batch: int
    update: int

    @property
    def peak(self) -> int:
        """The most that exists at once: a batch and the update follow each other."""
        return self.target + self.drafter + max(self.batch, self.update)


def training_memory(recipe: Recipe, target: LoadedTargetModel, drafter: DFlashDraftModel) -> Memory:
    """The memory that ``recipe`` takes, by the arithmetic of the comments in ``configs/``.

    Weights, gradients and moments are float32.
    """
    config, value_bytes = drafter.config, drafter_dtype(target).size
    parameters = sum(weight.size for weight in flat(drafter.parameters()).values())
    heads, kv_heads = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    widths = 8 * config.hidden_size + 3 * heads + 4 * kv_heads + 4 * config.intermediate_size
    positions = recipe.data.max_blocks_per_batch * config.block_size
    layer = int(_LAYER_AT_WORK * positions * widths * value_bytes)
    inputs = positions * config.hidden_size * config.num_hidden_layers * value_bytes
    layers = inputs + layer if recipe.run.grad_checkpoint else config.num_hidden_layers * layer
    logits = 3 * recipe.objective.chunk * (config.draft_vocab_size or config.vocab_size) * 4
    features = recipe.data.batch_tokens * len(config.target_layer_ids) * config.hidden_size * value_bytes
    return Memory(
        target=sum(weight.nbytes for weight in flat(target.model.parameters()).values()),
        drafter=(20 if recipe.run.batches_per_step > 1 else 16) * parameters,  # a step of several batches has a sum
        batch=layers + logits + features + (value_bytes * parameters if value_bytes < 4 else 0),
        update=12 * parameters,
    )


def _memory_line(memory: Memory) -> str:
    gigabytes = [part / 1e9 for part in (memory.peak, memory.target, memory.drafter, memory.batch)]
    return (
        "Memory, by arithmetic: about {:.1f} GB at the peak (target {:.1f}, drafter with gradients and moments {:.1f}, "
        "a batch {:.1f}); this machine has {:.1f} GB.".format(*gigabytes, machine_memory() / 1e9)
    )


# --- time ---------------------------------------------------------------------------------------------------


def _trial(recipe: Recipe, target: LoadedTargetModel, model: Any) -> float:
    """Seconds of a batch as large as the recipe allows, extrapolated from a small one."""
    length = min(_TRIAL_TOKENS, recipe.data.max_length)
    tokens = mx.random.randint(0, target.vocab_size, (1, length), key=mx.random.key(0))
    anchors = mx.arange(_TRIAL_ANCHORS)[None] * max(1, (length - recipe.drafter.block_size) // _TRIAL_ANCHORS)
    dtype = drafter_dtype(target)

    def target_pass() -> tuple[mx.array, mx.array]:
        return forward_hidden(target, tokens, model.target_layer_ids)

    hidden, features = target_pass()
    batch = Batch(tokens, mx.ones((1, length), mx.bool_), anchors, features, hidden)
    gradient = nn.value_and_grad(
        model, lambda model: drafter_loss(model, batch, recipe.objective, model.target_head, dtype=dtype)
    )
    target_seconds, batch_seconds = _fastest(target_pass), _fastest(gradient, model)
    more = recipe.data.max_blocks_per_batch / _TRIAL_ANCHORS
    return target_seconds * recipe.data.batch_tokens / length + batch_seconds * more


def _fastest(function: Any, *arguments: Any) -> float:
    """Seconds of the faster of two calls; the first one also compiles."""
    seconds = []
    for _ in range(2):
        begin = time.perf_counter()
        mx.eval(function(*arguments))
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def training_seconds(recipe: Recipe, target: LoadedTargetModel, sequences: Sequences | None = None) -> float:
    """Roughly how many seconds a recipe takes, without evaluations, by a short measurement.

    It trains on ``sequences``, or on its dataset.
    """
    sequences = sequences or open_dataset(recipe.data.folder, "train", target)
    batches = recipe.run.batches_per_step * (recipe.run.steps or 0)
    batches = batches or len(Batches(sequences, recipe.data, recipe.run.epochs))
    return batches * _trial(recipe, target, new_drafter(recipe.drafter, target, sequences))


def _time_line(recipe: Recipe, batch_seconds: float, sequences: Sequences | None) -> str:
    step = batch_seconds * recipe.run.batches_per_step
    full = f"{recipe.run.batches_per_step} full batches"
    measured = f"Time: a step of {full} takes about {duration(step)}, by measuring a small one"
    if sequences is None:
        tokens = recipe.data.batch_tokens / batch_seconds
        return f"{measured}; {duration(1e6 / tokens)} for a million tokens, without evaluations."
    batches, of = len(Batches(sequences, recipe.data, recipe.run.epochs)), f" in {recipe.run.epochs} epochs"
    if recipe.run.steps is not None:
        batches, of = recipe.run.steps * recipe.run.batches_per_step, ""
    steps, total = batches // recipe.run.batches_per_step, duration(batches * batch_seconds)
    return f"{measured}; {steps} steps{of}, at most about {total}, without evaluations."


# --- text ---------------------------------------------------------------------------------------------------


def as_yaml(proposal: Proposal) -> str:
    """The recipe as a file with every setting and its meaning, or the reason for its value."""
    recipe = proposal.recipe
    help_of: dict[str, str] = {}
    for field in fields(recipe):
        value = getattr(recipe, field.name)
        if is_dataclass(value):
            help_of |= {line.key: line.meaning for line in settings_help(type(value), f"{field.name}.")}
    help_of |= proposal.reasons
    lines = [
        *_comment(
            f"A DFlash drafter for {recipe.target}, written by `dflash recipe`. Every setting is here; all but target, "
            "data.folder and run.folder may be left out."
        ),
        *(line for estimate in proposal.estimates for line in _comment(estimate)),
        "#",
        f"#   dflash prepare PROMPTS.jsonl --target {recipe.target} --output {recipe.data.folder}",
        "#   dflash train THIS_FILE.yaml",
    ]
    for section, values in to_dict(recipe).items():
        if not isinstance(values, dict):
            lines.append(f"{section}: {_inline(values)}")
            continue
        lines += ["", f"{section}:"]
        for key, value in values.items():
            setting, meaning = f"  {key}: {_inline(value)}", help_of.get(f"{section}.{key}")
            lines.append(f"{setting:<34}  # {meaning}" if meaning else setting)
    return "\n".join(lines) + "\n"


def _inline(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("\n").removesuffix("\n...")


def _comment(text: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(text, 110)]
