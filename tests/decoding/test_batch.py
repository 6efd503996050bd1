"""Each row of a batch writes what its text is alone, whatever is accepted, and leaves with the caches of that text."""

import random
from functools import lru_cache
from itertools import product

import mlx.core as mx
import pytest
from mlx_lm.generate import StopSequences, generate_step
from mlx_lm.sample_utils import make_logits_processors
from support.models import qwen3_model, random_drafter
from support.rows import ROW_TARGETS, WINDOW, Script, row_target

from dflash import BlockRecord, LoadedTargetModel, Policy, Proposal
from dflash.decoding.admission import SpeculativeGenerator
from dflash.decoding.batch import Tapped
from dflash.policies.base import Fixed
from dflash.target.compare import assert_same_caches

TEXTS, MOST, BLOCK = 5, 28, 8
LAYER_TYPES = ("sliding_attention", "full_attention")


# --- what is compared ---------------------------------------------------------------------------------------


def second_of_three(logprobs: mx.array) -> mx.array:
    """Draws that a script decides: sometimes not the best token, by the numbers of the best."""
    best = mx.argsort(-logprobs, axis=-1)
    odd = mx.floor(-100 * mx.max(logprobs, axis=-1)).astype(mx.int32) % 3 == 0
    return mx.where(odd, best[:, 1], best[:, 0])


SAMPLING = {
    "greedy": (None, ()),
    "scripted draws": (second_of_three, ()),
    "logit bias": (None, tuple(make_logits_processors(logit_bias={1: 2.0, 5: -3.0}))),
    "repetition penalty": (None, tuple(make_logits_processors(repetition_penalty=1.3, repetition_context_size=6))),
}


def prompts(name: str, long: bool) -> list[list[int]]:
    """Of different lengths; long ones do not fit into a window."""
    chance = random.Random(len(name))
    lengths = [3, 2 * WINDOW + 5, 9, 1, WINDOW] if long else [3, 7, 5, 1, 4]
    return [[chance.randrange(small_vocab(name)) for _ in range(length)] for length in lengths]


def small_vocab(name: str) -> int:
    return row_target(name).vocab_size


@lru_cache(maxsize=256)
def alone(name: str, sampling: str, long: bool) -> list[list[int]]:
    """Plain mlx-lm's text of each prompt."""
    sampler, processors = SAMPLING[sampling]
    model, texts = row_target(name).model, []
    for prompt in prompts(name, long):
        steps = generate_step(
            mx.array(prompt), model, max_tokens=MOST, sampler=sampler, logits_processors=list(processors)
        )
        texts.append([int(token) for token, _ in steps])
    return texts


ACCEPTANCE = {"all": [1.0] * TEXTS, "none": [0.0] * TEXTS, "ragged": [0.9, 0.3, 0.7, 1.0, 0.0]}


class Alternate(Policy):
    """Blocks of changing length, with plain steps between them."""

    def __init__(self) -> None:
        self.steps = 0

    def sleep(self) -> int:
        return int(self.steps % 5 in (2, 3))

    def draft_length(self, most: int) -> int:
        return min(most, 1 + self.steps % 4 * 2)

    def observe(self, block: BlockRecord) -> None:
        assert block.seconds >= 0
        self.steps += 1


POLICIES = {"whole blocks": Policy, "blocks and plain steps": Alternate}


