"""Drafters of a part of the vocabulary: which tokens they know, how they are trained, and that they decode exactly."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from support.acceptance import measure
from support.dense_loss import (
    VOCAB,
    RandomTarget,
    assert_equal,
    log_softmax,
    loss_and_gradients,
    pack_of_three,
    pad_documents,
)  # fmt: skip
from support.dense_loss import drafter as whole_drafter
from support.models import draft_config, plain_greedy, randomize
from support.runs import recipe

import dflash
from dflash import DFlashDraftModel, DFlashSpeculativeDecoder, load_drafter, load_target
from dflash.core.errors import CheckpointError, DFlashError, TrainingError
from dflash.core.files import flat
from dflash.drafters.dflash2 import DFlash2DraftModel
from dflash.drafters.domino import DominoDraftModel
from dflash.drafters.dspark import DSparkDraftModel
from dflash.training.data.dataset import open_dataset
from dflash.training.data.sequences import Sequences
from dflash.training.drafters.init import new_drafter
from dflash.training.drafters.loss import drafter_loss, score
from dflash.training.drafters.objectives import ObjectiveSettings, Predictions, d_pace
from dflash.training.drafters.vocabulary import frequent_tokens
from dflash.training.export import export
from dflash.training.recipe import DrafterShape
from dflash.training.train import train

PAIR = Path(dflash.__file__).parent / "pair"


class TargetOfRows(RandomTarget):
    """Gives some tokens' logits; those of all are never asked for."""

    head = None  # type: ignore[assignment]

    def __init__(self, seed: int):
        super().__init__(seed)
        self.adapter = SimpleNamespace(config=None, head_rows=lambda ids: lambda hidden: hidden @ self.matrix[ids].T)


def drafter(ids: list[int], seed: int = 0) -> DFlashDraftModel:
    """That of ``support.dense_loss``, but it knows ``ids`` only."""
    model = randomize(DFlashDraftModel(draft_config(VOCAB, block_size=6, draft_vocab_size=len(ids))), seed)
    model.reduce_vocabulary(mx.array(ids), own_head=False)
    model.bind(TargetOfRows(seed))  # type: ignore[arg-type]
    return model


# --- loss -------------------------------------------------------------------------------------------------


KINDS = {
    DFlashDraftModel: {},
    DFlash2DraftModel: {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 5, "selector_top_k": 6},
    DSparkDraftModel: {"markov_rank": 5, "markov_head_type": "rnn", "sample_from_anchor": True},
    DominoDraftModel: {"gru_hidden_dim": 7, "emb_dim": 5, "pure_draft_prefix_len": 1, "sample_from_anchor": True},
}
ROWS_OF_TOKENS = ("markov_head.markov_w2.weight", "embed_proj.2.weight")


def both_of_kind(kind: type[DFlashDraftModel], ids: list[int]) -> tuple[DFlashDraftModel, DFlashDraftModel]:
    """Drafters with the same weights: one knows all tokens, the other ``ids``."""
    values = vars(draft_config(VOCAB, block_size=6)) | {"layer_types": ()} | KINDS[kind]
    whole, part = kind(kind.config_class(**values)), kind(kind.config_class(**values | {"draft_vocab_size": len(ids)}))
    part.reduce_vocabulary(mx.array(ids), own_head=False)
    for i, (name, weight) in enumerate(flat(whole.parameters()).items()):
        scale = 3.0 if "markov_w" in name or "embed_proj" in name else 0.3
        drawn = scale * mx.random.normal(weight.shape, key=mx.random.key(i))
        whole.load_weights([(name, drawn)], strict=False)
        part.load_weights([(name, drawn[mx.array(ids)] if name in ROWS_OF_TOKENS else drawn)], strict=False)
    whole.bind(RandomTarget(0))  # type: ignore[arg-type]
    part.bind(TargetOfRows(0))  # type: ignore[arg-type]
    return whole, part


@pytest.mark.parametrize("kind", KINDS)
def test_with_all_tokens_in_another_order_loss_and_gradients_are_those_of_the_whole_vocabulary(kind):
    ids, documents = np.random.default_rng(0).permutation(VOCAB).tolist(), pack_of_three()
    whole, part = both_of_kind(kind, ids)
    objective = ObjectiveSettings("l1", auxiliary_weight=0.7)
    value, gradients = loss_and_gradients(whole, documents, objective)
    for name in gradients.keys() & {*ROWS_OF_TOKENS}:
        gradients[name] = gradients[name][mx.array(ids)]
    assert_equal(loss_and_gradients(part, documents, objective), (value, gradients), 3e-6)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not DFlashDraftModel])
