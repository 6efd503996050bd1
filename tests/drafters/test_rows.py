"""The head of every kind drafts several blocks at once as it drafts each alone."""

import mlx.core as mx
import numpy as np
import pytest
from support.kinds import KINDS, random_drafter
from support.models import HIDDEN, qwen3_model

from dflash import LoadedTargetModel

ROWS = 5


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_drafted_as_each_alone(kind):
    drafter = random_drafter(kind, 3)
    drafter.bind(LoadedTargetModel(qwen3_model(1, 4)))
    hidden = mx.random.normal((ROWS, drafter.block_size - 1, HIDDEN), key=mx.random.key(7))
    anchors = mx.arange(ROWS) % 4
    together = drafter.proposal(anchors, hidden)
    assert len({tuple(row) for row in together.tokens.tolist()}) == ROWS, "rows that are equal show nothing"
    for row in range(ROWS):
        alone = drafter.proposal(anchors[row : row + 1], hidden[row : row + 1])
        for part in ("tokens", "logits", "candidates", "log_q", "confidence"):
            held, expected = getattr(together, part), getattr(alone, part)
            assert (held is None) == (expected is None), part
            if held is not None:
                np.testing.assert_allclose(np.array(held[row]), np.array(expected[0]), rtol=1e-4, atol=1e-4)
