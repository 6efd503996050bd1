"""The recipe of the pair: a small target and its drafter, trained here from nothing.

    python -m dflash.training.pair configs/pair.yaml

Knows the order of the stages and where each leaves its files. Must not know how a stage works.
Every stage continues where it was stopped: the same command, given again, does what is left.
"""

import argparse
import json
import logging
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models.qwen3 import Model
from tokenizers import Tokenizer

from dflash import load_target, save_drafter
from dflash.files import write_whole

from .answers import AnswersSettings, answer_from_guesses, write_answers
from .batches import Batches
from .cpu import keep_freed_memory
from .data import Sequences
from .drafter import TargetPass, drafter_loss
from .evaluate import measure
from .fit import FitSettings, fit
from .losses import ObjectiveSettings
from .new_drafter import new_drafter
from .recipe import DataSettings, DrafterShape
from .settings import load_settings
from .target import (
    TargetSettings,
    answer_loss,
    build_target,
    features,
    model_config,
    rounded_to_bfloat16,
    save_target,
    target_batches,
)
from .tokenizer import END, encode_answer, encode_prompt, save_tokenizer, token_id, train_tokenizer
from .world import check_answers, samples

logger = logging.getLogger(__name__)

PUBLISHED_SEED, PUBLISHED_SAMPLES = 2026, 100  # held-out requests that come with the pair


@dataclass(frozen=True)
class TokenizerSettings:
    """What the tokenizer is learned from."""

    samples: int
    seed: int
    vocab_size: int


@dataclass(frozen=True)
class HeldOutSettings:
    """Requests of combinations that training never shows, for evaluation."""

    samples: int
    seed: int
    max_tokens: int = 320


@dataclass(frozen=True, kw_only=True)
class DrafterSettings(DrafterShape):
    """Shape of the drafter and how it learns. ``anchors`` is per sequence, ``batch_tokens`` counts padding."""

    fit: FitSettings
    gamma: float = 7.0
    anchors: int = 24
    batch_tokens: int = 2048


@dataclass(frozen=True)
class PairSettings:
    """One complete recipe. ``work`` holds everything on the way, ``output`` the finished pair."""

    work: Path
    output: Path
    tokenizer: TokenizerSettings
    target: TargetSettings
    answers: AnswersSettings
    drafter: DrafterSettings
    held_out: HeldOutSettings


def tokenizer_stage(settings: PairSettings) -> Tokenizer:
    """Learn the tokenizer, or read it if it is there."""
    folder = settings.work / "tokenizer"
    if not (folder / "tokenizer_config.json").exists():
        drawn = samples(settings.tokenizer.seed, settings.tokenizer.samples, "train")
        texts = (text for sample in drawn for text in (sample.prompt, sample.answer))
        tokenizer = train_tokenizer(texts, settings.tokenizer.vocab_size)
        save_tokenizer(tokenizer, folder, settings.target.max_position_embeddings)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def accuracy(model: Model, tokenizer: Tokenizer, settings: HeldOutSettings) -> dict[str, float]:
    """Share of held-out requests that greedy decoding answers right, over all and by kind."""
    drawn = list(samples(settings.seed, settings.samples, "heldout"))
    prompts = [encode_prompt(tokenizer, sample.prompt) for sample in drawn]
    guesses = [encode_answer(tokenizer, sample.answer) for sample in drawn]
    answers = answer_from_guesses(model, prompts, guesses, token_id(tokenizer, END), settings.max_tokens)
    texts = [tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]
    verdicts = check_answers((text, sample.check) for text, sample in zip(texts, drawn, strict=True))
    for text, sample, verdict in zip(texts, drawn, verdicts, strict=True):
        if not verdict.ok:
            logger.debug("%s\n%s\n%s", sample.prompt, text, verdict.reason)
    result = {"accuracy": sum(v.ok for v in verdicts) / len(verdicts)}
    for kind in sorted({sample.kind for sample in drawn}):
        of_kind = [v.ok for v, sample in zip(verdicts, drawn, strict=True) if sample.kind == kind]
        result[f"accuracy_{kind}"] = sum(of_kind) / len(of_kind)
    return result


