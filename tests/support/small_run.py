"""A run of the training loop that a process begins in a tenth of a second: for tests that kill, stop and launch it.

python small_run.py FOLDER TIMEOUT CHECKPOINT_EVERY
"""

# ruff: noqa: I001 - dflash comes before MLX, for the fast BLAS
import sys
import time
from pathlib import Path

from dflash.training.loop.distributed import Ranks
from dflash.training.loop.fit import FitSettings, fit
import mlx.core as mx
import mlx.nn as nn
import numpy as np

STEPS = 40


def batch(number: int) -> tuple[mx.array]:
    time.sleep(0.005)
    return (mx.array(np.random.default_rng(number).normal(size=(4, 3)).astype(np.float32)),)


def run(folder: Path, ranks: Ranks, checkpoint_every: int) -> None:
    """Train a matrix for ``STEPS`` steps, or what is left of them; after 30 and all of them its score is 1 a rank."""

    def evaluate() -> dict[str, float]:
        return {"score": float(ranks.all_reduce_sum(np.ones(1))[0])}

    mx.random.seed(ranks.rank)  # all ranks must begin with the weights of rank 0
    each = {"log_every": 1, "checkpoint_every": checkpoint_every, "evaluate_every": 30}
    settings = FitSettings(steps=STEPS, batches_per_step=2, **each)
    fit(nn.Linear(3, 2), batch, lambda model, x: (model(*x) ** 2).mean(), settings, folder, evaluate, ranks=ranks)


if __name__ == "__main__":
    run(Path(sys.argv[1]), Ranks.of_this_run(float(sys.argv[2])), int(sys.argv[3]))
