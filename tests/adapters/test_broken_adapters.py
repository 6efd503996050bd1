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
from dflash.adapters.whole_models import WholeModelAdapter
from dflash.core.errors import IncompatibleModelsError
from dflash.target.trial import first_difference

VOCAB, GAIN, TEMPER = 97, 3.0, 0.5
NOT_ROWS = r"embed\(\) does not return the rows of the table"
OTHER_LOGITS = r"head\(backbone\(x\)\) equals model\(x\): logits differs by"
NO_OUTPUT = r"feature\(\) of layer 0 is none of the hidden states that the layer returned"


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


def not_normalised(self, tokens, cache):
    norm, self.backbone["last_norm"] = self.backbone.last_norm, lambda hidden: hidden
    try:
        return self.backbone(tokens, cache)
    finally:
        self.backbone["last_norm"] = norm


def blocks(choose):
    """Layers that are chosen from the right ones."""
    return {"layers": property(lambda self: choose(self.backbone.blocks))}


def scorers_rows(self, tokens):
    return self.model.scorer.weight[tokens]


def scaled_rows(self, tokens):
    return self.embedding(tokens) * GAIN


WHOLE_MODEL = {
    "backbone": property(lambda self: self.model),
    "layers_owner": property(lambda self: self.model.trunk),
    "layers": property(lambda self: self.model.trunk.blocks),
    "embedding": property(lambda self: self.model.trunk.lexicon),
}
REVERSED = blocks(lambda layers: layers[::-1])
BROKEN: dict[str, tuple[dict, str]] = {  # what differs from the right adapter, and what the trial says of it
    "layers reversed": (
        REVERSED, "layers are the model's, .*: the model calls layer 1 of the adapter before layer 0; list them"
    ),
    "half of the layers": (
        blocks(lambda layers: layers[:2]), r"layers leaves out trunk\.blocks\.2, which the model calls"
    ),
    "no layers": (blocks(lambda layers: []), "layers is empty"),
    "one layer twice": (
        blocks(lambda layers: [*layers, layers[-1]]), "layers holds one module twice, the second time as layer 4"
    ),
    "the norm as a layer": (
        {"layers": property(lambda self: [*self.backbone.blocks, self.backbone.last_norm])},
        "the layers' outputs: No list of Trunk holds all layers of the adapter",
    ),
    "no scale": ({"embedding_scale": 1.0}, r"embedding_scale is 1, but the model multiplies embed\(\) by 3"),
    "scaled rows": (
        {"embed": scaled_rows}, r"embed\(\) returns the table's rows times 3; return the rows themselves"
    ),
    "zero rows": ({"embed": lambda self, tokens: mx.zeros_like(self.embedding(tokens))}, NOT_ROWS),
    "shifted rows": ({"embed": lambda self, tokens: self.embedding(tokens + 1)}, NOT_ROWS),
    "the scorer as embedding": (
        {"embed": scorers_rows, "embedding": property(lambda self: self.model.scorer)}, NOT_ROWS
    ),
    "a small vocabulary": ({"vocab_size": 50}, "vocab_size is 50, the embedding table has 97 rows"),
    "half of the hidden size": (
        {"hidden_size": 16}, r"embed\(\) returns shape \(1, 24, 32\), expected \(1, 24, 16\): one row of hidden_size"
    ),
    "a short limit": ({"max_length": 8}, "max_length is 8; expected a count of at least 64 tokens, or None"),
    "a limit below the config's": ({"max_length": 128}, "max_length is 128, the model's config allows 512 tokens"),
    "a limit as text": ({"max_length": "512"}, "max_length is '512'; expected a count"),
    "stop tokens in a list": (
        {"stop_tokens": lambda self, tokenizer: list(tokenizer.eos_token_ids)},
        r"stop_tokens\(\) returns a list; expected a frozenset of token ids",
    ),
    "no temper": ({"head": lambda self, hidden: self.model.scorer(hidden)}, OTHER_LOGITS),
    "no cache passed": (
        {"run_backbone": lambda self, tokens, cache: self.backbone(tokens)},
        "a pass of 13 tokens over 0 cached ones leaves 0 in the cache; .* must pass its cache",
    ),
    "another norm's name": (
        {"run_backbone": WholeModelAdapter.run_backbone, "norm_name": "norm"},
        "Trunk has no norm; norm_name must name the backbone's last norm",
    ),
    "not normalised": ({"run_backbone": not_normalised}, OTHER_LOGITS),
    "the head in the backbone": (
        WHOLE_MODEL, r"the backbone returns shape \(1, 24, 97\), expected \(1, 24, 32\): .* override run_backbone"
    ),
    "the norm in the head": (
        {
            "run_backbone": not_normalised,
            "head": lambda self, hidden: self.model.scorer(self.backbone.last_norm(hidden)) / TEMPER,
        },
        r"head\(\) gives the same logits for hidden states of any size, so it normalises them",
    ),
    "features of the layer before": (
        {"forward": lambda self, tokens, cache, ids, recorder=None: TargetAdapter.forward(
            self, tokens, cache, [max(0, i - 1) for i in ids], recorder
        )},
        "features are the layers' outputs: layer 1 differs",
    ),
    "zero features": ({"feature": lambda self, output: mx.zeros_like(output)}, NO_OUTPUT),
}  # fmt: skip


