"""The CPU forms have their stated errors, and MLX's values and gradients, for any shape and on any thread."""

from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from dflash.core import cpu_math


def worst(found: mx.array, exact: np.ndarray) -> float:
    return float(np.abs(np.array(found).astype(np.float64) - exact).max())


def test_the_quick_exponential_has_its_stated_error_and_floor():
    x = np.linspace(-40, 0, 400_001).astype(np.float32)
    found = cpu_math.exp_nonpositive(mx.array(x))
    assert worst(found, np.exp(x.astype(np.float64))) < 2e-6
    assert found.min().item() == pytest.approx(np.exp(-32), rel=1e-3)
    assert cpu_math.exp_nonpositive(mx.array([0.0])).item() == pytest.approx(1, abs=1e-6)


def test_the_quick_sigmoid_has_its_stated_error_on_all_reals():
    x = np.concatenate([np.linspace(-40, 40, 400_001), [-1e30, 1e30]]).astype(np.float32)
    exact = 1 / (1 + np.exp(-np.clip(x.astype(np.float64), -700, 700)))
    assert worst(cpu_math.sigmoid(mx.array(x)), exact) < 1e-6


def cases():
    mx.random.seed(2)
    y, t = mx.random.normal((40, 30)), mx.random.randint(0, 30, (40,))
    return {
        "softmax": (lambda x: cpu_math.softmax(x) * y, lambda x: mx.softmax(x, axis=-1) * y),
        "gate of swiglu": (lambda x: cpu_math.swiglu(x, y), lambda x: nn.silu(x) * y),
        "up of swiglu": (lambda x: cpu_math.swiglu(y, x), lambda x: nn.silu(y) * x),
        "logsumexp": (lambda x: cpu_math.logsumexp(x), lambda x: mx.logsumexp(x, axis=-1)),
        "cross_entropy": (lambda x: cpu_math.cross_entropy(x, t), lambda x: nn.losses.cross_entropy(x, t)),
    }


@pytest.mark.parametrize("name", cases())
def test_quick_forms_equal_mlx_in_values_and_gradients(name, monkeypatch):
    monkeypatch.setattr(cpu_math, "on_cpu", lambda: True)  # else this would compare MLX with itself
    quick, plain = cases()[name]
    x = mx.random.normal((40, 30), key=mx.random.key(1)) * 6
    results = [mx.value_and_grad(lambda x, f=f: (f(x) ** 2).sum())(x) for f in (quick, plain)]
    (mine, my_gradient), (theirs, gradient) = results
    assert mine.item() == pytest.approx(theirs.item(), rel=1e-5)
    assert mx.abs(my_gradient - gradient).max() < 1e-4 * max(1.0, mx.abs(gradient).max().item())


def test_every_shape_and_every_thread_is_served():
    gates = [mx.random.normal(shape, key=mx.random.key(3)) for shape in ((7,), (2, 3), (1, 5, 4), (2, 2, 2, 6))]
    expected = [np.array(nn.silu(gate) * gate) for gate in gates]

    def run() -> list[np.ndarray]:
        with mx.stream(mx.new_stream(mx.default_device())):
            return [np.array(cpu_math.swiglu(mx.array(gate), mx.array(gate))) for gate in arrays]

    arrays = [np.array(gate) for gate in gates]
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(run).result()
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-6)
