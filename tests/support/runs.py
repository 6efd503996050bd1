"""Tiny datasets and recipes for the tests of training: a step takes milliseconds."""

import json
from pathlib import Path

import numpy as np
import yaml
from support.models import TEXT_VOCAB, llama_model, qwen3_model, save_target

import dflash
from dflash.files import write_json
from dflash.training.data import dataset as shards
from dflash.training.data.sequences import Sequences


def write_dataset(folder: Path, target: Path, count: int = 24, seed: int = 0) -> Path:
    """A dataset of ``target`` with short, easily learned sequences: each response repeats two letters in turns."""
    rng, splits = np.random.default_rng(seed), {}
    for split, rows in (("train", count), ("heldout", 3)):
        pairs = [rng.integers(60, 90, 2).tolist() for _ in range(rows)]
        prompts = [[65, *pair] for pair in pairs]
        answers = [pair * int(rng.integers(4, 9)) for pair in pairs]
        sequences = Sequences.from_lists(prompts, answers)
        sequences.save(shards.shard_path(folder, split, 0))
        splits[split] = {"shards": 1, "sequences": rows, "tokens": len(sequences.tokens)}
    loaded = dflash.load_target(target)
    manifest = {"format": shards.FORMAT, "version": shards.VERSION, "splits": splits}
    manifest |= {"target": shards.target_fingerprint(loaded), "tokenizer": shards.tokenizer_fingerprint(loaded)}
    write_json(folder / shards.MANIFEST, manifest)
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
