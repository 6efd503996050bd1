"""A small random drafter of every kind that fills blocks."""

import mlx.core as mx

from dflash import DFlashDraftModel
from dflash.core.files import flat
from dflash.drafters.kinds import drafter_class

from .models import draft_config, randomize

VOCAB = 4

OPTIONS = {
    "dflash": {},
    "dflash2": {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 5, "selector_top_k": 3},
    "dspark": {"markov_rank": 6, "markov_head_type": "rnn", "sample_from_anchor": True},
    "domino": {"gru_hidden_dim": 10, "emb_dim": 6, "pure_draft_prefix_len": 1, "sample_from_anchor": True},
    "dflare": {},
}
KINDS = {**{kind: {} for kind in OPTIONS}, "dflash, reduced vocabulary": {"draft_vocab_size": 3}}


def random_drafter(kind: str, seed: int, vocab: int = VOCAB, **changes) -> DFlashDraftModel:
    """Every part counts; of few tokens it is right often enough that acceptance varies.

    A part of the vocabulary is spread evenly over it and has a head of its own.
    """
    made, changes = drafter_class(kind.partition(",")[0]), KINDS.get(kind, {}) | changes
    own = {"layer_types": (), **OPTIONS[kind.partition(",")[0]]}
    drafter = made(made.config_class(**vars(draft_config(vocab)) | own | changes))
    if count := drafter.config.draft_vocab_size:
        drafter.reduce_vocabulary(mx.array([i * (vocab - 1) // (count - 1) for i in range(count)]), own_head=True)
    randomize(drafter, seed, scale=2.0)
    for i, (name, weight) in enumerate(flat(drafter.parameters()).items()):
        if name.endswith(("base_kernel", "codebook")):  # rows mix evenly, and the selector often overrules the best
            noise = mx.random.normal(weight.shape, key=mx.random.key(seed + 10 * i))
            drafter.load_weights([(name, noise * (0.7 if name.endswith("kernel") else 1.5))], strict=False)
        elif name == "embed_proj.2.weight":  # the correction is as large as the logits
            drafter.load_weights([(name, 3 * weight)], strict=False)
    return drafter
