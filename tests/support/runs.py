"""Tiny datasets and recipes for the tests of training: a step takes milliseconds."""

import hashlib
import json
import random
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import yaml
from support.conversations import save_dataset
from support.models import TEXT_VOCAB, llama_model, qwen3_model, save_target

import dflash
from dflash.core.settings import load_settings
from dflash.target.identity import target_fingerprint
from dflash.training.data.dataset import tokenizer_fingerprint
from dflash.training.data.sequences import Sequences
from dflash.training.recipe import Recipe


def write_dataset(folder: Path, target: Path, count: int = 24, seed: int = 0) -> Path:
    """A dataset of ``target`` with short, easily learned sequences: each response repeats two letters in turns."""
    rng, parts = np.random.default_rng(seed), []
    for rows in (count, 3):  # to train on, held out
        pairs = [rng.integers(60, 90, 2).tolist() for _ in range(rows)]
        prompts = [[65, *pair] for pair in pairs]
        answers = [pair * int(rng.integers(4, 9)) for pair in pairs]
        parts.append(Sequences.from_lists(prompts, answers))
    loaded = dflash.load_target(target)
    fingerprints = {"target": target_fingerprint(loaded), "tokenizer": tokenizer_fingerprint(loaded)}
    save_dataset(folder, [Sequences.concatenate(parts)], heldout=3, **fingerprints)
    return folder


def write_target(folder: Path, kind: str = "qwen3") -> Path:
    model = qwen3_model(1, vocab=TEXT_VOCAB) if kind == "qwen3" else llama_model(1, TEXT_VOCAB, window=6)
    return save_target(model, folder)


def recipe_values(folder: Path) -> dict:
    """Plain values of a recipe of 8 steps whose files are all in ``folder``."""
    return {
        "target": str(folder / "target"),
        "data": {"folder": str(folder / "data"), "max_length": 40, "batch_tokens": 80, "anchors": 4},
        "drafter": {
            "num_hidden_layers": 1,
            "block_size": 4,
            "target_layer_ids": [0, 2],
            "mask_token": "<|mask|>",
            "intermediate_size": 24,
        },
        "run": {
            "folder": str(folder / "run"),
            "steps": 8,
            "batches_per_step": 2,
            "log_every": 1,
            "checkpoint_every": 2,
            "evaluate_every": 3,
            "evaluate_prompts": 2,
            "evaluate_tokens": 8,
        },
    }


def write_recipe(folder: Path, **run: object) -> Path:
    values = recipe_values(folder)
    values["run"] |= run
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def read_log(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def recipe(folder: Path, name: str, *overrides: str) -> Recipe:
    """The recipe of :func:`write_recipe` for the run folder ``folder / name``."""
    return load_settings(Recipe, write_recipe(folder), [f"run.folder={folder / name}", *overrides])


def result(run: Path) -> dict[str, str]:
    """What a run has made: a digest of each file's bytes."""
    names = ("drafter/model.safetensors", "best.safetensors", "state.safetensors")
    return {name: hashlib.sha256((run / name).read_bytes()).hexdigest() for name in names}


def kill_at_random_moments(command: list[str], run: Path, kills: int) -> None:
    """Start ``command``, which writes the log of ``run``, again and again; each time it is killed some lines later."""
    rng, log = random.Random(5), run / "log.jsonl"

    def lines_logged() -> int:
        return len(log.read_text().splitlines()) if log.exists() else 0

    for kill in range(kills):
        wanted = lines_logged() + rng.randint(kill == 0, 4)  # 0: while it starts
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while lines_logged() < wanted and process.poll() is None:
            time.sleep(0.002)
        time.sleep(rng.random() * 0.03)
        process.kill()
        assert process.wait(timeout=30) == -signal.SIGKILL
