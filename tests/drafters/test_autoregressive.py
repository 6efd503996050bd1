"""A language model as drafter: its cache follows the committed tokens, its drafts are its own greedy text."""

import json
import random
from collections.abc import Sequence
from functools import lru_cache

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper
from support.errors import refused
from support.models import byte_tokenizer, llama_model, plain_greedy, qwen3_model, save_target, target
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from dflash import DFlashSpeculativeDecoder, LoadedTargetModel, is_draft_model_compatible, load_drafter, load_target
from dflash.adapters.conformance import small_models as small
from dflash.core.errors import IncompatibleModelsError
from dflash.decoding.block import Decoding
from dflash.decoding.loop import decode, prefill
from dflash.drafters.autoregressive import AutoregressiveDrafter
from dflash.target.compare import assert_close, assert_same_caches

NEAR_TIE = 1e-4
VOCAB = small.VOCAB
# Full attention, a window of 6, and of other cache kinds one each: windows that wrap, recurrent states, both with KV.
KINDS = ["llama", "sliding", "gemma3_text", "lfm2", "mamba2", "qwen3_5"]


@lru_cache(maxsize=16)
def model(kind: str, seed: int = 0) -> LoadedTargetModel:
    if kind in ("llama", "sliding"):
        return target(kind, seed + 3, VOCAB)
    mx.random.seed(seed)  # mlx-lm samples some vectors of recurrent layers
    return LoadedTargetModel(small.build(kind, seed))


def drafter(kind: str, block_size: int = 6, seed: int = 0) -> AutoregressiveDrafter:
    return AutoregressiveDrafter(model(kind, seed), block_size)


def assert_holds(draft: AutoregressiveDrafter, cache, committed: Sequence[int], where: str = "") -> None:
    """Settled, the cache equals one that was fed ``committed`` in one pass, and drafts what that one drafts."""
    draft.settle(cache)
    fresh = draft.make_cache()
    draft.extend_context(mx.zeros((1, len(committed), 0)), fresh, mx.array([list(committed)]))
    draft.settle(fresh)
    assert cache.offset == fresh.offset == len(committed)
    assert_same_caches(cache.layers, fresh.layers, where)
    ours, theirs = (draft.propose(mx.array([[1]]), 3, c) for c in (cache, fresh))
    assert_close(f"logits {where}", ours.logits, theirs.logits)


def assert_plain_text(loaded: LoadedTargetModel, draft, prompt: list[int], count: int, block_size: int, step_size=512):
    """The text is the target's own and the draft's cache follows it; returns the blocks and the state."""
    expected, lead = plain_greedy(loaded.model, prompt, count)
    assert lead > NEAR_TIE
    draft.bind(loaded)
    run = Decoding(loaded, draft)
    state, blocks = prefill(run, prompt, step_size=step_size), []
    for block in decode(run, state, count, block_size):
        blocks.append(block)
        assert state.draft_cache.offset == len(state.tokens) - 1
    assert state.tokens == prompt + expected
    return blocks, state


