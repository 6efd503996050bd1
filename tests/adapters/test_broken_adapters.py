"""Adapters that are wrong in one place fail the trial with a message that names the part; the right one passes.

Tests ``dflash.target.trial``. Most of these mistakes leave decoding exact and make a drafter worthless, so that
nothing else would show them.
"""

import contextlib
import io
import re
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache
from support.models import LAYERS, llama_model

from dflash import LoadedTargetModel, TargetAdapter
from dflash.adapters import registry
from dflash.adapters.conformance import check
from dflash.adapters.conformance.checks import CHECKS
from dflash.core.errors import IncompatibleModelsError
from dflash.target.trial import first_difference

VOCAB, GAIN, TEMPER = 97, 3.0, 0.5


class Trunk(nn.Module):
    """Llama's layers under names of their own; embeddings are multiplied by ``GAIN``."""

    def __init__(self, inner: nn.Module, backwards: bool = False):
        super().__init__()
        self.lexicon, self.blocks, self.last_norm = inner.embed_tokens, inner.layers, inner.norm
        self.backwards = backwards

    def __call__(self, tokens, cache=None):
        h = self.lexicon(tokens) * GAIN
        cache = cache or [None] * len(self.blocks)
        mask = create_attention_mask(h, cache[0])
        order = range(len(self.blocks))
        for i in reversed(order) if self.backwards else order:
            h = self.blocks[i](h, mask, cache[i])
        return self.last_norm(h)


class Odd(nn.Module):
    """An architecture whose every part has another name than usual."""

    model_type = "odd"

    def __init__(self, backwards: bool = False):
        super().__init__()
        inner = llama_model(7, VOCAB)
        self.trunk, self.scorer = Trunk(inner.model, backwards), inner.lm_head
        self.args = SimpleNamespace(max_position_embeddings=512)

    @property
    def layers(self):
        return self.trunk.blocks

    def __call__(self, tokens, cache=None):
        return self.scorer(self.trunk(tokens, cache)) / TEMPER


class Right(TargetAdapter):
    """The adapter as it should be."""

    hidden_size, vocab_size, max_length = 32, VOCAB, None
    embedding_scale = GAIN

    @property
    def backbone(self):
        return self.model.trunk

    @property
    def layers(self):
        return self.backbone.blocks

    @property
    def embedding(self):
        return self.backbone.lexicon

    def head(self, hidden):
        return self.model.scorer(hidden) / TEMPER


class LayersReversed(Right):
    layers = property(lambda self: self.backbone.blocks[::-1])


class LayersPermuted(Right):
    layers = property(lambda self: [self.backbone.blocks[i] for i in (0, 2, 1, 3)])


class HalfOfTheLayers(Right):
    layers = property(lambda self: self.backbone.blocks[:2])


class NoLayers(Right):
    layers = property(lambda self: [])


class OneLayerTwice(Right):
    layers = property(lambda self: [*self.backbone.blocks, self.backbone.blocks[-1]])


class NormAsLayer(Right):
    layers = property(lambda self: [*self.backbone.blocks, self.backbone.last_norm])


class NoScale(Right):
    embedding_scale = 1.0


class ScaledTwice(Right):
    embedding_scale = GAIN**2


class ScaledRows(Right):
    def embed(self, tokens):
        return self.embedding(tokens) * GAIN


class ScaledRowsAndNoScale(ScaledRows):
    embedding_scale = 1.0


class ZeroRows(Right):
    def embed(self, tokens):
        return mx.zeros_like(self.embedding(tokens))


class ShiftedRows(Right):
    def embed(self, tokens):
        return self.embedding(tokens + 1)


class FinalHiddenAsRows(Right):
    def embed(self, tokens):
        return self.backbone(tokens)


class ScorerAsTable(Right):
    def embed(self, tokens):
        return self.model.scorer.weight[tokens]


class ScorerAsEmbedding(ScorerAsTable):
    embedding = property(lambda self: self.model.scorer)


class SmallVocabulary(Right):
    vocab_size = 50


class LargeVocabulary(Right):
    vocab_size = 500


class HalfHiddenSize(Right):
    hidden_size = 16


class ShortLimit(Right):
    max_length = 8


class LimitBelowTheConfig(Right):
    max_length = 128


class LimitAsText(Right):
    max_length = "512"


