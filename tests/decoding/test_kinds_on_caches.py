"""Every kind of drafter writes plain greedy text on every kind of cache, and as a tree where the cache can hold one.

The targets of the other caches refuse trees (``test_trees.py``). Nothing is skipped, so a target that comes to refuse
what it took before is found out.
"""

from itertools import pairwise

import mlx.core as mx
import pytest
from support.models import HIDDEN, draft_config, llama_model, plain_greedy, qwen3_model, randomize

from dflash import DFlashDraftModel, DFlashSpeculativeDecoder
from dflash.adapters.conformance import small_models as small
from dflash.drafters.kinds import drafter_class

VOCAB, PROMPT, KNOWN, COUNT = 4, [3, 1, 2, 0, 1], [0, 1, 3], 40

KINDS = {
    "dflash": {},
    "dflash2": {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 5, "selector_top_k": 3},
    "dspark": {"markov_rank": 6, "markov_head_type": "rnn", "sample_from_anchor": True},
    "dflare": {},
    "dflash, reduced vocabulary": {"draft_vocab_size": len(KNOWN)},
}

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


def random_drafter(kind: str, seed: int) -> DFlashDraftModel:
    """Of four tokens it is right often enough that acceptance varies."""
    made = drafter_class(kind.split(",")[0])
    drafter = made(made.config_class(**vars(draft_config(VOCAB)) | KINDS[kind]))
    if drafter.config.draft_vocab_size:
        drafter.reduce_vocabulary(mx.array(KNOWN), own_head=True)
    return randomize(drafter, seed, scale=2.0)


@pytest.mark.parametrize(
    ("cache", "nodes"),
    [*((cache, None) for cache in CACHES), ("full", 12), ("quantised", 12)],
    ids=[*CACHES, "full, tree", "quantised, tree"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_the_text_is_plain_decodings(kind, cache, nodes):
    mx.random.seed(0)  # a recurrent layer's own start
    (build, options), lengths = CACHES[cache], []
    model, drafter = build(), random_drafter(kind, 3)
    decoder = DFlashSpeculativeDecoder(model, drafter, tree=nodes, policy="full", **options)
    text, lead = plain_greedy(model, PROMPT, COUNT, **options)
    assert lead > 1e-2, "a near tie: float32 may fall on its other side"
    assert len(set(pairwise(text[10:]))) > 5, "a text that repeats itself is found with wrong caches too"
    ids = decoder.spec_generate(PROMPT, COUNT, stream_callback=lambda step: lengths.append(len(step)))
    assert ids.tolist()[0] == PROMPT + text
    assert len(set(lengths[1:-1])) > 1, "always as many drafts accepted; the comparison means nothing"