def check(name, rows, acceptance, sampling, events, policy="whole blocks"):
    """Decode with ``rows`` at once, and compare every text, and the caches with which each leaves."""
    target, long = row_target(name), "long prompts" in events
    texts, asked = alone(name, sampling, long), prompts(name, long)
    count = TEXTS if "joins" in events or rows == TEXTS else rows
    whole = [prompt + text for prompt, text in zip(asked, texts, strict=True)][:count]
    drafter = Script(whole, ACCEPTANCE[acceptance], target.vocab_size, BLOCK)
    policies = POLICIES[policy]()
    model = Tapped(target, drafter, policies, BLOCK, 4096)
    limits, stops = [MOST] * count, [[] for _ in range(count)]
    if "ends" in events:  # in the middle of blocks, and one with its first token
        limits = [MOST, 13, MOST, 1, 6][:count]
        stops[0] = [[texts[0][10]]]
    expected = [text[:limit] for text, limit in zip(texts, limits, strict=False)]
    for i, stop in enumerate(stops):
        if stop:
            expected[i] = expected[i][: expected[i].index(stop[0][0]) + 1]
    # Short steps: prompts that are not begun join others that are half read.
    generator = SpeculativeGenerator(model, rows, 8 if "joins" in events else 2048)
    if "joins" not in events:
        generator.prefill_batch_size = 1
    sampler, processors = SAMPLING[sampling]
    uids = generator.insert(
        asked[:count],
        limits,
        samplers=[(lambda logprobs: sampler(logprobs)) if sampler else None for _ in range(count)],
        logits_processors=[list(processors)] * count,
        stop_sequences=[StopSequences(stop) for stop in stops],
    )
    removed = uids[1] if "removed" in events and count > 1 else None
    got, blocks, widths = {uid: [] for uid in uids}, 0, set()
    while answers := generator.next_generated():
        widths.add(len({a.uid for a in answers}))
        assert len({a.uid for a in answers}) == len(answers)
        for a in answers:
            blocks += a.block.accepted > 0
            chance = drafter.chances[uids.index(a.uid)]  # no row waits for another
            assert chance not in (0, 1) or a.block.accepted == chance * len(a.block.drafted)
            got[a.uid] += a.block.tokens
            if a.finish_reason is not None:
                check_caches(target, model, a, asked[uids.index(a.uid)] + got[a.uid])
        if removed is not None and len(got[removed]) > 4:
            generator.remove([removed])
            removed, left = None, got.pop(removed)
            assert left == expected[1][: len(left)]
    generator.close()
    assert got == {uid: expected[uids.index(uid)] for uid in got}
    assert max(widths) > 1 or rows == 1 or "ends" in events
    assert blocks or acceptance == "none"


def check_caches(target, model, answer, text):
    """Those of a text that was fed alone."""
    held = answer.all_tokens
    assert held in (text, text[:-1])
    fed, script = target.make_cache(), answer.prompt_cache[-1]
    for start in range(0, len(held), 7):
        _, features = target.forward_hidden(mx.array([held[start : start + 7]]), fed, (0,))
    assert_same_caches(answer.prompt_cache[: model.target_layers], fed, f"after {len(held)} tokens")
    assert script.caches[0].tokens == held
    last = mx.concatenate(script.caches[0].features, axis=1)[:, -features.shape[1] :]
    assert mx.allclose(last, features, rtol=1e-3, atol=1e-3).item()


EVERY_CLASS = ("full", "sliding", "full and sliding", "gated delta net", "recurrent and attention in a layer")
"""Targets that have every class of cache between them."""


@pytest.mark.parametrize("name", EVERY_CLASS)
def test_a_row_that_left_goes_on_in_another_batch(name):
    target, asked = row_target(name), prompts(name, long=True)[:3]
    whole = [prompt + text for prompt, text in zip(asked, alone(name, "greedy", True), strict=False)]
    drafter, policy = Script(whole, ACCEPTANCE["ragged"], target.vocab_size), Policy()
    model = Tapped(target, drafter, policy, BLOCK, 4096)
    left, generator = {}, SpeculativeGenerator(model, 2, 2048)
    uids = generator.insert(asked, [4, 9, 14])
    while answers := generator.next_generated():
        left |= {uids.index(a.uid): (a.prompt_cache, a.all_tokens) for a in answers if a.finish_reason}
    caches, held = zip(*(left[i] for i in range(3)), strict=True)
    generator = SpeculativeGenerator(model, 2, 2048)
    uids = generator.insert(
        [text[len(tokens) : len(tokens) + 1 + i] for i, (text, tokens) in enumerate(zip(whole, held, strict=True))],
        [len(text) - len(tokens) - 1 - i for i, (text, tokens) in enumerate(zip(whole, held, strict=True))],
        caches=list(caches),
        all_tokens=[list(tokens) for tokens in held],
    )
    ended = 0
    while answers := generator.next_generated():
        for a in (a for a in answers if a.finish_reason):
            check_caches(target, model, a, whole[uids.index(a.uid)])
            ended += 1
    assert ended == 3