EVENTS = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5), st.integers(0, VOCAB - 1)), min_size=1, max_size=4)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=4)
@given(prompt=st.integers(1, 20), blocks=EVENTS, twice=st.booleans(), other=st.booleans())
def test_after_any_blocks_the_cache_equals_one_fed_the_committed_tokens(kind, prompt, blocks, twice, other):
    """``twice``: a draft is thrown away before the next; ``other``: the last block does not begin with its anchor."""
    draft = drafter(kind)
    cache = draft.make_cache()
    text = [random.Random(prompt).randrange(VOCAB) for _ in range(prompt)]
    draft.extend_context(mx.zeros((1, prompt, 0)), cache, mx.array([text]))
    for i, (length, accepted, anchor) in enumerate(blocks):
        if twice:
            draft.propose(mx.array([[(anchor + 1) % VOCAB]]), 2, cache)
        drafts = draft.propose(mx.array([[anchor]]), length, cache).tokens[0].tolist()
        assert cache.offset == len(text)
        if other and i == len(blocks) - 1:
            anchor = (anchor + 2) % VOCAB
        committed = [anchor, *drafts[:accepted]]
        draft.extend_context(mx.zeros((1, len(committed), 0)), cache, mx.array([committed]))
        text += committed
    assert_holds(draft, cache, text)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_drafts_for_itself_is_always_right(kind):
    """Every block is full: one position too early or too late anywhere, and nothing would be accepted."""
    prompt, draft = [3, 1, 4, 1, 5], drafter(kind)
    blocks, state = assert_plain_text(model(kind), draft, prompt, 19, 6)
    assert [len(block.tokens) for block in blocks] == [6] * 3
    proposal = draft.propose(mx.array([state.tokens[-1:]]), 5, state.draft_cache)
    read = mx.array([state.tokens + proposal.tokens[0, :-1].tolist()])
    assert_close("logits", proposal.logits, model(kind).model(read)[:, -5:])


@pytest.mark.parametrize(("kind", "other"), [("llama", "qwen3_5"), ("lfm2", "sliding")])
def test_the_text_is_the_targets_own_and_the_cache_follows_it(kind, other):
    """Another model is hardly ever right."""
    draft, prompt = drafter(other, seed=1), [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5, 9, 0, 4]
    _, state = assert_plain_text(model(kind), draft, prompt, 16, 4, step_size=7)
    assert_holds(draft, state.draft_cache, state.tokens[:-1])


def test_drafts_are_sometimes_right_and_sometimes_wrong_when_the_draft_model_is_a_little_off():
    """The mixture that the tests above want: blocks of one token, full blocks, and what is between."""
    off = llama_model(3, VOCAB)
    for layer in off.layers[-1:]:
        weight = layer.mlp.down_proj.weight
        layer.mlp.down_proj.weight = weight + 0.1 * mx.random.normal(weight.shape, key=mx.random.key(5))
    draft = AutoregressiveDrafter(LoadedTargetModel(off))
    blocks, state = assert_plain_text(model("llama"), draft, [3, 1, 4, 1, 5], 40, 5)
    assert {1, 5} < {len(block.tokens) for block in blocks}
    assert_holds(draft, state.draft_cache, state.tokens[:-1])


@pytest.mark.parametrize("kind", ["llama", "sliding", "lfm2"])
def test_a_draft_costs_as_many_passes_as_it_has_tokens(kind, monkeypatch):
    """What was committed goes into the first of them: where all drafts were, the last of them and the anchor."""
    draft, fed = drafter(kind), []
    adapter = draft.model.adapter
    run = adapter.run_backbone
    monkeypatch.setattr(
        adapter, "run_backbone", lambda tokens, cache: fed.append(tokens.shape[1]) or run(tokens, cache)
    )
    cache = draft.make_cache()
    draft.extend_context(mx.zeros((1, 9, 0)), cache, mx.array([list(range(9))]))
    assert fed == [9]
    drafts = draft.propose(mx.array([[3]]), 5, cache).tokens[0].tolist()
    draft.extend_context(mx.zeros((1, 6, 0)), cache, mx.array([[3, *drafts]]))
    draft.propose(mx.array([[4]]), 5, cache)
    all_accepted = 2 if kind == "llama" else 6  # windows and states are fed the accepted drafts again
    assert fed == [9] + [1] * 5 + [all_accepted] + [1] * 4


def test_past_its_own_longest_sequence_a_model_proposes_nothing():
    loaded = LoadedTargetModel(qwen3_model(0, max_position_embeddings=64))
    draft = AutoregressiveDrafter(LoadedTargetModel(qwen3_model(0, max_position_embeddings=23)))
    blocks, _ = assert_plain_text(loaded, draft, [3, 1, 4, 1, 5], 40, 5)
    assert [len(block.drafted) for block in blocks[:5]] == [4, 4, 4, 3, 0]
    assert sum(len(block.drafted) for block in blocks[4:]) == 0