def broken(name: str) -> type[TargetAdapter]:
    return type("Broken", (Right,), BROKEN[name][0])


def target_with(adapter: type[TargetAdapter], **model: bool) -> LoadedTargetModel:
    odd = Odd(**model)
    return LoadedTargetModel(odd, adapter=adapter(odd))


def test_the_right_adapter_passes_every_check():
    report = check(target_with(Right), rounds=4)
    assert report.failure == ""
    assert [found.name for found in report.checks] == list(CHECKS)


@pytest.mark.parametrize("name", BROKEN)
def test_a_wrong_part_is_named(name):
    assert re.search(BROKEN[name][1], first_difference(target_with(broken(name))) or "passed")


def test_the_report_holds_the_difference_and_the_other_checks():
    report = check(target_with(TargetAdapter), rounds=1)
    assert "the adapter has no backbone: AttributeError" in report.failure
    assert len(report.checks) == len(CHECKS)


def test_a_model_that_runs_its_list_backwards_needs_an_adapter_that_says_so():
    """Layer ids count in the order of the calls, whatever the order of the list."""
    assert "the model calls layer 1 of the adapter before layer 0" in str(
        first_difference(target_with(Right, backwards=True))
    )
    target = target_with(broken("layers reversed"), backwards=True)
    assert first_difference(target) is None
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


def test_a_model_with_its_norm_outside_the_backbone_does_not_fit_the_generic_adapter():
    class NormOutside(Odd):
        def __init__(self):
            super().__init__()
            self.norm, self.trunk.last_norm = self.trunk.last_norm, nn.Identity()

        def __call__(self, tokens, cache=None):
            return self.scorer(self.norm(self.trunk(tokens, cache))) / TEMPER

    with pytest.raises(IncompatibleModelsError, match=r"head\(\) gives the same logits"):
        LoadedTargetModel(NormOutside())


def test_the_adapter_of_the_readme_passes():
    readme = (Path(__file__).parents[2] / "adapters" / "README.md").read_text()
    example, one_line = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    names: dict[str, object] = {"model": Odd()}
    with registry.ADAPTERS.temporary("odd", Right), contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(example, names)
        exec(one_line.replace("check(model)", "check(model, rounds=2)", 1), names)
        assert type(LoadedTargetModel(names["model"]).adapter).__name__ == "OddAdapter"
    assert printed.getvalue() == "decodes exactly\n"


def test_the_readme_names_every_check():
    readme = (Path(__file__).parents[2] / "adapters" / "README.md").read_text()
    assert re.findall(r"^\| (.*?) \|", readme.partition("| check |")[2].partition("\n\n")[0], re.M) == list(CHECKS)