def test_a_drafters_own_context_leaves_with_its_row():
    target, drafter = LoadedTargetModel(qwen3_model(3)), random_drafter(1, layer_types=LAYER_TYPES, sliding_window=5)
    drafter.bind(target)
    policy = Alternate()
    model = Tapped(target, drafter, policy, BLOCK, 512)
    generator, left = SpeculativeGenerator(model, 3, 2048), 3
    generator.insert([[1, 2, 3], [4], list(range(20))], [24, 9, 40])
    while answers := generator.next_generated():
        for answer in (a for a in answers if a.finish_reason):
            left -= 1
            tokens, fed = mx.array([answer.all_tokens]), drafter.make_cache()
            _, features = target.forward_hidden(tokens, target.make_cache(), drafter.target_layer_ids)
            drafter.extend_context(features, fed, tokens)
            for ours, alone in zip(answer.prompt_cache[model.target_layers :], fed.layers, strict=True):
                assert (ours.offset, ours.held) == (alone.offset, alone.held)
                for a, b in zip(ours.state, alone.state, strict=True):
                    assert mx.allclose(a, b, rtol=1e-3, atol=1e-3).item()
    assert left == 0


def test_a_row_ends_with_its_last_token_without_a_pass_that_reads_it():
    target, prompt = row_target("full"), [1, 2, 3]
    text = prompt + [int(token) for token, _ in generate_step(mx.array(prompt), target.model, max_tokens=40)]
    policy = Policy()
    model = Tapped(target, Script([text], [1.0], target.vocab_size), policy, BLOCK, 512)
    generator = SpeculativeGenerator(model, 1, 2048)
    generator.insert([prompt], [2 * BLOCK + 1])
    steps = [answers[0].block.tokens for answers in iter(generator.next_generated, [])]
    assert [len(tokens) for tokens in steps] == [BLOCK, BLOCK + 1]
    assert sum(steps, prompt) == text[: len(prompt) + 2 * BLOCK + 1]


@pytest.mark.parametrize("drafts", [0, 2])
def test_a_row_joins_with_a_step_of_all_rows(monkeypatch, drafts):
    target, shapes = row_target("full"), []
    for name in ("forward_hidden", "forward_rows"):
        forward = getattr(LoadedTargetModel, name)

        def noted(self, tokens, *given, forward=forward):
            shapes.append(tokens.shape)
            return forward(self, tokens, *given)

        monkeypatch.setattr(LoadedTargetModel, name, noted)
    asked, expected = prompts("full", long=False)[:3], alone("full", "greedy", False)
    limits, policy, whole = [3, 9, 5], Fixed(drafts), [a + b for a, b in zip(asked, expected, strict=False)]
    drafter = Script(whole, ACCEPTANCE["none"], target.vocab_size)
    generator = SpeculativeGenerator(Tapped(target, drafter, policy, BLOCK, 512), 2, 2048)
    stops = [StopSequences([[prompt[-1]]]) for prompt in asked]  # which end an answer, not a prompt
    assert not any(prompt[-1] in text for prompt, text in zip(asked, expected, strict=False))
    uids, got = generator.insert(asked, limits, stop_sequences=stops), [[], [], []]
    while answers := generator.next_generated():
        for answer in answers:
            got[uids.index(answer.uid)] += answer.block.tokens
    assert got == [text[:limit] for text, limit in zip(expected, limits, strict=False)]
    steps = {  # two prompts join at once, the third one where a row of two is left, which then has a step alone
        0: [(2, 1), (2, 1), (2, 1), (2, 1), (1, 4), (1, 1), (2, 1), (2, 1), (2, 1), (2, 1), (2, 1), (1, 1)],
        2: [(2, 1), (2, 3), (2, 3), (1, 4), (1, 3), (2, 3), (2, 3), (2, 3), (2, 3), (2, 2)],  # no last token is read
    }
    assert shapes == [(2, 6), *steps[drafts]]


def test_a_row_that_joins_is_no_outcome_for_the_policy():
    target, asked = row_target("full"), prompts("full", long=False)[:3]
    whole, told, policy = [a + b for a, b in zip(asked, alone("full", "greedy", False), strict=False)], [], Fixed(1)
    policy.observe = told.append
    drafter = Script(whole, ACCEPTANCE["all"], target.vocab_size)
    generator = SpeculativeGenerator(Tapped(target, drafter, policy, BLOCK, 512), 2, 2048)
    generator.insert(asked, [4, 12, 4])
    while generator.next_generated():
        pass
    assert {(block.rows, block.matched, *block.outcomes.items()) for block in told} == {(2, 1, (0, 1)), (1, 1, (0, 1))}