# --- vocabularies -----------------------------------------------------------------------------------------


def test_without_tokenizers_vocabularies_must_be_equally_large():
    draft = AutoregressiveDrafter(target("qwen3", 0, 40))
    assert not is_draft_model_compatible(draft.model, target("llama", 0, 32))
    with pytest.raises(IncompatibleModelsError, match=r"has 40 tokens, the target's has 32"):
        DFlashSpeculativeDecoder(target("llama", 0, 32), draft)
    draft.bind(target("llama", 0, 40))


def with_tokens(vocab: int, seed: int = 0, **renamed: str) -> LoadedTargetModel:
    """A model of ``vocab`` rows with the byte tokenizer, of which some tokens are called otherwise."""
    fast = byte_tokenizer()
    if renamed:
        text = fast.backend_tokenizer.to_str()
        for old, new in renamed.items():
            text = text.replace(f"<|{old}|>", f"<|{new}|>")
        fast = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(text), eos_token=fast.eos_token)
    return LoadedTargetModel(qwen3_model(seed, vocab), TokenizerWrapper(fast))


@pytest.mark.parametrize(
    ("rows", "renamed", "words"),
    [
        (264, {"mask": "pad"}, "token 261 is '<|pad|>' in its vocabulary and '<|mask|>' in the target's. Use a model"),
        (260, {}, "token 260, '<|im_start|>', is past the 260 tokens"),
    ],
)
def test_the_first_token_that_differs_is_named(rows, renamed, words):
    loaded, draft = with_tokens(264), with_tokens(rows, **renamed)
    assert is_draft_model_compatible(with_tokens(264), loaded)
    assert not is_draft_model_compatible(draft, loaded)
    with pytest.raises(IncompatibleModelsError) as error:
        DFlashSpeculativeDecoder(loaded, AutoregressiveDrafter(draft))
    refused(error, words)


@pytest.mark.parametrize(("own", "rows"), [(270, 264), (262, 264)])
def test_rows_that_pad_one_table_are_never_proposed_nor_looked_up(own, rows):
    """Tables of one vocabulary are padded to different sizes, within one family of models too."""
    loaded, draft = with_tokens(rows, seed=1), AutoregressiveDrafter(with_tokens(own))
    draft.bind(loaded)
    cache = draft.make_cache()
    draft.extend_context(mx.zeros((1, 3, 0)), cache, mx.array([[65, rows - 1, 66]]))
    proposal = draft.propose(mx.array([[rows - 1]]), 4, cache)
    assert proposal.logits.shape == (1, 4, rows)
    assert mx.all(proposal.tokens < min(own, rows))
    logits = np.array(proposal.logits)
    assert np.isfinite(logits[..., : min(own, rows)]).all()
    assert (logits[..., own:] == -np.inf).all()


# --- from files -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architectures", [["Qwen3ForCausalLM"], None])
def test_a_path_that_holds_a_language_model_is_one_that_drafts(tmp_path, architectures):
    """With the target's own files as draft model every block is full."""
    folder = save_target(qwen3_model(1, 264), tmp_path / "model", dtype=mx.float32)
    config = json.loads((folder / "config.json").read_text()) | {"architectures": architectures}
    (folder / "config.json").write_text(json.dumps(config))
    draft = load_drafter(folder)
    assert isinstance(draft, AutoregressiveDrafter)
    assert draft.block_size == 9
    decoder = DFlashSpeculativeDecoder(load_target(folder), draft, policy="full")
    responses = list(decoder.stream_generate([65, 66, 67], max_tokens=28))
    assert [len(r.drafted) for r in responses] == [0, 8, 8, 8]
    assert [r.accepted for r in responses] == [0, 8, 8, 8]
