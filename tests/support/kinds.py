"""A small random drafter of every kind that fills blocks."""

import mlx.core as mx

from dflash import DFlashDraftModel
from dflash.drafters.kinds import drafter_class

from .models import draft_config, randomize

VOCAB, KNOWN = 4, [0, 1, 3]

KINDS = {
    "dflash": {},
    "dflash2": {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 5, "selector_top_k": 3},
    "dspark": {"markov_rank": 6, "markov_head_type": "rnn", "sample_from_anchor": True},
    "domino": {"gru_hidden_dim": 10, "emb_dim": 6, "pure_draft_prefix_len": 1, "sample_from_anchor": True},
    "dflare": {},
    "dflash, reduced vocabulary": {"draft_vocab_size": len(KNOWN)},
}


def random_drafter(kind: str, seed: int) -> DFlashDraftModel:
    """Of four tokens it is right often enough that acceptance varies."""
    made = drafter_class(kind.split(",")[0])
    drafter = made(made.config_class(**vars(draft_config(VOCAB)) | KINDS[kind]))
    if drafter.config.draft_vocab_size:
        drafter.reduce_vocabulary(mx.array(KNOWN), own_head=True)
    return randomize(drafter, seed, scale=2.0)
