"""Conversations as tokens: the mask is the responses, whatever a chat template does around them."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.conversations import TINY, turns, with_template
from support.models import STOP, byte_tokenizer, qwen3_model

from dflash import LoadedTargetModel
from dflash.core.errors import DataError
from dflash.prompts.conversations import Conversation
from dflash.prompts.tokens import prompt_tokens
from dflash.training.data.chat import encode, response_spans


def responses_of(conversation: Conversation, target: LoadedTargetModel, chat: bool = True, **switches) -> list[str]:
    """Every run of response tokens, decoded."""
    row = encode(conversation, target, chat, switches)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], row.loss_mask.astype(int), [0]])))
    return [byte_tokenizer().decode(row.tokens[a:b]) for a, b in edges.reshape(-1, 2)]


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\ue000\ue001"), min_size=1, max_size=12)


@settings(max_examples=25)
@given(st.lists(TEXT, min_size=2, max_size=6))
def test_the_mask_is_every_response_with_its_stop_token_and_nothing_else(target, contents):
    talk = turns(*contents[: len(contents) // 2 * 2])
    row = encode(talk, target, True, {})
    assert row.tokens.tolist() == target.tokenizer.apply_chat_template(list(talk.messages))
    expected = []
    for message in talk.messages:
        own = target.tokenizer.encode(f"<|im_start|>{message['role']}\n", add_special_tokens=False)
        wrote = target.tokenizer.encode(message["content"] + STOP, add_special_tokens=False)
        expected += [False] * len(own) + [message["role"] == "assistant"] * len(wrote) + [False]
    assume(len(expected) == len(row.tokens))  # no merge crosses a border
    assert row.loss_mask.tolist() == expected


def test_a_prompt_without_response_ends_where_the_target_begins(target):
    row = encode(turns("Hi"), target, True, {})
    assert row.loss_mask is None
    assert row.tokens.tolist() == target.build_prompt("Hi")


TURN = "<|im_start|>{{ m.role }}\n%s<|im_end|>\n"
EACH = "{% for m in messages %}%s{% endfor %}"
THINKING = EACH.replace(
    "%s",
    TURN % "{% set t = m.content.split('</think>') %}{% if m.role == 'assistant' and loop.last %}<think>\n"
    "{{ t[0].split('<think>')[-1].strip() if t | length > 1 }}\n</think>\n\n{% endif %}{{ t[-1].lstrip('\n') }}",
)


THOUGHT = ("q", "<think>\nhm\n</think>\n\none", "r", "<think>\nso\n</think>\n\ntwo")
FOUND = {
    "trimmed": (EACH.replace("%s", TURN % "{{ m.content | trim }}"), ("q", " one ", "r", "two\n"),
                ["one" + STOP, "two" + STOP]),
    "with the template's space, which is in its first token": (
        EACH.replace("%s", "[{{ m.role }}] {{ m.content }}"), ("q", "two", "r", "one"),
        [" two", "one"]),  # " t" is one token, " o" is two
    "without what follows but a stop token": (EACH.replace("%s", "{{ m.content }}\n"), ("q", "one", "r", "two"),
                                                       ["one", "two"]),
    "with an empty thought added": (THINKING, ("q", "one", "r", "two"), ["one" + STOP, "two" + STOP]),
    "with earlier thoughts dropped": (THINKING, THOUGHT, ["one" + STOP, "so\n</think>\n\ntwo" + STOP]),
}  # fmt: skip


@pytest.mark.parametrize("how", FOUND)
def test_responses_are_found_in_whatever_a_template_makes_of_them(how):
    template, contents, expected = FOUND[how]
    assert responses_of(turns(*contents), with_template(template)) == expected


NOT_SHOWN = r"line 1: the target's chat template does not show .* in message 2 exactly once"
MESSAGE = {
    "rewritten": (EACH.replace("%s", TURN % "{{ m.content | upper }}"), ("q", "one", "r", "two"), NOT_SHOWN),
    "repeated": (EACH.replace("%s", TURN % "{{ m.content }}{{ m.content }}"), ("q", "one", "r", "two"), NOT_SHOWN),
    "left out": (
        EACH.replace("%s", TURN % "{{ m.content if loop.last or m.role == 'user' }}"), ("q", "one", "r", "two"),
        NOT_SHOWN),
    "a prompt refused": ("{{ raise_exception('no') }}", ("q",), r"line 1: the target's chat template refuses .* no"),
    "a response refused": ("{{ raise_exception('no') }}", ("q", "a"), r"the target's chat template refuses .* no"),
    "nothing": ("", ("q",), "give none"),
}  # fmt: skip


@pytest.mark.parametrize("how", MESSAGE)
def test_a_template_that_hides_rewrites_or_refuses_messages_is_told_of_by_the_line(how):
    template, contents, message = MESSAGE[how]
    with pytest.raises(DataError, match=message):
        encode(turns(*contents), with_template(template), True, {})


def test_switches_reach_the_template():
    speaks = with_template("{{ mood }}" + EACH.replace("%s", TURN % "{{ m.content }}"))
    row = encode(turns("q", "a"), speaks, True, {"mood": "calm"})
    assert byte_tokenizer().decode(row.tokens).startswith("calm<|im_start|>")
    assert responses_of(turns("q", "a"), speaks, mood="a") == ["a" + STOP]


def test_without_a_template_prompt_and_response_stand_as_they_are(target):
    row = encode(turns("ab", "c\n"), target, False, {})
    assert byte_tokenizer().decode(row.tokens) == "abc\n" + STOP
    assert byte_tokenizer().decode(row.tokens[row.loss_mask]) == "c\n" + STOP
    assert encode(turns("ab"), target, False, {}).tokens.tolist() == target.build_prompt("ab", chat=False)
    with pytest.raises(DataError, match=r"one prompt and at most one response, not messages of user, assistant, user"):
        encode(turns("a", "b", "c"), target, False, {})


def test_a_tokenizer_without_character_offsets_is_refused_for_given_responses_only(target, monkeypatch):
    monkeypatch.setattr(type(target.tokenizer._tokenizer), "is_fast", False)
    assert encode(turns("q"), target, True, {}).loss_mask is None
    with pytest.raises(DataError, match="does not say which characters"):
        encode(turns("q", "a"), target, True, {})


def test_spans_are_found_whatever_stands_around_them():
    def render(messages):
        return "|".join(m["content"] for m in messages)

    talk = turns("b", "ab", "ab", "b|").messages
    assert response_spans(render, talk, "b|ab|ab|b|") == [(2, 4), (8, 10)]


@pytest.mark.parametrize("chat", [True, False])
def test_an_unanswered_prompt_is_what_decoding_begins_from(target, chat):
    for talk in (turns("one"), turns("one", "two")):
        row = encode(talk.unanswered(), target, chat, {})
        assert row.tokens.tolist() == prompt_tokens(target, "one", chat=chat)
    if chat:
        talk = turns("one", "two", "three")
        assert encode(talk, target, True, {}).tokens.tolist() == prompt_tokens(target, list(talk.messages))


@pytest.mark.parametrize("chat", [True, False])
def test_the_tokenizer_of_another_model_is_refused(chat):
    small = LoadedTargetModel(qwen3_model(1, 200, **TINY), byte_tokenizer())
    with pytest.raises(DataError, match=r"line 1: the target knows tokens 0 to 199, .* tokenizer of another model"):
        encode(turns("caf\u00e9 \U0001f642", "b"), small, chat, {})