def test_a_walk_over_known_tokens_is_taught_as_it_drafts(kind):
    """Where the tokens before are the drafts, what training predicts after them are the drafts too."""
    ids = np.random.default_rng(1).permutation(VOCAB)[:20].tolist()
    _, model = both_of_kind(kind, ids)
    cache = model.make_cache()
    features = mx.random.normal((1, 9, 3 * model.config.hidden_size), key=mx.random.key(1))
    model.extend_context(features, cache, mx.zeros((1, 9), mx.int32))
    anchor, length = mx.array([[5]]), 5
    proposal = model.propose(anchor, length, cache)
    drafts = proposal.tokens[0]
    assert set(drafts.tolist()) <= set(ids)
    assert len(set(drafts.tolist())) > 1
    hidden, before = model.draft_hidden(anchor, length, cache)[0], mx.concatenate([anchor[0], drafts[:-1]])
    positions = mx.arange(1, length + 1)
    logits = model.taught_logits(model.head(hidden), hidden, before, positions)
    assert kind is DFlash2DraftModel or mx.allclose(logits, proposal.logits[0], atol=1e-4).item()
    known = model.draft_ids[drafts] >= 0
    predictions = Predictions(logits, model.draft_ids[drafts], positions, None, known)
    assert model.hits(hidden, before, predictions)["accuracy"].all().item()
    unknown = replace(predictions, known_T=mx.zeros_like(known))
    assert not any(hits.any().item() for hits in model.hits(hidden, before, unknown).values())


@pytest.mark.parametrize("kind", ["cross_entropy", "kl"])
def test_tokens_that_are_not_known_have_no_loss_and_count_as_misses(kind, monkeypatch):
    ids, batch = list(range(1, VOCAB, 2)), pad_documents(pack_of_three())
    model, whole, objective = drafter(ids), whole_drafter(), ObjectiveSettings(kind)
    kept, hits = [], DFlashDraftModel.hits

    def keep(self, hidden, before, predictions):
        kept.append((hidden, predictions))
        return hits(self, hidden, before, predictions)

    monkeypatch.setattr(DFlashDraftModel, "hits", keep)
    found = score(model, batch, objective, model.target_head)
    score(whole, batch, objective, whole.target_head)
    (hidden_TE, reduced), (_, predictions) = kept
    tokens, positions = predictions.tokens_T.tolist(), predictions.positions_T.tolist()
    assert reduced.known_T.tolist() == [token in ids for token in tokens]
    assert reduced.tokens_T.tolist() == [ids.index(token) if token in ids else 0 for token in tokens]

    log_q = log_softmax(whole.head(hidden_TE)[:, mx.array(ids)])
    right, total, weight = [0] * 5, 0.0, 0.0
    for t, (token, position) in enumerate(zip(tokens, positions, strict=True)):
        if token not in ids:
            continue
        loss = -log_q[t, ids.index(token)].item()
        if kind == "kl":
            p = log_softmax(predictions.target_logits_TV[t, mx.array(ids)])
            loss = (mx.exp(p) * (p - log_q[t])).sum().item()
        counts = np.exp(-(position - 1) / objective.gamma)
        total, weight = total + counts * loss, weight + counts
        right[position - 1] += ids[mx.argmax(log_q[t]).item()] == token
    assert found.loss / found.weight == pytest.approx(total / weight, rel=1e-5)
    assert found.hits["accuracy"].tolist() == right
    assert found.predictions.sum() == len(tokens), "unknown tokens are predictions too"
    trained = drafter_loss(model, batch, objective, model.target_head).item()
    assert trained == pytest.approx(total / weight, rel=1e-5)


def test_a_batch_of_unknown_tokens_costs_nothing():
    documents = pack_of_three()
    for document in documents:
        document.tokens = [6 if token == 5 else token for token in document.tokens]
    value, gradients = loss_and_gradients(drafter([5]), documents, ObjectiveSettings())
    assert value == 0
    assert all(not g.any().item() for g in gradients.values())


