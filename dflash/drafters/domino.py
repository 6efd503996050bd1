"""Domino: a DFlash drafter whose logits are corrected, one token after another, from a recurrent state of the block.

The layers fill the block in one pass, as in DFlash. Then tokens are chosen from left to right: a GRU reads the
embedding of each, and what is added to the next logits comes from its state and from the hidden state there. The GRU
starts from zeros, and the first token that it reads is the anchor. Both are settled by SpecForge's training code
(``specforge/core/domino.py``), as are keys, weight names and formulas. The paper is arXiv:2605.29707.

Shapes: B blocks, N drafts of each, T predictions of many, K rows, E hidden size, R size of the state, V drafted
vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn

from ..core.errors import CheckpointError
from .checkpoints.config import POSITIVE, Check, DFlashConfig, is_whole
from .kinds import register_drafter
from .protocol import Proposal
from .sequential import Choose, SequentialDraftModel, Walk
from .trainable import states_of_blocks


@dataclass(frozen=True)
class DominoConfig(DFlashConfig):
    """The further keys of a Domino ``config.json``; the first two are required.

    The state has ``gru_hidden_dim`` numbers, and the correction is of rank ``emb_dim``. The first
    ``pure_draft_prefix_len`` drafts of a block keep DFlash's logits. ``sample_from_anchor`` is ``shift_label`` in
    published files.
    """

    sample_from_anchor: bool = True
    emb_dim: int = field(kw_only=True)
    gru_hidden_dim: int = field(kw_only=True)
    pure_draft_prefix_len: int = field(default=0, kw_only=True)

    architecture: ClassVar[str] = "DominoDraftModel"
    inside: ClassVar[tuple[str, ...]] = ("emb_dim", "gru_hidden_dim", "pure_draft_prefix_len")
    inner_labels: ClassVar[Mapping[str, str]] = {"projector_type": "domino"}
    checks: ClassVar[Mapping[str, Check]] = {**DFlashConfig.checks, "emb_dim": POSITIVE, "gru_hidden_dim": POSITIVE}

    def __post_init__(self) -> None:
        super().__post_init__()
        prefix, drafts = self.pure_draft_prefix_len, self.block_size - (not self.sample_from_anchor)
        if not is_whole(prefix) or not 0 <= prefix <= drafts:
            raise CheckpointError(
                f"pure_draft_prefix_len must be a whole number from 0 to the block's {drafts} drafts, got {prefix!r}."
            )

    def to_dict(self) -> dict[str, Any]:
        """The published form: SpecForge's."""
        values = super().to_dict()
        values["dflash_config"].pop("sample_from_anchor", None)
        values["dflash_config"]["shift_label"] = self.sample_from_anchor
        return values


class PrefixGRU(nn.Module):
    """A gated recurrent unit without biases, in PyTorch's layout: reset, update and new part of each matrix."""

    def __init__(self, inputs: int, size: int):
        super().__init__()
        self.weight_ih_l0 = mx.random.uniform(-(size**-0.5), size**-0.5, (3 * size, inputs))
        self.weight_hh_l0 = mx.random.uniform(-(size**-0.5), size**-0.5, (3 * size, size))

    def project(self, x_KE: mx.array) -> mx.array:
        """What the inputs ``[K, E]`` add to the gates, ``[K, 3 R]``."""
        return x_KE @ self.weight_ih_l0.T

    def step(self, projected_KG: mx.array, state_KR: mx.array) -> mx.array:
        """The next states ``[K, R]``."""
        reset_KR, update_KR, new_KR = mx.split(projected_KG, 3, axis=-1)
        of_reset_KR, of_update_KR, of_new_KR = mx.split(state_KR @ self.weight_hh_l0.T, 3, axis=-1)
        update_KR = mx.sigmoid(update_KR + of_update_KR)
        new_KR = mx.tanh(new_KR + mx.sigmoid(reset_KR + of_reset_KR) * of_new_KR)
        return (1 - update_KR) * new_KR + update_KR * state_KR


@register_drafter("domino")
class DominoDraftModel(SequentialDraftModel):
    """A Domino drafter; a new one begins without a correction.

    The head is trained with the true tokens before each prediction. In the published training the loss moves from the
    uncorrected logits to the corrected ones.
    """

    config_class: ClassVar[type[DFlashConfig]] = DominoConfig
    usual_options: ClassVar[dict[str, Any]] = {"emb_dim": 256, "gru_hidden_dim": 1024, "pure_draft_prefix_len": 1}
    added_modules: ClassVar[tuple[str, ...]] = ("prefix_gru", "embed_proj")
    head_modules: ClassVar[tuple[str, ...]] = ("lm_head", "prefix_gru", "embed_proj")
    config: DominoConfig

    def __init__(self, config: DominoConfig):
        super().__init__(config)
        drafted, size, state = config.draft_vocab_size or config.vocab_size, config.hidden_size, config.gru_hidden_dim
        self.prefix_gru = PrefixGRU(size, state)
        last = nn.Linear(config.emb_dim, drafted, bias=False)
        last.weight = mx.zeros_like(last.weight)
        self.embed_proj = [nn.Linear(size + state, config.emb_dim, bias=False), nn.SiLU(), last]

    @classmethod
    def recognises(cls, signs: Mapping[str, Any]) -> bool:
        """Whether a config names Domino."""
        names = (*signs["architectures"], *signs["algorithms"], str(signs.get("projector_type")))
        return any("domino" in name.lower() for name in names)

    def walk(self, anchors_B: mx.array, hidden_BNE: mx.array, choose: Choose) -> Proposal:
        """As the base has it: the state reads each token before the next one is chosen."""
        base_BNV, (blocks, drafts, _) = self.head(hidden_BNE), hidden_BNE.shape
        state_BR = mx.zeros((blocks, self.config.gru_hidden_dim), hidden_BNE.dtype)
        walk, before_B = Walk(choose), anchors_B
        for i in range(drafts):
            logits_BV, hidden_BE = base_BNV[:, i], hidden_BNE[:, i]
            state_BR = self.prefix_gru.step(self._read(before_B), state_BR)
            if i >= self.config.pure_draft_prefix_len:
                logits_BV = logits_BV + self._correction(hidden_BE, state_BR)
            before_B = walk.step(logits_BV, self.tokens_of)
        return walk.proposal(self.candidates_of(base_BNV))

    def taught_logits(
        self, base_TV: mx.array, hidden_TE: mx.array, previous_T: mx.array, positions_T: mx.array
    ) -> mx.array:
        """Logits ``[T, V]`` corrected from the true tokens of the block before each prediction."""
        projected_TG = self._read(previous_T)
        states_TR = states_of_blocks(
            lambda rows_K, before_KR: self.prefix_gru.step(projected_TG[rows_K], before_KR),
            mx.zeros((len(previous_T), self.config.gru_hidden_dim), hidden_TE.dtype), positions_T, self.block_size - 1,
        )  # fmt: skip
        corrected_T1 = positions_T[:, None] > self.config.pure_draft_prefix_len
        return base_TV + mx.where(corrected_T1, self._correction(hidden_TE, states_TR), 0)

    def _read(self, tokens_K: mx.array) -> mx.array:
        """What tokens ``[K]`` add to the gates, ``[K, 3 R]``."""
        return self.prefix_gru.project(self.embed(tokens_K[:, None])[:, 0])

    def _correction(self, hidden_KE: mx.array, state_KR: mx.array) -> mx.array:
        """What is added to the logits, ``[K, V]``."""
        first, activation, last = self.embed_proj
        return last(activation(first(mx.concatenate([hidden_KE, state_KR], axis=-1))))