class StopTokensInAList(Right):
    def stop_tokens(self, tokenizer):
        return list(tokenizer.eos_token_ids)


class NoOverrides(TargetAdapter):
    pass


class NoTemper(Right):
    def head(self, hidden):
        return self.model.scorer(hidden)


class TiedHead(Right):
    def head(self, hidden):
        return self.embedding.as_linear(hidden) / TEMPER


class CacheNotPassed(Right):
    def run_backbone(self, tokens, cache):
        return self.backbone(tokens)


class CacheForSingleTokens(Right):
    def run_backbone(self, tokens, cache):
        return self.backbone(tokens, cache if tokens.shape[1] == 1 else None)


class NotNormalised(Right):
    def run_backbone(self, tokens, cache):
        norm, self.backbone["last_norm"] = self.backbone.last_norm, lambda hidden: hidden
        try:
            return self.backbone(tokens, cache)
        finally:
            self.backbone["last_norm"] = norm


class HeadInTheBackbone(Right):
    backbone = property(lambda self: self.model)
    layers_owner = property(lambda self: self.model.trunk)
    layers = property(lambda self: self.model.trunk.blocks)
    embedding = property(lambda self: self.model.trunk.lexicon)


class NormInTheHead(NotNormalised):
    def head(self, hidden):
        return super().head(self.backbone.last_norm(hidden))


class NormalisedTwice(Right):
    def run_backbone(self, tokens, cache):
        return self.backbone.last_norm(2 * self.backbone(tokens, cache) + 1)


class ZeroFeatures(Right):
    def feature(self, output):
        return mx.zeros_like(output)


class NormalisedFeatures(Right):
    def feature(self, output):
        return self.backbone.last_norm(output)


BROKEN = {
    LayersReversed: "layers are the model's, .*: the model calls layer 1 of the adapter before layer 0; list them",
    LayersPermuted: "the model calls layer 2 of the adapter before layer 1",
    HalfOfTheLayers: r"layers leaves out trunk\.blocks\.2, which the model calls",
    NoLayers: "layers is empty",
    OneLayerTwice: "layers holds one module twice, the second time as layer 4",
    NormAsLayer: "the layers' outputs: No list of Trunk holds layer 4 of the adapter",
    NoScale: r"embedding_scale is 1, but the model multiplies embed\(\) by 3",
    ScaledTwice: r"embedding_scale is 9, but the model multiplies embed\(\) by 3",
    ScaledRows: r"embed\(\) returns the table's rows times 3; return the rows themselves",
    ScaledRowsAndNoScale: r"embed\(\) returns the table's rows times 3",
    ZeroRows: r"embed\(\) does not return the rows of the table",
    ShiftedRows: r"embed\(\) does not return the rows of the table",
    FinalHiddenAsRows: r"embed\(\) does not return the rows of the table",
    ScorerAsTable: r"embed\(\) does not return the rows of the table",
    ScorerAsEmbedding: r"embed\(\) does not return the rows of the table",
    SmallVocabulary: "vocab_size is 50, the embedding table has 97 rows",
    LargeVocabulary: "vocab_size is 500, the embedding table has 97 rows",
    HalfHiddenSize: r"embed\(\) returns shape \(1, 24, 32\), expected \(1, 24, 16\): one row of hidden_size",
    ShortLimit: "max_length is 8; expected a count of at least 64 tokens, or None",
    LimitBelowTheConfig: "max_length is 128, the model's config allows 512 tokens",
    LimitAsText: "max_length is '512'; expected a count",
    StopTokensInAList: r"stop_tokens\(\) returns a list; expected a frozenset of token ids",
    NoOverrides: "the adapter has no backbone: AttributeError",
    NoTemper: r"head\(backbone\(x\)\) equals model\(x\): logits differs by",
    TiedHead: r"head\(backbone\(x\)\) equals model\(x\): logits differs by",
    CacheNotPassed: "a pass of 13 tokens over 0 cached ones leaves 0 in the cache; .* must pass its cache",
    CacheForSingleTokens: "a pass of 13 tokens over 0 cached ones leaves 0 in the cache",
    NotNormalised: r"head\(backbone\(x\)\) equals model\(x\): logits differs by",
    HeadInTheBackbone: r"the backbone returns shape \(1, 24, 97\), expected \(1, 24, 32\): .* override run_backbone",
    NormInTheHead: r"head\(\) gives the same logits for hidden states of any size, so it normalises them",
    NormalisedTwice: r"head\(backbone\(x\)\) equals model\(x\): logits differs by",
    ZeroFeatures: r"feature\(\) of layer 0 is none of the hidden states that the layer returned",
    NormalisedFeatures: r"feature\(\) of layer 0 is none of the hidden states that the layer returned",
}