def test_an_unknown_token_ends_the_accepted_length_that_d_pace_weighs_by():
    logits, tokens, positions = mx.array([[4.0, 0], [9.0, 0], [9.0, 0]]), mx.array([0, 0, 0]), mx.array([1, 2, 3])
    known = mx.array([True, False, True])
    losses = d_pace(Predictions(logits, tokens, positions, known_T=known), 0.0)
    q = 1 / (1 + np.exp(-4.0))
    assert losses.tolist() == pytest.approx([-q * np.log(q), 0, 0], abs=1e-7)


# --- which tokens -----------------------------------------------------------------------------------------


def test_the_most_frequent_tokens_of_responses_are_known_and_stop_tokens_always():
    sequences = Sequences.from_lists([[9, 9, 9, 9], [8]], [[5, 5, 5, 3, 3], [6, 2, 7]])
    assert frequent_tokens(sequences, 2, 12, ()).tolist() == [3, 5]
    assert frequent_tokens(sequences, 4, 12, ()).tolist() == [2, 3, 5, 6], "ties are not taken by id"
    assert frequent_tokens(sequences, 3, 12, {11}).tolist() == [3, 5, 11]
    assert frequent_tokens(sequences, 8, 12, {11}).tolist() == [0, 1, 2, 3, 5, 6, 7, 11]
    with pytest.raises(TrainingError, match=r"drafter\.vocabulary 1 has no room for the target's 2 stop tokens"):
        frequent_tokens(sequences, 1, 12, {10, 11})


def test_what_a_part_of_the_vocabulary_cannot_be_is_one_line(folder, tmp_path):
    target = load_target(folder / "target")
    for options, message in (
        (["drafter.vocabulary=265"], "drafter.vocabulary 265 is more than the target's 264"),
        (["drafter.options={draft_vocab_size: 9}"], "set drafter.vocabulary instead"),
        (["drafter.vocabulary=9"], "set data.folder"),
    ):
        with pytest.raises(TrainingError, match=message):
            new_drafter(recipe(folder, "x", *options).drafter, target)
    with pytest.raises(DFlashError, match="vocabulary must be above 0"):
        DrafterShape(vocabulary=0)


# --- runs and decoding ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reduced_run(folder) -> Path:
    """A finished run whose drafter knows 20 tokens."""
    train(recipe(folder, "reduced", "drafter.vocabulary=20"))
    return folder / "reduced"


def arrays(drafter: Path) -> dict[str, mx.array]:
    return mx.load(str(drafter / "model.safetensors"))  # type: ignore[return-value]


def test_a_trained_drafter_knows_the_tokens_saves_bit_equal_and_has_no_head(reduced_run, folder, tmp_path):
    target = load_target(folder / "target")
    model = load_drafter(reduced_run / "drafter")
    wanted = frequent_tokens(open_dataset(folder / "data", "train", target), 20, 264, target.stop_token_ids())
    assert model.token_ids.tolist() == wanted.tolist()
    assert model.config.draft_vocab_size == 20
    assert "lm_head" not in model
    dflash.save_drafter(model, tmp_path / "again")
    first, again = arrays(reduced_run / "drafter"), arrays(tmp_path / "again")
    assert first.keys() == again.keys() >= {"d2t", "t2d"}
    assert all(mx.array_equal(first[name], again[name]).item() for name in first)
    model.bind(target)
    hidden = mx.random.normal((1, 5, target.hidden_size))
    whole = target.head(hidden)
    assert mx.abs(model.head(hidden) - whole[..., model.token_ids]).max().item() < 1e-5


def test_an_export_needs_the_table_of_tokens_that_the_run_left(reduced_run, tmp_path):
    export(reduced_run, tmp_path / "exported")
    exported, finished = (arrays(path) for path in (tmp_path / "exported", reduced_run / "drafter"))
    assert all(mx.array_equal(exported[name], finished[name]).item() for name in finished)
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("recipe.json", "config.json", "best.safetensors"):
        (copy / name).write_bytes((reduced_run / name).read_bytes())
    with pytest.raises(CheckpointError, match=r"vocabulary\.safetensors is missing"):
        export(copy, tmp_path / "other")


