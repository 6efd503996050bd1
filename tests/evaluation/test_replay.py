"""Drafters are scored on finished texts exactly as by decoding them, and where decoding does not go."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from support.acceptance import plain
from support.kinds import KINDS, VOCAB, random_drafter
from support.models import ScriptedDrafter, llama_model, qwen3_model, randomize, wrapped_tokenizer

from dflash import DFlashSpeculativeDecoder, LoadedTargetModel, Proposal
from dflash.adapters.conformance import small_models
from dflash.core.errors import GenerationError
from dflash.drafters import mtp
from dflash.drafters.autoregressive import AutoregressiveDrafter
from dflash.drafters.combined import CombinedDrafter
from dflash.drafters.ngram import NgramDrafter
from dflash.evaluation import replay as replay_module
from dflash.evaluation.acceptance import counts, measure_batch, measure_one
from dflash.evaluation.replay import replay
from dflash.evaluation.texts import Texts

PROMPTS = [[3, 1, 2, 0, 1], [1, 1], [0], [2, 3, 3, 1, 0, 2, 1, 1, 3]]
OTHERS = ("ngram", "combined", "autoregressive", "mtp", "window")


def decoder_of(kind: str, monkeypatch: pytest.MonkeyPatch, **options) -> DFlashSpeculativeDecoder:
    """A small random target, often enough guessed right of four tokens, and a drafter of the kind."""
    mx.random.seed(0)
    model = qwen3_model(1, VOCAB) if kind != "mtp" else small_models.build("qwen3_5", vocab_size=VOCAB, num_experts=0)
    target = LoadedTargetModel(model, wrapped_tokenizer())
    if kind == "ngram":
        drafter = NgramDrafter()
    elif kind == "combined":
        drafter = CombinedDrafter(random_drafter("dspark", 3))
    elif kind == "autoregressive":
        drafter = AutoregressiveDrafter(LoadedTargetModel(llama_model(2, VOCAB, window=6)), 5)
        monkeypatch.setattr(drafter, "bind", lambda target: None)
    elif kind == "mtp":
        target.folder, drafter = Path("mtp"), mtp.MTPDrafter()
        monkeypatch.setattr(mtp, "read_mtp_layer", lambda *_: randomize(mtp.new_mtp_layer(target), 3, scale=2.0))
    else:
        drafter = random_drafter("dflash" if kind == "window" else kind, 3)
        if kind == "window":
            drafter.limit_context(5)
    return DFlashSpeculativeDecoder(target, drafter, max_seq_length=512, **options)


ENDS = {"either": (23, [2], None), "one token": (1, [], None), "narrow": (23, [2], 3)}


@pytest.mark.parametrize(
    ("kind", "end"),
    [*((kind, "either") for kind in (*KINDS, *OTHERS)), *((k, e) for k in ("dflash", "ngram") for e in [*ENDS][1:])],
)
def test_the_walk_counts_what_decoding_counts(kind, end, tmp_path, monkeypatch):
    """Two of the answers end with a stop token, the others at the limit; alone and in batches."""
    max_tokens, stops, block_size = ENDS[end]
    stops = [1] if stops and kind == "mtp" else stops
    decoder = decoder_of(kind, monkeypatch, block_size=block_size)
    texts = Texts(decoder.loaded_target, stops, tmp_path).all(PROMPTS, max_tokens)
    found = [counts(blocks, decoder.block_size) for (blocks,) in replay([decoder], texts)]
    fresh = decoder_of(kind, monkeypatch, block_size=block_size)  # a combined drafter learns from request to request
    decoded = [measure_one(fresh, prompt, max_tokens, stop_token_ids=stops) for prompt in PROMPTS]
    assert [plain(part) for part in found] == [plain(part) for part, _ in decoded]
    if kind != "combined":  # which would learn from the rows in another order
        batch = measure_batch(decoder, PROMPTS, 3, max_tokens, stop_token_ids=stops)
        assert [plain(part) for _, part, _ in sorted(batch)] == [plain(part) for part in found]
    if end != "one token":
        right, verified = (sum(getattr(part, name).sum() for part in found) for name in ("accepted", "verified"))
        assert 0 < right < verified, "always right or always wrong shows nothing"
        assert any(text.ended for text in texts) == bool(stops)


@pytest.mark.parametrize("kind", [*KINDS, *OTHERS])
def test_every_anchor_has_the_block_that_its_drafter_would_draft(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(replay_module, "_ANCHORS", 9)
    decoder = decoder_of(kind, monkeypatch)
    texts = Texts(decoder.loaded_target, [], tmp_path).all(PROMPTS[:2], 24)
    for text, (walk,), (every,) in zip(texts, replay([decoder], texts), replay([decoder], texts, True), strict=True):
        assert [block.at for block in every] == list(range(len(text.answer) - 1))
        if kind not in ("ngram", "combined"):  # whose drafts depend on those before
            assert all(min(every[block.at].right, block.verified) == block.right for block in walk)
        for block in every:
            assert block.right <= block.verified <= len(text.answer) - 1 - block.at
            assert block.chances is None or len(block.chances) == block.verified
    if kind in KINDS:
        alone = decoder.draft_model
        cache = alone.make_cache()
        ids = mx.array([text.tokens[: len(text.prompt) + 20]])
        _, features = decoder.loaded_target.forward_hidden(ids, None, alone.target_layer_ids)
        alone.extend_context(features, cache, ids)
        expected = alone.propose(mx.array([[text.answer[20]]]), decoder.block_size - 1, cache).acceptance_chances()
        np.testing.assert_allclose(every[20].chances, np.array(expected)[: every[20].verified], atol=1e-3)


OWN = {
    "propose": lambda self, anchor, length, cache: Proposal(mx.full((1, length), 1)),
    "draft_hidden": lambda self, *args: super(type(self), self).draft_hidden(*args)[..., ::-1],
    "extend_context": lambda self, features, *rest: super(type(self), self).extend_context(features * 0, *rest),
}


@pytest.mark.parametrize("method", OWN)
def test_a_subclass_that_drafts_in_its_own_way_is_scored_in_that_way(method, tmp_path, monkeypatch):
    decoder = decoder_of("dflash", monkeypatch)
    drafter = decoder.draft_model
    texts = Texts(decoder.loaded_target, [], tmp_path).all(PROMPTS[:2], 16)
    found = list(replay([decoder], texts))
    drafter.__class__ = type("Own", (type(drafter),), {method: OWN[method]})
    walks = list(replay([decoder], texts))
    assert walks != found
    for (walk,), (every,) in zip(walks, replay([decoder], texts, True), strict=True):
        assert all(min(every[block.at].right, block.verified) == block.right for block in walk)
    decoded = [measure_one(decoder, prompt, 16, stop_token_ids=[]) for prompt in PROMPTS[:2]]
    assert [plain(counts(blocks, decoder.block_size)) for (blocks,) in walks] == [plain(part) for part, _ in decoded]


def test_several_drafters_share_a_reading_and_each_gets_its_own_layers(tmp_path, monkeypatch):
    first = decoder_of("dflash", monkeypatch)
    other = random_drafter("dflash", 5)
    other.config = type(other.config)(**vars(other.config) | {"target_layer_ids": (3, 0, 2)})
    second = DFlashSpeculativeDecoder(first.loaded_target, other, block_size=4)
    third = DFlashSpeculativeDecoder(first.loaded_target, NgramDrafter())
    decoders, prompts = (first, second, third), PROMPTS[:2]
    texts = Texts(first.loaded_target, [], tmp_path).all(prompts, 16)
    for decoder, found in zip(decoders, zip(*replay(decoders, texts), strict=True), strict=True):
        decoded = [measure_one(decoder, prompt, 16, stop_token_ids=[]) for prompt in prompts]
        assert [plain(counts(blocks, decoder.block_size)) for blocks in found] == [plain(part) for part, _ in decoded]


def test_what_cannot_be_replayed_is_named(tmp_path, monkeypatch):
    decoder = decoder_of("dflash", monkeypatch)
    texts = Texts(decoder.loaded_target, [], tmp_path).all(PROMPTS[:1], 20)
    drafter = ScriptedDrafter([0] * 40, VOCAB)
    for proposal, message in (
        (Proposal(mx.array([[9]])), "proposed the token id 9"),
        (Proposal(mx.array([[1, 2]]), parents=[-1, -1]), "drafts trees"),
        (Proposal(mx.zeros((1, 99), mx.int32)), "at most 15"),
    ):
        monkeypatch.setattr(drafter, "propose", lambda *_, proposal=proposal: proposal)
        own = DFlashSpeculativeDecoder(decoder.loaded_target, drafter)
        with pytest.raises(GenerationError, match=message):
            list(replay([own], texts))
        with pytest.raises(GenerationError, match=message):
            list(measure_batch(own, PROMPTS[:2], 2, 20))


def test_a_row_of_a_batch_that_fails_ends_the_score(monkeypatch):
    def failing(tokens, logits):
        if len(tokens) > 8:
            raise GenerationError("here")
        return logits

    with pytest.raises(GenerationError, match="here"):
        list(measure_batch(decoder_of("dflash", monkeypatch), PROMPTS[:3], 3, 20, logits_processors=[failing]))
