"""Responses: the target's own, whatever draft of them is given, and repeatable from the seed."""

import mlx.core as mx
import numpy as np
import pytest
from support.conversations import Stopping, prompts, turns

from dflash.core.errors import DataError
from dflash.training.data import responses
from dflash.training.data.chat import Row, encode
from dflash.training.data.plan import PrepareSettings
from dflash.training.data.responses import answer_rows, generate_responses, require_batches


def answered(rows: list[Row], target, settings: PrepareSettings, name: str = "shard 0") -> list[tuple[list, list]]:
    """Tokens and mask of every row, in the order of the rows."""
    return [(tokens.tolist(), mask.tolist()) for _, tokens, mask in sorted(answer_rows(rows, target, settings, name))]


def test_every_response_is_told_once_and_as_soon_as_it_is_complete(target):
    rows = [encode(talk, target, True, {}).tokens.tolist() for talk in prompts(5)]
    told = [(i, len(tokens)) for i, tokens in generate_responses(target.model, rows, [], [6, 2, 4, 1, 3], batch=5)]
    assert told == [(3, 1), (1, 2), (4, 3), (2, 4), (0, 6)]


@pytest.mark.parametrize("draft", ["right", "wrong in the middle", "wrong at once", "too short", "too long"])
def test_drafts_that_are_the_targets_own_are_not_decoded_again(target, monkeypatch, draft):
    settings = PrepareSettings(max_tokens=12)
    prompt = encode(turns("q"), target, True, {}).tokens
    ((own, mask),) = answered([Row(prompt, None)], target, settings)
    response = own[len(prompt) :]
    other = (response[5] + 1) % 200
    drafts = {
        "right": response,
        "wrong in the middle": [*response[:5], other, *response[6:]],
        "wrong at once": [(response[0] + 1) % 200, *response],
        "too short": response[:4],
        "too long": [*response, 7],
    }
    decoded = []

    def counted(model, prompts, stops, max_tokens, *others):
        decoded.extend(max_tokens)
        return generate_responses(model, prompts, stops, max_tokens, *others)

    monkeypatch.setattr(responses, "generate_responses", counted)
    assert answered([Row(prompt, None, np.array(drafts[draft]))], target, settings) == [(own, mask)]
    left = {"wrong in the middle": [7], "wrong at once": [12], "too short": [8]}
    assert decoded == left.get(draft, [])


def test_a_long_draft_is_checked_in_parts_of_equal_result(target, monkeypatch):
    prompt = encode(turns("q"), target, True, {}).tokens
    ((own, _),) = answered([Row(prompt, None)], target, PrepareSettings(max_tokens=20))
    draft = [*own[len(prompt) : -3], 9, 9, 9]
    monkeypatch.setattr(responses, "_POSITIONS_PER_PASS", 7)
    ((_, prefix),) = responses.accepted_prefixes(target, [prompt.tolist()], [draft])
    assert prefix == draft[:17]


def test_a_draft_ends_with_the_targets_stop_token(target):
    stopping = Stopping(target.model, target.tokenizer)
    rows = [encode(talk, target, True, {}) for talk in prompts(20)]
    settings = PrepareSettings(max_tokens=12)
    own = answered(rows, stopping, settings)
    with_drafts = [
        Row(row.tokens, None, np.append(np.array(tokens[len(row.tokens) :]), 5))
        for row, (tokens, _) in zip(rows, own, strict=True)
    ]
    assert any(tokens[-1] in stopping.stop_token_ids() for tokens, _ in own)
    assert answered(with_drafts, stopping, settings) == own


def test_samples_depend_on_seed_and_shard_and_follow_the_temperature(target):
    rows = [encode(talk, target, True, {}) for talk in prompts(4)]

    def sampled(name: str = "shard 0", **settings):
        mx.random.seed(sum(map(ord, name)))  # whatever happened before
        return answered(rows, target, PrepareSettings(max_tokens=8, **settings), name)

    greedy, one = sampled(), sampled(temp=1.0)
    assert one == sampled(temp=1.0) != greedy
    assert sampled("shard 1", temp=1.0) != one
    assert sampled(temp=1.0, seed=1) != one
    assert sampled(temp=1.0, top_p=1e-6) == sampled(temp=1.0, top_k=1) == greedy


def test_a_target_that_cannot_be_batched_is_refused(target, monkeypatch):
    require_batches(target)

    class Solitary:
        pass

    monkeypatch.setattr("dflash.decoding.responses.make_prompt_cache", lambda model: [Solitary()])
    with pytest.raises(DataError, match="layer 0 keeps a Solitary"):
        require_batches(target)
