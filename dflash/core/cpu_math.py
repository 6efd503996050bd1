"""Softmax, the gated activation and cross-entropy, fast on a CPU, forward and backward.

MLX's CPU ``exp`` and ``sigmoid`` call libm once per element, which costs a training step about as much as its matrix
products, and a draft the probabilities of a large vocabulary. The compiler vectorises polynomials in plain
multiplications and additions. Other devices use MLX's own operations.

Shapes: T tokens, V vocabulary.
"""

import threading
from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from .backend import on_cpu

# exp(y) on [-1, 0], Chebyshev fit of degree 7: relative error 4e-9.
_EXP = (
    9.99999999e-01, 9.99999912e-01, 4.99998448e-01, 1.66655131e-01,
    4.16225961e-02, 8.23909186e-03, 1.27376380e-03, 1.21231625e-04,
)  # fmt: skip
_EXP_FLOOR = -32.0  # exp(-32) is 1e-14: negligible next to a largest term of 1

_SHAPES = 512
"""Most compiled functions that a thread keeps, each for one size of arrays: training sees thousands of sizes."""


class _Compiled(threading.local):
    """`mx.compile`, once per thread, because a compiled function keeps its thread's stream, and per size of arrays.

    One trace for all sizes (`shapeless`) is slower: its constants are arrays.
    """

    def __init__(self) -> None:
        self.of_size = lru_cache(_SHAPES)(lambda function, size, dtype: mx.compile(function))


_thread = _Compiled()


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile an element-wise function of arrays of one shape."""

    @wraps(function)
    def call(*arrays: mx.array) -> Any:
        shape, flat = arrays[0].shape, [array.reshape(-1) for array in arrays]
        results = _thread.of_size(function, flat[0].size, flat[0].dtype)(*flat)
        return tuple(r.reshape(shape) for r in results) if isinstance(results, tuple) else results.reshape(shape)

    return call


def _horner(x: mx.array, highest_first: Sequence[float]) -> mx.array:
    total = highest_first[0] * x + highest_first[1]
    for coefficient in highest_first[2:]:
        total = total * x + coefficient
    return total


def _array(value: object) -> mx.array:
    """MLX types the result of a custom function as `object`."""
    return cast(mx.array, value)


def exp_nonpositive(x: mx.array) -> mx.array:
    """``exp(x)`` for ``x <= 0``, absolute error below 2e-6; no less than ``exp(-32)``."""
    power = _horner(mx.maximum(x, _EXP_FLOOR) * (1 / 32), _EXP[::-1])
    for _ in range(5):  # exp(x / 32) ** 32
        power = power * power
    return power


def sigmoid(x: mx.array) -> mx.array:
    """Logistic function, absolute error below 1e-6."""
    # sigmoid(|x|) = 1 / (1 + exp(-|x|)) is 1/2 and more; below 0 the part above 1/2 changes its sign.
    return 0.5 + mx.sign(x) * (1 / (1 + exp_nonpositive(-mx.abs(x))) - 0.5)


_exp_nonpositive = _compiled(exp_nonpositive)


def shifted_exp(x: mx.array, top: mx.array) -> mx.array:
    """``exp(x - top)`` where no ``x`` is above its row's ``top``, which has one column."""
    return _exp_nonpositive(x - top) if on_cpu() else mx.exp(x - top)


@mx.custom_function
def _softmax(scores: mx.array) -> mx.array:
    weights = _exp_nonpositive(scores - scores.max(-1, keepdims=True))
    return weights * (1 / weights.sum(-1, keepdims=True))


@_softmax.vjp
def _softmax_vjp(primals: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
    product = output * cotangent
    return product - output * product.sum(-1, keepdims=True)


def softmax(scores: mx.array) -> mx.array:
    """Softmax over the last axis."""
    return _array(_softmax(scores)) if on_cpu() else mx.softmax(scores, axis=-1, precise=True)


@_compiled
def _swiglu_values(gate: mx.array, up: mx.array) -> mx.array:
    return gate * sigmoid(gate) * up


@mx.custom_function
def _swiglu(gate: mx.array, up: mx.array) -> mx.array:
    return _swiglu_values(gate, up)


@_compiled
def _swiglu_gradients(gate: mx.array, up: mx.array, cotangent: mx.array) -> tuple[mx.array, mx.array]:
    gated = sigmoid(gate)
    silu = gate * gated
    return cotangent * up * (gated + silu * (1 - gated)), cotangent * silu


@_swiglu.vjp
def _swiglu_vjp(primals: tuple[mx.array, mx.array], cotangent: mx.array, output: mx.array) -> tuple[mx.array, mx.array]:
    return _swiglu_gradients(*primals, cotangent)


def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """``silu(gate) * up``."""
    return _array(_swiglu(gate, up)) if on_cpu() else nn.silu(gate) * up


@mx.custom_function
def _logsumexp(logits: mx.array) -> mx.array:
    top = logits.max(-1, keepdims=True)
    return (mx.log(_exp_nonpositive(logits - top).sum(-1, keepdims=True)) + top).squeeze(-1)


@_logsumexp.vjp
def _logsumexp_vjp(primals: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
    # exp(logits - logsumexp) is the softmax: at most 1, so the exponent is never positive.
    return _exp_nonpositive(primals - output[..., None]) * cotangent[..., None]


def logsumexp(logits: mx.array) -> mx.array:
    """Logarithm of the sum of exponentials over the last axis."""
    return _array(_logsumexp(logits)) if on_cpu() else mx.logsumexp(logits, axis=-1)


def cross_entropy(logits_TV: mx.array, targets_T: mx.array) -> mx.array:
    """``-log softmax(logits)[target]`` of each token, shape ``[T]``."""
    return logsumexp(logits_TV) - mx.take_along_axis(logits_TV, targets_T[..., None], axis=-1).squeeze(-1)
