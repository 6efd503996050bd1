"""DSpark: a DFlash drafter whose tokens are chosen one after another by a small Markov head, with a confidence head.

The layers fill the block in one pass, as in DFlash. Then tokens are chosen from left to right: each position's logits
get a bias from the token chosen before it. Keys and formulas are those of DSpark (arXiv:2607.05147), DeepSpec,
SpecForge and vLLM's speculators.

Shapes: B blocks, N drafts of each, T predictions of many, E hidden size, R rank, V drafted vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..core.cpu_math import softmax
from ..core.errors import CheckpointError
from .checkpoints.config import SWITCH, Check, DFlashConfig, is_whole
from .kinds import register_drafter
from .markov import ConfidenceHead, markov_head_class
from .protocol import Proposal
from .sequential import Choose, SequentialDraftModel, Walk
from .trainable import Predictions

if TYPE_CHECKING:
    from ..target import LoadedTargetModel


@dataclass(frozen=True)
class DSparkConfig(DFlashConfig):
    """The further keys of DSpark's ``config.json``.

    ``markov_head_type`` is ``vanilla``, ``gated`` or ``rnn``; ``markov_rank`` 0 means no such head. With
    ``confidence_head_with_markov`` the confidence head also reads the token before each draft. Its logits are divided
    by ``confidence_temperatures``, one per draft, if it was calibrated.
    """

    sample_from_anchor: bool = True
    markov_rank: int = 256
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
    confidence_temperatures: tuple[float, ...] = ()

    architecture: ClassVar[str] = "DSparkDraftModel"
    inside: ClassVar[tuple[str, ...]] = (
        "markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov",
        "sample_from_anchor", "confidence_temperatures",
    )  # fmt: skip
    inner_labels: ClassVar[Mapping[str, str]] = {"projector_type": "dspark", "attention_mode": "gqa"}
    checks: ClassVar[Mapping[str, Check]] = {
        **DFlashConfig.checks,
        "markov_rank": ("a whole number of at least 0", lambda v: is_whole(v) and v >= 0),
        **dict.fromkeys(("enable_confidence_head", "confidence_head_with_markov"), SWITCH),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        markov_head_class(self.markov_head_type)
        temperatures = tuple(self.confidence_temperatures)
        drafts = self.block_size - (not self.sample_from_anchor)
        if temperatures and (len(temperatures) != drafts or not all(t > 0 for t in temperatures)):
            raise CheckpointError(f"confidence_temperatures must be {drafts} positive numbers, one a draft.")
        object.__setattr__(self, "confidence_temperatures", temperatures)

    @property
    def confidence_rank(self) -> int:
        """Size of the token embedding that the confidence head reads; 0: none."""
        return self.markov_rank if self.confidence_head_with_markov else 0


@register_drafter("dspark")
class DSparkDraftModel(SequentialDraftModel):
    """A DSpark drafter. Its files may hold an embedding and a head of their own, frozen copies of the target's.

    Both heads are trained with the true token before each prediction. The confidence head learns, by cross-entropy,
    the overlap of the target's and the drafter's distributions: the probability that a sampled draft is accepted.
    """

    config_class: ClassVar[type[DFlashConfig]] = DSparkConfig
    own_tables: ClassVar[tuple[str, ...]] = ("embed_tokens", "lm_head")
    added_modules: ClassVar[tuple[str, ...]] = ("markov_head", "confidence_head")
    head_modules: ClassVar[tuple[str, ...]] = ("lm_head", "markov_head", "confidence_head")
    config: DSparkConfig

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        if config.markov_rank:
            head, drafted = markov_head_class(config.markov_head_type), config.draft_vocab_size or config.vocab_size
            self.markov_head = head(config.vocab_size, drafted, config.markov_rank, config.hidden_size)
        if config.enable_confidence_head:
            self.confidence_head = ConfidenceHead(config.hidden_size, config.confidence_rank)

    @classmethod
    def recognises(cls, signs: Mapping[str, Any]) -> bool:
        """Whether a config's keys or names are DSpark's. Without either head it is DFlash in DeepSpec's packaging."""
        named = any("dspark" in name.lower() for name in (*signs["architectures"], *signs["algorithms"]))
        named = named or signs.get("projector_type") == "dspark"
        has_heads = bool(signs.get("markov_rank") or signs.get("enable_confidence_head"))
        return has_heads or (named and signs.get("markov_rank") is None)

    def keep_tables(self, names: set[str]) -> None:
        """Allocate the tables ``names``, some of :attr:`own_tables`, which the caller loads."""
        config = self.config
        if "embed_tokens" in names:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if "lm_head" in names and self.token_ids is None:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def bind(self, target: "LoadedTargetModel") -> None:
        """As in DFlash; tables that equal the target's are dropped and the target's used."""
        super().bind(target)
        for name in [name for name in self.own_tables if name in self]:
            adapter = target.adapter
            if _same_table(self[name], adapter.embedding if name == "embed_tokens" else adapter.head_table):
                self.pop(name)

    def embed(self, tokens_BL: mx.array) -> mx.array:
        """Embeddings ``[B, L, E]`` from the target's table, or the drafter's own."""
        if "embed_tokens" not in self:
            return super().embed(tokens_BL)
        return self.embed_tokens(tokens_BL) * self.config.input_embedding_scale

    def walk(self, anchors_B: mx.array, hidden_BNE: mx.array, choose: Choose) -> Proposal:
        """As the base has it. Sampled drafts have no confidence: the head would read what was sampled."""
        base_BNV, (blocks, drafts, _) = self.head(hidden_BNE), hidden_BNE.shape
        state_BR = mx.zeros((blocks, self.config.markov_rank), hidden_BNE.dtype)
        walk, before = Walk(choose), [anchors_B.astype(mx.int32)]
        for i in range(drafts):
            logits_BV = base_BNV[:, i]
            if "markov_head" in self:
                before_BR = self.markov_head.markov_w1(before[-1])
                latent_BR, state_BR = self.markov_head.step(before_BR, hidden_BNE[:, i], state_BR)
                logits_BV = logits_BV + self.markov_head.bias(latent_BR)
            before.append(walk.step(logits_BV, self.tokens_of))
        confidence_BN = None
        if "confidence_head" in self and not walk.log_q:
            logit_BN = self._confidence_logits(hidden_BNE, mx.stack(before[:-1], axis=1))
            temperatures = self.config.confidence_temperatures
            confidence_BN = mx.sigmoid(logit_BN / mx.array(temperatures[:drafts]) if temperatures else logit_BN)
        return walk.proposal(self.candidates_of(base_BNV), confidence_BN)

    @property
    def needs_target_logits(self) -> bool:
        """Whether there is a confidence head to teach."""
        return "confidence_head" in self

    def taught_logits(
        self, base_TV: mx.array, hidden_TE: mx.array, previous_T: mx.array, positions_T: mx.array
    ) -> mx.array:
        """Logits ``[T, V]`` with the bias of the true token before each prediction."""
        if "markov_head" not in self:
            return base_TV
        before_TR = self.markov_head.markov_w1(previous_T)
        latent_TR = self.markov_head.walk(before_TR, hidden_TE, positions_T, self.block_size - 1)
        return base_TV + self.markov_head.bias(latent_TR)

    def auxiliary_losses(self, hidden_TE: mx.array, previous_T: mx.array, predictions: Predictions) -> mx.array | None:
        """Cross-entropy ``[T]`` of the confidence with ``sum(min(p, q))``, the acceptance probability (a constant).

        ``p`` and ``q`` are the distributions of target and drafter. With a reduced vocabulary ``p`` is renormalised
        (:class:`~dflash.drafters.trainable.Predictions`), so the confidence ignores the target's other tokens.
        """
        if predictions.target_logits_TV is None or "confidence_head" not in self:
            return None
        p_TV, q_TV = softmax(predictions.target_logits_TV), softmax(mx.stop_gradient(predictions.logits_TV))
        accepted_T = mx.minimum(p_TV, q_TV).sum(-1)  # 1 - sum(|p - q|) / 2, as published
        logit_T = self._confidence_logits(hidden_TE, previous_T)
        return mx.logaddexp(logit_T, mx.zeros_like(logit_T)) - accepted_T * logit_T

    def _confidence_logits(self, hidden_TE: mx.array, previous_T: mx.array) -> mx.array:
        """Logits ``[T]`` or ``[B, N]`` in float32: the confidence in the drafts after the tokens ``previous_T``."""
        parts = [hidden_TE]
        if self.config.confidence_rank:
            parts.append(self.markov_head.markov_w1(previous_T))
        return self.confidence_head(parts).astype(mx.float32)


def _same_table(mine: nn.Module, theirs: nn.Module) -> bool:
    """Whether two tables store the same numbers."""
    ours, other = (dict(tree_flatten(table.parameters())) for table in (mine, theirs))
    return ours.keys() == other.keys() and all(mx.array_equal(ours[name], other[name]).item() for name in ours)
