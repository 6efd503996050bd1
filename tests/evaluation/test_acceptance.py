"""Acceptance by kind: turns are asked after the target's own answers, rows add up, intervals hold the value."""

import json
from functools import partial

import mlx.core as mx
import numpy as np
import pytest
from support.acceptance import measure, plain
from support.bench import rendered
from support.models import TEXT_VOCAB, ScriptedDrafter, plain_greedy, qwen3_model, random_drafter, wrapped_tokenizer

import dflash
from dflash import Proposal
from dflash.evaluation import HELDOUT, BenchPrompt
from dflash.evaluation.acceptance import (
    Acceptance,
    acceptance_results,
    measure_batch,
    measure_one,
    measure_turns,
    render_acceptance,
)
from dflash.evaluation.replay import measure_on
from dflash.evaluation.texts import Texts
from dflash.prompts.conversations import Conversation
from dflash.prompts.tokens import prompt_tokens


def counts(blocks: int, committed: int) -> Acceptance:
    return Acceptance(blocks, committed, np.array([blocks, blocks]), np.array([committed - blocks, 0]))


@pytest.fixture
def decoder():
    drafter = random_drafter(3, TEXT_VOCAB)
    return dflash.DFlashSpeculativeDecoder(qwen3_model(1, vocab=TEXT_VOCAB), drafter, wrapped_tokenizer())


def talk(decoder, later: tuple[str, ...]) -> BenchPrompt:
    said = Conversation(({"role": "user", "content": "Hi"},), "line 1", later=later)
    return BenchPrompt("Hi", prompt_tokens(decoder.loaded_target, "Hi"), kind="talk", conversation=said)


@pytest.mark.parametrize("p", [0.7, 1.0])
def test_acceptance_by_position_adds_up_to_the_acceptance_length(p):
    """A drafter that is always right (``p`` of 1) fills every block."""
    loaded, prompt = dflash.LoadedTargetModel(qwen3_model(1, vocab=TEXT_VOCAB), wrapped_tokenizer()), [65, 66, 67]
    text, _ = plain_greedy(loaded.model, prompt, 60)
    found = measure(loaded, ScriptedDrafter([*prompt, *text], TEXT_VOCAB, p=p, block_size=5), [prompt], 41)
    assert found.committed == 40 == found.blocks + found.accepted.sum()
    assert found.length == pytest.approx(1 + sum(found.accepted) / found.blocks)
    assert found.by_position == pytest.approx((found.accepted / found.verified).tolist())
    assert found.by_position == sorted(found.by_position, reverse=True)
    assert (found.blocks == 8) == (p == 1.0) == (found.by_position == [1.0] * 4)


@pytest.mark.parametrize("policy", ["full", 4])
def test_rows_of_a_batch_count_what_each_counts_alone_and_so_do_finished_texts(policy, tmp_path):
    """Of the bundled pair, whose drafts are often right."""
    decoder = dflash.DFlashSpeculativeDecoder.from_pretrained()
    target, requests = decoder.loaded_target, HELDOUT.read_text().splitlines()[3:6]
    prompts = [target.build_prompt(json.loads(request)["prompt"]) for request in requests]
    alone = [measure_one(decoder, prompt, 24, policy=policy) for prompt in prompts]
    found = sorted(measure_batch(decoder, prompts, 2, 24, policy=policy), key=lambda row: row[0])
    assert [(plain(counts), text) for _, counts, text in found] == [(plain(counts), text) for counts, text in alone]
    assert len({counts.blocks for counts, _ in alone}) > 1, "rows that are alike show nothing"
    if policy == "full":
        texts = Texts(target, folder=tmp_path).all(prompts, 24)
        assert [plain(own) for (own,) in measure_on(target, [decoder.draft_model], texts)] == [
            plain(counts) for counts, _ in alone
        ]
        assert sum(counts.committed for counts, _ in alone) > 2 * sum(counts.blocks for counts, _ in alone)


