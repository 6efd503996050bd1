"""The toy target, trained from nothing: first its tokenizer, then the model.

    python -m dflash.training.toy.small_target configs/pair-target.yaml

After an interruption the same command does what is left.
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from tokenizers import Tokenizer

from dflash.core.backend import keep_freed_memory
from dflash.core.errors import DFlashError
from dflash.core.files import exclusive_lock
from dflash.decoding.responses import generate_responses

from ...core.settings import load_settings, to_dict
from ..data.sequences import Sequences
from ..identity import check_same_run
from ..loop.fit import fit
from .target import (
    TargetSettings,
    answer_loss,
    build_target,
    model_config,
    save_target,
    target_batches,
)
from .tasks import check_answers, samples
from .tokenizer import END, encode_answer, encode_prompt, save_tokenizer, token_id, train_tokenizer

logger = logging.getLogger(__name__)

RECIPE, MAY_CHANGE = "recipe.json", {"folder", "target.fit.log_every", "target.fit.checkpoint_every"}

LONGEST = 4096
"""Tokens: the tokenizer's ``model_max_length`` where the target's config sets none."""


@dataclass(frozen=True)
class TokenizerSettings:
    """What the tokenizer learns from."""

    samples: int
    seed: int
    vocab_size: int


@dataclass(frozen=True)
class HeldoutSettings:
    """Requests for evaluation: combinations of operations that no training request has."""

    samples: int
    seed: int
    max_tokens: int = 320


@dataclass(frozen=True)
class SmallTargetSettings:
    """One complete recipe. Its ``folder`` receives ``tokenizer``, then ``fit-target``, then ``target``."""

    folder: Path
    tokenizer: TokenizerSettings
    target: TargetSettings
    heldout: HeldoutSettings


def tokenizer_stage(settings: SmallTargetSettings) -> Tokenizer:
    """Learn the tokenizer, or read it if it is there."""
    folder = settings.folder / "tokenizer"
    if not (folder / "tokenizer_config.json").exists():
        requests = samples(settings.tokenizer.seed, settings.tokenizer.samples, "train")
        texts = (text for sample in requests for text in (sample.prompt, sample.answer))
        tokenizer = train_tokenizer(texts, settings.tokenizer.vocab_size)
        save_tokenizer(tokenizer, folder, settings.target.config.get("max_position_embeddings", LONGEST))
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def accuracy(model: nn.Module, tokenizer: Tokenizer, settings: HeldoutSettings) -> dict[str, float]:
    """Fraction of the held-out requests that greedy decoding answers correctly, over all and by kind."""
    requests = list(samples(settings.seed, settings.samples, "heldout"))
    prompts = [encode_prompt(tokenizer, sample.prompt) for sample in requests]
    responses = generate_responses(model, prompts, [token_id(tokenizer, END)], [settings.max_tokens] * len(prompts))
    texts = [tokenizer.decode(response, skip_special_tokens=True) for _, response in sorted(responses)]
    right = check_answers([(text, sample.check) for text, sample in zip(texts, requests, strict=True)])
    result = {"accuracy": sum(right) / len(right)}
    for kind in sorted({sample.kind for sample in requests}):
        of_kind = [ok for ok, sample in zip(right, requests, strict=True) if sample.kind == kind]
        result[f"accuracy_{kind}"] = sum(of_kind) / len(of_kind)
    return result


def target_stage(settings: SmallTargetSettings, tokenizer: Tokenizer) -> None:
    """Train the target and save it as ``target``."""
    folder = settings.folder / "target"
    if (folder / "model.safetensors").exists():
        return
    end = token_id(tokenizer, END)
    requests = list(samples(settings.target.data_seed, settings.target.samples, "train"))
    sequences = Sequences.from_lists(
        [encode_prompt(tokenizer, sample.prompt) for sample in requests],
        [encode_answer(tokenizer, sample.answer) for sample in requests],
    )
    logger.info("%d sequences, %d tokens", len(sequences), len(sequences.tokens))
    model = build_target(settings.target, tokenizer.get_vocab_size(), end)
    fit(
        model,
        target_batches(sequences, settings.target),
        lambda model, batch: answer_loss(model, *batch),
        settings.target.fit,
        settings.folder / "fit-target",
        lambda: accuracy(model, tokenizer, settings.heldout),
        identity=to_dict(settings),
        may_change=MAY_CHANGE,
    )
    config = model_config(settings.target, tokenizer.get_vocab_size(), end)
    save_target(model, config, settings.folder / "tokenizer", folder)


def small_target(settings: SmallTargetSettings) -> None:
    """Run both stages of a recipe, or what is left of them.

    Raises ``DFlashError`` if the folder belongs to another recipe or process, or the loss blows
    up, and ``OSError`` where the folder cannot be written to.
    """
    keep_freed_memory()
    logger.info("Training on %s.", mx.default_device())
    with exclusive_lock(settings.folder):
        check_same_run(settings.folder / RECIPE, to_dict(settings), MAY_CHANGE)
        target_stage(settings, tokenizer_stage(settings))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the recipe that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("recipe", type=Path, help="a YAML file, such as configs/pair-target.yaml")
    recipe = parser.parse_args(arguments).recipe
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    try:
        small_target(load_settings(SmallTargetSettings, recipe))
    except (DFlashError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