def target_stage(settings: PairSettings, tokenizer: Tokenizer) -> None:
    """Train the target and save it as ``work/target``."""
    folder = settings.work / "target"
    if (folder / "model.safetensors").exists():
        return
    end = token_id(tokenizer, END)
    drawn = list(samples(settings.target.data_seed, settings.target.samples, "train"))
    sequences = Sequences.from_lists(
        [encode_prompt(tokenizer, sample.prompt) for sample in drawn],
        [encode_answer(tokenizer, sample.answer) for sample in drawn],
    )
    logger.info("%d sequences, %d tokens", len(sequences), len(sequences.tokens))
    model = build_target(settings.target, tokenizer.get_vocab_size(), end)
    fit(
        model,
        target_batches(sequences, settings.target),
        answer_loss,
        settings.target.fit,
        settings.work / "fit-target",
        lambda: accuracy(model, tokenizer, settings.held_out),
    )
    rounded_to_bfloat16(model)
    logger.info("As saved: %s", accuracy(model, tokenizer, settings.held_out))
    config = model_config(settings.target, tokenizer.get_vocab_size(), end)
    save_target(model, config, settings.work / "tokenizer", folder)


def answers_stage(settings: PairSettings, tokenizer: Tokenizer) -> Sequences:
    """The target's own answers to training requests; those too short to hold a block are left out."""
    drawn = list(samples(settings.answers.seed, settings.answers.samples, "train"))
    prompts = [encode_prompt(tokenizer, sample.prompt) for sample in drawn]
    guesses = [encode_answer(tokenizer, sample.answer) for sample in drawn]
    answers = write_answers(settings.work / "target", prompts, guesses, settings.answers, settings.work / "answers")
    logger.info("%d answers, %d tokens", len(answers), answers.response_lengths.sum())
    return answers.having(answers.response_lengths > 1)


def drafter_stage(settings: PairSettings, tokenizer: Tokenizer) -> None:
    """Train the drafter and save it as ``work/drafter``."""
    folder = settings.work / "drafter"
    if (folder / "model.safetensors").exists():
        return
    target = load_target(settings.work / "target")
    shape, steps = settings.drafter, settings.drafter.fit
    data = DataSettings(
        folder=settings.work / "answers",
        max_length=shape.batch_tokens,
        batch_tokens=shape.batch_tokens,
        anchors=shape.anchors,
        seed=shape.seed,
    )
    answers = answers_stage(settings, tokenizer)
    batches = Batches(answers, data, epochs=1, at_least=steps.steps * steps.batches_per_step)
    model = new_drafter(shape, target)
    features_of = partial(features, cast(Model, target.model), model.target_layer_ids)
    held_out = samples(settings.held_out.seed, settings.held_out.samples, "heldout")
    prompts = [encode_prompt(tokenizer, sample.prompt) for sample in held_out]

    def evaluate() -> dict[str, Any]:
        return measure(target, model, prompts, settings.held_out.max_tokens).results()

    fit(
        model,
        batches,
        drafter_loss(lambda tokens: TargetPass(features_of(tokens)), ObjectiveSettings(gamma=shape.gamma)),
        steps,
        settings.work / "fit-drafter",
        evaluate,
    )
    rounded_to_bfloat16(model)
    logger.info("As saved: %s", evaluate())
    save_drafter(model, folder)


def publish(settings: PairSettings) -> None:
    """Copy the finished pair from ``work`` to ``output``, with requests that neither has seen."""
    for name in ("target", "drafter"):
        destination = settings.output / name
        for file in (settings.work / name).iterdir():
            write_whole(destination / file.name, partial(shutil.copyfile, file))
    held_out = samples(PUBLISHED_SEED, PUBLISHED_SAMPLES, "heldout")
    lines = [json.dumps({"prompt": sample.prompt, "check": sample.check}) + "\n" for sample in held_out]
    write_whole(settings.output / "heldout.jsonl", lambda file: file.write_text("".join(lines)))
    logger.info("The pair is in %s.", settings.output)


def main() -> None:
    """Run every stage of a recipe."""
    parser = argparse.ArgumentParser(description="Train the small target and its drafter.")
    parser.add_argument("recipe", type=Path, help="a YAML file, such as configs/pair.yaml")
    settings = load_settings(PairSettings, parser.parse_args().recipe)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    keep_freed_memory()
    logger.info("Training on %s.", mx.default_device())
    tokenizer = tokenizer_stage(settings)
    target_stage(settings, tokenizer)
    drafter_stage(settings, tokenizer)
    publish(settings)


if __name__ == "__main__":
    main()