@pytest.mark.parametrize("name", EVERY_CLASS)
@pytest.mark.parametrize("length", [1, 4])
def test_a_row_may_leave_before_its_first_step(name, length):
    target, policy = row_target(name), Fixed(0)
    model = Tapped(target, Script([], [], 1), policy, BLOCK, 512)
    generator = SpeculativeGenerator(model, 2, 2048)
    prompt = list(range(1, length + 1))
    stays, leaves = generator.insert([prompt, prompt], [9, 9])
    while not generator._generation_batch:
        generator.next()
    (layers, tokens), got = generator.remove([leaves], return_prompt_caches=True)[leaves], []
    fed = target.make_cache()
    target.forward_hidden(mx.array([tokens]), fed, (0,))
    assert prompt[: len(tokens)] == tokens
    assert_same_caches(layers[: model.target_layers], fed, f"after {len(tokens)} tokens")
    while answers := generator.next_generated():
        got += answers[0].block.tokens
    assert got == [int(token) for token, _ in generate_step(mx.array(prompt), target.model, max_tokens=9)]
    assert stays != leaves


def test_no_row_is_fed_beyond_the_positions_of_the_target(monkeypatch):
    target, ends = row_target("full"), []
    forward = LoadedTargetModel.forward_rows

    def counted(self, tokens, caches, layer_ids):
        ends.append(mx.max(caches[0].offset).item() + tokens.shape[1])
        return forward(self, tokens, caches, layer_ids)

    monkeypatch.setattr(LoadedTargetModel, "forward_rows", counted)
    texts, policy = [[t] * 60 for t in (1, 2)], Policy()
    model = Tapped(target, Script(texts, [0.0] * 2, target.vocab_size), policy, BLOCK, 32)
    model.drafter.drafter.propose = lambda anchor, length, cache: Proposal(mx.zeros((1, length), mx.int32))
    generator = SpeculativeGenerator(model, 2, 2048)
    generator.insert([[1] * 3, [2] * 28], [20, 4])
    assert sum(len(answers) for answers in iter(generator.next_generated, []))
    assert max(ends) == 32


EVENTS = ("ends", "joins", "removed", "long prompts")
SOME = [
    *((name, 3, "ragged", "greedy", EVENTS, "blocks and plain steps") for name in ROW_TARGETS),
    ("recurrent and attention in a layer", 2, "ragged", "greedy", ("long prompts",), "whole blocks"),
    ("full", 1, "all", "greedy", ("ends",), "whole blocks"),
    ("full and sliding", 5, "all", "scripted draws", ("ends", "removed"), "whole blocks"),
    ("full", 5, "none", "repetition penalty", ("ends", "long prompts"), "blocks and plain steps"),
    ("sliding", 5, "none", "logit bias", ("joins",), "whole blocks"),
    ("sliding", 2, "all", "repetition penalty", EVENTS, "blocks and plain steps"),
    ("gated delta net", 5, "ragged", "logit bias", ("ends",), "whole blocks"),
    ("short convolution", 1, "ragged", "scripted draws", ("long prompts",), "blocks and plain steps"),
    ("mamba 2", 5, "ragged", "repetition penalty", ("removed", "long prompts"), "whole blocks"),
    ("sinks", 5, "ragged", "scripted draws", EVENTS, "blocks and plain steps"),
    ("experts", 1, "none", "greedy", ("joins", "ends"), "whole blocks"),
]
EVERY = list(
    product(ROW_TARGETS, (1, 2, 3, 5), ACCEPTANCE, SAMPLING, [(), *((event,) for event in EVENTS), EVENTS], POLICIES)
)


@pytest.mark.parametrize("case", SOME, ids=lambda case: " ".join(map(str, case)))
def test_each_row_is_its_text_alone(case):
    check(*case)


@pytest.mark.slow
@pytest.mark.parametrize("name", ROW_TARGETS)
def test_each_row_is_its_text_alone_in_every_combination(name):
    for case in EVERY:
        if case[0] == name:
            check(*case)
