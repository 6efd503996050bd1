"""DFlash 2: a DFlash drafter with convolutions over the block's rows, and a selector that walks over the best tokens.

The layers fill the block in one pass, as in DFlash. Before and after attention and MLP each row is mixed with the rows
before it, by kernels that depend on the row. Then a token is chosen at one position after another, among the ``K`` best
of each, by its logit and how well it follows the token chosen before it. Keys, weight names and formulas are those of
z-lab's dflash 0.1.0; there is no paper.

Shapes: B blocks, L block positions, E hidden size, S sides (before, after), T taps, N drafts of each block or
predictions of many, R rank, K candidates, V drafted vocabulary. The head takes any leading axes: ``[N]`` or ``[B, N]``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import mlx.core as mx
import mlx.nn as nn

from ..core.errors import CheckpointError
from .checkpoints.config import POSITIVE, Check, DFlashConfig, or_null
from .kinds import register_drafter
from .layers import Attend, DraftLayer
from .protocol import Proposal
from .sequential import Choose, SequentialDraftModel, Walk
from .trainable import Predictions

if TYPE_CHECKING:
    from ..decoding.sampling import DrawingSampler

Kernel = Sequence[mx.array]
"""The coefficients ``[B, L, E]`` of each tap: of the row itself, of the one before it, and so on."""

_OWN_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


@dataclass(frozen=True)
class DFlash2Config(DFlashConfig):
    """The further keys of a DFlash 2 ``config.json``; all but the last are required.

    A convolution mixes ``conv_kernel_size`` rows; groups of ``conv_group_size`` channels share a dynamic coefficient.
    The selector chooses among ``selector_top_k`` tokens, by tables of rank ``selector_rank``. Only ids below
    ``selector_vocab_size`` are candidates: larger ones pad the vocabulary.
    """

    conv_kernel_size: int = field(kw_only=True)
    conv_group_size: int = field(kw_only=True)
    selector_rank: int = field(kw_only=True)
    selector_top_k: int = field(kw_only=True)
    selector_vocab_size: int | None = field(default=None, kw_only=True)

    architecture: ClassVar[str] = "DFlash2DraftModel"
    inside: ClassVar[tuple[str, ...]] = (*_OWN_KEYS, "block_size", "selector_vocab_size")
    checks: ClassVar[Mapping[str, Check]] = {
        **DFlashConfig.checks,
        **dict.fromkeys(_OWN_KEYS, POSITIVE),
        "selector_vocab_size": or_null(POSITIVE),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden_size % self.conv_group_size:
            raise CheckpointError(
                f"hidden_size {self.hidden_size} is not a multiple of conv_group_size {self.conv_group_size}."
            )
        known = (self.selector_vocab_size, self.draft_vocab_size, self.vocab_size)
        most = min(count for count in known if count is not None)
        if self.selector_top_k > most:
            raise CheckpointError(
                f"selector_top_k {self.selector_top_k} is more than the {most} tokens that it may choose."
            )


class DynamicConvolution(nn.Module):
    """Two causal convolutions over block rows, one before and one after a sublayer; a new one is the identity.

    The coefficient of tap ``t`` in channel ``c`` of row ``i`` is ``base[t, c] + dynamic[i, t, group of c]``. The
    dynamic parts of both sides come from the sublayer's input.
    """

    def __init__(self, config: DFlash2Config):
        super().__init__()
        taps, size = config.conv_kernel_size, config.hidden_size
        self._groups = size // config.conv_group_size
        self.base_kernel = mx.zeros((2, taps, size))
        self.base_kernel[:, 0] = 1
        self.kernel_projection = nn.Linear(size, 2 * taps * self._groups, bias=False)
        self.kernel_projection.weight = mx.zeros_like(self.kernel_projection.weight)

    def __call__(self, u_BLE: mx.array) -> tuple[Kernel, Kernel]:
        """The kernels of both sides, from the sublayer's input rows ``u_BLE``."""
        sides, taps, size = self.base_kernel.shape
        base_STE, width = self.base_kernel.astype(u_BLE.dtype), size // self._groups
        dynamic = self.kernel_projection(u_BLE).reshape(*u_BLE.shape[:2], sides, taps, self._groups)

        def kernel(side: int) -> Kernel:
            return [base_STE[side, tap] + mx.repeat(dynamic[:, :, side, tap], width, axis=-1) for tap in range(taps)]

        return kernel(0), kernel(1)


