"""Attention of blocks to their contexts, tile by tile: precision and memory. The training loss tests its values."""

import mlx.core as mx
from support.dense_loss import relative_difference

from dflash.drafters import block_attention as attention


def random_attention(dtype=mx.float32):
    """Queries, keys and values of 2 sequences' 3 blocks of 4, of their contexts of 13, and unsorted anchors."""
    shapes = [(6, 4, 4, 8), (6, 2, 4, 8), (6, 2, 4, 8), (2, 2, 13, 8), (2, 2, 13, 8)]
    arrays = [mx.random.normal(s, key=mx.random.key(i)).astype(dtype) for i, s in enumerate(shapes)]
    return arrays, mx.array([[2, 7, 7], [1, 12, 5]])


def attention_and_gradients(arrays, anchors):
    weight = mx.random.normal(arrays[0].shape, key=mx.random.key(9))
    attend = attention.block_attention
    gradients = mx.grad(lambda *x: (attend(*x, anchors) * weight).sum(), argnums=range(5))(*arrays)
    return attend(*arrays, anchors), *gradients


def test_attention_in_half_precision_keeps_its_type_and_sums_in_float32():
    arrays, anchors = random_attention(mx.bfloat16)
    mine = attention_and_gradients(arrays, anchors)
    exact = attention_and_gradients([x.astype(mx.float32) for x in arrays], anchors)
    for half, full in zip(mine, exact, strict=True):
        assert half.dtype == mx.bfloat16
        assert relative_difference(half.astype(mx.float32), full) < 0.01


def test_attention_memory_does_not_grow_with_anchors_times_context():
    heads, size, head_size, context = 2, 8, 4, 1200

    def peak(count: int) -> int:
        q, k, v = (mx.random.normal((count, heads, size, head_size)) for _ in range(3))
        ck, cv = (mx.random.normal((1, heads, context, head_size)) for _ in range(2))
        anchors = mx.arange(context - count, context)[None]
        mx.eval(q, k, v, ck, cv, anchors)
        mx.clear_cache()
        mx.reset_peak_memory()
        attend = attention.block_attention
        mx.eval(mx.grad(lambda *x: attend(*x, anchors).square().sum(), argnums=range(5))(q, k, v, ck, cv))
        return mx.get_peak_memory()

    few, many = peak(16), peak(1024)
    one_set_of_scores = 4 * heads * size * (context / 2) * (1024 - 16)  # anchors see about half
    assert many - few < one_set_of_scores / 2
