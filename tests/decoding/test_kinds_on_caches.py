"""Every kind of drafter writes plain greedy text, as a tree too, and one of them on every kind of cache.

A drafter's context is its own, whatever the target's caches are. The targets of the other caches refuse trees
(``test_trees.py``). Nothing is skipped, so a target that comes to refuse what it took before is found out.
"""

from functools import cache
from itertools import pairwise

import mlx.core as mx
import pytest
from support.kinds import KINDS, VOCAB, random_drafter
from support.models import HIDDEN, llama_model, plain_greedy, qwen3_model

from dflash import DFlashSpeculativeDecoder, LoadedTargetModel
from dflash.adapters.conformance import small_models as small

PROMPT, COUNT = [3, 1, 2, 0, 1], 40

CACHES = {
    "full": (lambda: qwen3_model(1, VOCAB), {}),
    "sliding": (lambda: llama_model(0, VOCAB, window=6), {}),
    "bounded": (lambda: qwen3_model(2, VOCAB), {"max_kv_size": 16}),
    "quantised": (
        lambda: qwen3_model(0, VOCAB, head_dim=32),
        {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0},
    ),
    "recurrent": (lambda: small.build("qwen3_5", hidden_size=HIDDEN, vocab_size=VOCAB), {}),
}
"""Targets whose texts do not soon repeat one token, and options."""


CASES = [
    *((kind, "full", nodes) for kind in KINDS for nodes in (None, 12)),
    *(("dspark", cache, None) for cache in CACHES if cache != "full"),
    ("dflash2", "quantised", 12),
]


@cache
def plain_text(name: str) -> tuple[LoadedTargetModel, list[int]]:
    """The target of a cache, and what it writes."""
    mx.random.seed(0)  # a recurrent layer's own start
    build, options = CACHES[name]
    model = build()
    text, lead = plain_greedy(model, PROMPT, COUNT, **options)
    assert lead > 1e-2, "a near tie: float32 may fall on its other side"
    assert len(set(pairwise(text[10:]))) > 5, "a text that repeats itself is found with wrong caches too"
    return LoadedTargetModel(model), text


@pytest.mark.parametrize(("kind", "name", "nodes"), CASES)
def test_the_text_is_plain_decodings(kind, name, nodes):
    (target, text), lengths = plain_text(name), []
    decoder = DFlashSpeculativeDecoder(target, random_drafter(kind, 3), tree=nodes, policy="full", **CACHES[name][1])
    ids = decoder.spec_generate(PROMPT, COUNT, stream_callback=lambda step: lengths.append(len(step)))
    assert ids.tolist()[0] == PROMPT + text
    assert len(set(lengths[1:-1])) > 1, "always as many drafts accepted; the comparison means nothing"