def convolve(x_BLE: mx.array, kernel: Kernel) -> mx.array:
    """Row ``i`` of the result is the sum over taps ``t`` of ``kernel[t][i] * x[i - t]``, 0 before the block."""
    length, total_BLE = x_BLE.shape[1], x_BLE * kernel[0]
    for tap in range(1, len(kernel)):
        total_BLE = total_BLE + mx.pad(x_BLE, [(0, 0), (tap, 0), (0, 0)])[:, :length] * kernel[tap]
    return total_BLE


class DFlash2Layer(DraftLayer):
    """A DFlash layer whose attention and MLP stand between two convolutions each."""

    def __init__(self, config: DFlash2Config, layer: int):
        super().__init__(config, layer)
        self.attention_conv = DynamicConvolution(config)
        self.mlp_conv = DynamicConvolution(config)

    def __call__(self, x_BLE: mx.array, offset: int | mx.array, attend: Attend) -> mx.array:
        u_BLE = self.input_layernorm(x_BLE)
        before, after = self.attention_conv(u_BLE)
        x_BLE = x_BLE + convolve(self.self_attn(convolve(u_BLE, before), offset, attend), after)
        u_BLE = self.post_attention_layernorm(x_BLE)
        before, after = self.mlp_conv(u_BLE)
        return x_BLE + convolve(self.mlp(convolve(u_BLE, before)), after)


class CandidateSelector(nn.Module):
    """How well each candidate follows a token: a product of three vectors of rank ``R``; 0 in a new selector."""

    def __init__(self, config: DFlash2Config):
        super().__init__()
        table = (config.vocab_size, config.selector_rank)
        self.predecessor_codebook = 0.02 * mx.random.truncated_normal(-2, 2, table)
        self.successor_codebook = mx.zeros(table)
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)

    def weighted(self, hidden_NE: mx.array, candidates_NK: mx.array) -> mx.array:
        """``[N, K, R]``: the factors that do not depend on the token before (:meth:`bias`)."""
        return self.hidden_projection(hidden_NE)[..., None, :] * self.successor_codebook[candidates_NK]

    def bias(self, weighted_NKR: mx.array, previous_N: mx.array) -> mx.array:
        """``[N, K]`` in float32, added to the logits of candidates that follow the tokens ``previous_N``."""
        return (weighted_NKR * self.predecessor_codebook[previous_N][..., None, :]).astype(mx.float32).sum(-1)