def target_with(adapter: type[TargetAdapter], **model: bool) -> LoadedTargetModel:
    odd = Odd(**model)
    return LoadedTargetModel(odd, adapter=adapter(odd))


def test_the_right_adapter_passes_every_check():
    report = check(target_with(Right), rounds=4)
    assert report.failure == ""
    assert [found.name for found in report.checks] == list(CHECKS)


@pytest.mark.parametrize("adapter", BROKEN, ids=lambda adapter: adapter.__name__)
def test_a_wrong_part_is_named(adapter):
    assert re.search(BROKEN[adapter], first_difference(target_with(adapter)) or "passed")


@pytest.mark.parametrize("adapter", [NoOverrides, HalfOfTheLayers])
def test_the_report_holds_the_difference_and_the_other_checks(adapter):
    report = check(target_with(adapter), rounds=1)
    assert re.search(BROKEN[adapter], report.failure)
    assert len(report.checks) == len(CHECKS)


def test_a_model_that_runs_its_list_backwards_needs_an_adapter_that_says_so():
    """Layer ids count in the order of the calls, whatever the order of the list."""
    assert "the model calls layer 1 of the adapter before layer 0" in str(
        first_difference(target_with(Right, backwards=True))
    )
    assert first_difference(target_with(LayersReversed, backwards=True)) is None
    target = target_with(LayersReversed, backwards=True)
    odd = target.model
    tokens = mx.array([[1, 2, 3]])
    _, features = target.forward_hidden(tokens, target.make_cache(), range(LAYERS))
    first = odd.trunk.blocks[-1](odd.trunk.lexicon(tokens) * GAIN, "causal")
    assert mx.allclose(features[..., :32], first, atol=1e-4)


def test_a_layer_outside_the_list_is_missed_too():
    """As in backbones that keep their first block apart."""

    class Apart(Trunk):
        def __init__(self, inner):
            super().__init__(inner)
            self.first, self.blocks = inner.layers[0], inner.layers[1:]

        def __call__(self, tokens, cache=None):
            h = self.lexicon(tokens) * GAIN
            mask = create_attention_mask(h, cache[0])
            for block, c in zip([self.first, *self.blocks], cache, strict=True):
                h = block(h, mask, c)
            return self.last_norm(h)

    odd = Odd()
    odd.trunk = Apart(llama_model(7, VOCAB).model)
    odd.make_cache = lambda: [KVCache() for _ in range(LAYERS)]
    target = LoadedTargetModel(odd, adapter=Right(odd))
    assert "layers leaves out trunk.first" in str(first_difference(target))


def test_a_model_with_its_norm_beside_the_head_does_not_fit_the_generic_adapter():
    class NormOutside(Odd):
        def __init__(self):
            super().__init__()
            self.norm, self.trunk.last_norm = self.trunk.last_norm, nn.Identity()

        def __call__(self, tokens, cache=None):
            return self.scorer(self.norm(self.trunk(tokens, cache))) / TEMPER

    with pytest.raises(IncompatibleModelsError, match=r"head\(\) gives the same logits"):
        LoadedTargetModel(NormOutside())


def test_the_adapter_of_the_readme_passes(monkeypatch):
    readme = (Path(__file__).parents[2] / "adapters" / "README.md").read_text()
    example, one_line = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    monkeypatch.setattr(registry.ADAPTERS, "_known", dict(registry.ADAPTERS.all()))
    names: dict[str, object] = {"model": Odd()}
    exec(example, names)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(one_line.replace("check(model)", "check(model, rounds=2)", 1), names)
    assert printed.getvalue() == "decodes exactly\n"
    assert type(LoadedTargetModel(names["model"]).adapter).__name__ == "OddAdapter"


def test_the_readme_names_every_check():
    readme = (Path(__file__).parents[2] / "adapters" / "README.md").read_text()
    assert re.findall(r"^\| (.*?) \|", readme.partition("| check |")[2].partition("\n\n")[0], re.M) == list(CHECKS)