def test_a_start_keeps_its_vocabulary_whatever_its_kind_becomes(reduced_run, folder):
    target, path = load_target(folder / "target"), str(reduced_run / "drafter")
    start = load_drafter(path)
    model = new_drafter(DrafterShape(from_=path), target)
    assert mx.array_equal(model.token_ids, start.token_ids).item()
    with pytest.raises(TrainingError, match=r"drafter\.vocabulary is 9, but .* has 20"):
        new_drafter(DrafterShape(from_=path, vocabulary=9), target)
    extended = new_drafter(DrafterShape("dspark", {"markov_rank": 4}, path), target)
    assert mx.array_equal(extended.token_ids, start.token_ids).item()
    assert extended.markov_head.markov_w2.weight.shape == (20, 4)


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_a_run_from_a_start_with_a_head_of_its_own_teaches_the_head_and_keeps_the_vocabulary(folder, tmp_path, kind):
    target, shape = load_target(folder / "target"), recipe(folder, "x").drafter
    model = new_drafter(shape, target)
    model.config = replace(model.config, draft_vocab_size=30)
    model.reduce_vocabulary(mx.arange(60, 90), own_head=True)
    dflash.save_drafter(model, tmp_path / "start")
    settings = [f"drafter.kind={kind}", f"drafter.from={tmp_path / 'start'}", "run.steps=3"]
    again = train(recipe(folder, f"own-head-{kind}", *settings))
    start, found = load_drafter(tmp_path / "start"), load_drafter(again)
    assert mx.array_equal(found.token_ids, start.token_ids).item()
    assert found.lm_head.weight.shape == (30, target.hidden_size)
    assert not mx.array_equal(found.lm_head.weight, start.lm_head.weight).item()


DRAWN = {"temp": 1.0, "verify": "speculative_sampling", "policy": "full"}


@pytest.mark.parametrize(
    ("kind", "own", "ways"),
    [
        (None, {}, [{"policy": "full"}, {"policy": "adaptive"}, DRAWN]),
        ("dflare", {}, [{"tree": 6}]),
        ("dflash2", {"selector_rank": 4}, [{"tree": 6}, DRAWN]),
        ("dspark", {"markov_rank": 4}, [{"tree": 6}, DRAWN]),
        ("domino", {"gru_hidden_dim": 8}, [{"tree": 6}, DRAWN]),
    ],
)
def test_text_is_exact_and_drafts_are_among_the_known_tokens(reduced_run, folder, kind, own, ways):
    target = load_target(folder / "target")
    if kind is None:
        model = load_drafter(reduced_run / "drafter")
    else:
        shape = replace(recipe(folder, "x").drafter, kind=kind, options=own, vocabulary=20)
        model = new_drafter(shape, target, open_dataset(folder / "data", "train", target))
    assert model.token_ids.size == 20
    decoder, prompt = DFlashSpeculativeDecoder(target, model), [65, 70, 71]
    mx.random.seed(0)
    for options in ways:
        found = list(decoder.stream_generate(prompt, 12, **options))
        drafted = {t for r in found for t in r.drafted}
        assert drafted
        assert drafted <= set(model.token_ids.tolist())
        if "temp" not in options:
            assert [t for r in found for t in r.tokens] == plain_greedy(target.model, prompt, 12)[0]


def test_a_trained_drafter_that_knows_the_tokens_of_its_text_is_accepted_as_often_as_with_all():
    """The bundled pair, with the tokens that its target writes; and without half of them less often."""
    target, whole = load_target(PAIR / "target"), load_drafter(PAIR / "drafter")
    prompts = [target.adapter.chat_tokens(target.tokenizer, [{"role": "user", "content": "What is 17 + 25?"}])]
    decoder = DFlashSpeculativeDecoder(target, whole, policy="full")
    written = sorted({t for r in decoder.stream_generate(prompts[0], 24) for t in (*r.tokens, *r.drafted)})
    lengths = [measure(target, whole, prompts, 24).length]
    for ids in (written, written[::2]):
        model = load_drafter(PAIR / "drafter")
        model.config = replace(model.config, draft_vocab_size=len(ids))
        model.reduce_vocabulary(mx.array(ids), own_head=False)
        lengths.append(measure(target, model, prompts, 24).length)
    assert lengths[1] == lengths[0] > lengths[2] >= 1