@register_drafter("dflash2")
class DFlash2DraftModel(SequentialDraftModel):
    """A DFlash 2 drafter. Its proposals hold the ``K`` candidates of each position, best logit first, and their scores.

    The selector is trained with the true token before each prediction: cross-entropy over the candidates, if the true
    token is among them.
    """

    config_class: ClassVar[type[DFlashConfig]] = DFlash2Config
    usual_options: ClassVar[dict[str, Any]] = {
        "conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16
    }  # fmt: skip
    added_modules: ClassVar[tuple[str, ...]] = ("attention_conv", "mlp_conv", "candidate_selector")
    head_modules: ClassVar[tuple[str, ...]] = ("lm_head", "candidate_selector")
    measures: ClassVar[tuple[str, ...]] = ("accuracy", "candidate_recall")
    config: DFlash2Config

    def __init__(self, config: DFlash2Config):
        super().__init__(config)
        self.layers = [DFlash2Layer(config, i) for i in range(config.num_hidden_layers)]
        self.candidate_selector = CandidateSelector(config)

    @classmethod
    def recognises(cls, signs: Mapping[str, Any]) -> bool:
        """Whether a config's names or keys are DFlash 2's."""
        named = any("dflash2" in name.lower() for name in (*signs["architectures"], *signs["algorithms"]))
        return named or any(signs.get(key) for key in _OWN_KEYS)

    def distribution(self, sampler: "DrawingSampler") -> Callable[[mx.array], mx.array]:
        """The candidates at the temperature of ``sampler``.

        Its filters are not applied, as published: the proposal names its distribution, so any would be exact.
        """
        return lambda scores_BK: nn.log_softmax(scores_BK / sampler.temp)

    def walk(self, anchors_B: mx.array, hidden_BNE: mx.array, choose: Choose) -> Proposal:
        """As the base has it, with tokens chosen among the candidates of their position."""
        columns_BNK, unary_BNK = self.candidates(self.head(hidden_BNE))
        candidates_BNK = self.tokens_of(columns_BNK)
        weighted_BNKR = self.candidate_selector.weighted(hidden_BNE, candidates_BNK)
        walk, tokens_B = Walk(choose), anchors_B
        for i in range(hidden_BNE.shape[1]):
            scores_BK = unary_BNK[:, i] + self.candidate_selector.bias(weighted_BNKR[:, i], tokens_B)
            tokens_B = walk.step(scores_BK, partial(_chosen, candidates_BNK[:, i]))
        return walk.proposal(candidates_BNK)

    def candidates(self, logits_NV: mx.array) -> tuple[mx.array, mx.array]:
        """Columns of the ``K`` best tokens of each row, and their logits in float32, each ``[N, K]``, best first."""
        known, count = self.config.selector_vocab_size, self.config.selector_top_k
        if known is not None:
            ids_V = self.tokens_of(mx.arange(logits_NV.shape[-1]))
            logits_NV = mx.where(ids_V < known, logits_NV, -mx.inf)
        best_NK = mx.argpartition(-mx.stop_gradient(logits_NV), count - 1, axis=-1)[..., :count]
        unary_NK = mx.take_along_axis(logits_NV, best_NK, axis=-1).astype(mx.float32)
        order_NK = mx.argsort(-mx.stop_gradient(unary_NK), axis=-1)
        return mx.take_along_axis(best_NK, order_NK, axis=-1), mx.take_along_axis(unary_NK, order_NK, axis=-1)

    def _taught(self, hidden_NE: mx.array, previous_N: mx.array, logits_NV: mx.array) -> tuple[mx.array, mx.array]:
        """Columns of the candidates and their scores ``[N, K]``, given the token before each prediction."""
        columns_NK, unary_NK = self.candidates(logits_NV)
        weighted_NKR = self.candidate_selector.weighted(hidden_NE, self.tokens_of(columns_NK))
        return columns_NK, unary_NK + self.candidate_selector.bias(weighted_NKR, previous_N)

    def auxiliary_losses(self, hidden_TE: mx.array, previous_T: mx.array, predictions: Predictions) -> mx.array:
        """Cross-entropy ``[T]`` over the candidates; 0 if the target's token is not among them."""
        columns_TK, scores_TK = self._taught(hidden_TE, previous_T, predictions.logits_TV)
        right_TK = columns_TK == predictions.tokens_T[:, None]
        losses_T = mx.logsumexp(scores_TK, axis=-1) - mx.where(right_TK, scores_TK, 0).sum(-1)
        return mx.where(right_TK.any(-1), losses_T, 0)

    def hits(self, hidden_TE: mx.array, previous_T: mx.array, predictions: Predictions) -> dict[str, mx.array]:
        """Whether the candidate chosen after the true token is the target's, and whether any candidate is."""
        columns_TK, scores_TK = self._taught(hidden_TE, previous_T, predictions.logits_TV)
        right_TK = columns_TK == predictions.tokens_T[:, None]
        if predictions.known_T is not None:
            right_TK = right_TK & predictions.known_T[:, None]
        chosen_T1 = mx.argmax(scores_TK, axis=-1, keepdims=True)
        accuracy_T = mx.take_along_axis(right_TK, chosen_T1, axis=-1)[:, 0]
        return {"accuracy": accuracy_T, "candidate_recall": right_TK.any(-1)}


def _chosen(candidates_BK: mx.array, columns_B: mx.array) -> mx.array:
    """The candidate of each row in its column."""
    return mx.take_along_axis(candidates_BK, columns_B[:, None], axis=-1)[:, 0]