def test_a_later_turn_follows_the_targets_own_answer(decoder):
    target, drafter = decoder.loaded_target, decoder.draft_model
    records: list[dict] = []

    def encode(messages):
        return prompt_tokens(target, messages)

    alone = BenchPrompt("Count", prompt_tokens(target, "Count"))
    found = list(measure_turns(decoder, [talk(decoder, ("And?", "So?")), alone], encode, 9, trace=records.append))
    assert [number for number, _ in found] == [0, 0, 0, 1]
    messages = [{"role": "user", "content": "Hi"}]
    asked = [r["prompt_tokens"] for r in records if r["record"] == "request"]
    for turn, prompt, (_, part) in zip(("And?", "So?", None), asked[:3], found[:3], strict=True):
        assert prompt == encode(messages)
        own = measure(target, drafter, [prompt], 9)
        assert (part.blocks, part.committed) == (own.blocks, own.committed)
        answer = decoder.generate(messages, 9, 0.0)
        assert answer
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": turn}]
    assert asked[3] == alone.tokens


def test_a_turn_without_room_is_left_out_with_a_warning(decoder, monkeypatch, caplog):
    longest = len(talk(decoder, ()).tokens) + 9
    monkeypatch.setattr(type(decoder.loaded_target), "max_length", longest)
    encode = partial(prompt_tokens, decoder.loaded_target)
    assert len(list(measure_turns(decoder, [talk(decoder, ("And?",))], encode, 9))) == 1
    assert "line 1: a later turn is left out" in caplog.text


def test_rows_by_kind_add_up_to_all_prompts():
    parts = [counts(2, 4), counts(4, 8), counts(6, 8), counts(0, 0)]
    found = acceptance_results(parts, ["chat", "code", "chat", "short"], 3)
    assert list(found["by_kind"]) == ["chat", "code", "short"]
    chat, code, _ = found["by_kind"].values()
    assert (chat["prompts"], chat["blocks"], chat["generated_tokens"]) == (2, 8, 12)
    assert chat["acceptance_length"] == 12 / 8  # tokens over passes; the mean over prompts is 1.67
    assert code["acceptance_length"] == 2.0
    assert found["acceptance_length"] == pytest.approx(20 / 12)  # the mean of rows is 1.75
    assert code["acceptance_length_interval"] is None
    low, high = found["acceptance_length_interval"]
    assert 1 <= low < found["acceptance_length"] < high
    rows = [line.split() for line in rendered(render_acceptance(found)).splitlines()]
    assert rows[1][:5] == ["chat", "2", "8", "12", "1.50"]
    assert ["short", "1", "0", "0", "-", "0.000", "0.000"] in rows


class Thirds(ScriptedDrafter):
    """Each third token is wrong."""

    def propose(self, anchor: mx.array, length: int, cache) -> Proposal:
        drafts = list(enumerate(self.text))[cache.offset + 1 :][:length]
        return Proposal(mx.array([[token ^ (number % 3 == 0) for number, token in drafts]], mx.int32))


@pytest.mark.parametrize("missed", [True, False], ids=["nearly found", "found"])
def test_text_that_is_held_back_for_a_stop_string_counts_in_its_own_block(missed):
    loaded, prompt = dflash.LoadedTargetModel(qwen3_model(1, vocab=TEXT_VOCAB), wrapped_tokenizer()), [65, 66, 67]
    answer, _ = plain_greedy(loaded.model, prompt, 40)
    drafter = Thirds([*prompt, *answer], TEXT_VOCAB, block_size=5)
    decoder = dflash.DFlashSpeculativeDecoder(loaded, drafter)
    whole, text = measure_one(decoder, prompt, 40, stop_token_ids=[])
    for at in range(2, len(text) - 8, 3):
        stop = text[at : at + 7] + "\0" * missed
        found, _ = measure_one(decoder, prompt, 40, stop_strings=[stop], stop_token_ids=[])
        batch = measure_batch(decoder, [prompt], 1, 40, stop_strings=[stop], stop_token_ids=[])
        assert [plain(part) for _, part, _ in batch] == [plain(found)]
        assert (plain(found) == plain(whole)) == missed
