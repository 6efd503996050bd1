"""``dflash chat``: each answer is that of ``generate`` to the same history, after whatever happened before."""

import signal
from types import SimpleNamespace

import pytest
from mlx_lm.models.cache import KVCache
from support.cli import assert_one_error, invoke

from dflash import DFlashSpeculativeDecoder
from dflash.cli import loading, terminal
from dflash.decoding.trace import read_records
from dflash.target.rewind import RULES

TURNS = [
    "Tom has 12 pears. He buys 3 bags with 4 pears each. How many pears does he have?",
    "Return the longest word of a sentence.",
    "How can I keep the numbers of at least 9 in a given list in Python?",
]
SHORT = {"max_tokens": 24}


@pytest.fixture(scope="module")
def decoder() -> DFlashSpeculativeDecoder:
    return DFlashSpeculativeDecoder.from_pretrained()


@pytest.fixture
def chat(decoder, monkeypatch):
    """``dflash chat`` with the bundled models, given lines."""
    monkeypatch.setattr(loading, "load_decoder", lambda *_: decoder)
    return lambda lines, *options: invoke("chat", "--max-tokens", 24, *options, stdin="".join(f"{x}\n" for x in lines))


def expected(decoder, turns: list[str], system: str | None = None, cut: dict[int, str] | None = None, **options):
    """The answers of ``generate`` to growing histories; ``cut`` gives, by turn, what is kept of an answer."""
    messages, answers = [] if system is None else [{"role": "system", "content": system}], []
    for number, turn in enumerate(turns):
        messages.append({"role": "user", "content": turn})
        answer = (cut or {}).get(number) or decoder.generate(messages, **SHORT, **options)
        answers.append(answer)
        messages.append({"role": "assistant", "content": answer})
    return answers


@pytest.fixture(scope="module")
def answers(decoder) -> list[str]:
    """Those to all turns, without options."""
    return expected(decoder, TURNS)


def test_a_tree_changes_no_answer(chat, answers):
    assert chat(TURNS, "--policy", "full", "--tree", 8).stdout == "".join(f"{answer}\n" for answer in answers)


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        (["--system", "Be brief."], {"system": "Be brief."}),
        (["--temp", 0.8, "--seed", 3], {"temperature": 0.8, "seed": 3}),
        (["--stop", "a"], {"stop_strings": ["a"]}),
    ],
)
def test_each_answer_is_that_of_generate_to_the_same_history(chat, decoder, flags, options):
    shown = chat(TURNS, *flags)
    assert shown.exit_code == 0
    assert shown.stdout == "".join(f"{answer}\n" for answer in expected(decoder, TURNS, **options))


def test_commands_change_no_answer_and_plain_drafts_nothing(chat, answers, tmp_path):
    file = tmp_path / "trace.jsonl"
    shown = chat([TURNS[0], "/plain", TURNS[1], "/plain", "/drafts", TURNS[2]], "--trace", file, "--policy", "full")
    assert shown.stdout == "".join(f"{answer}\n" for answer in answers)
    drafted = []
    for record in read_records(file):
        if record["record"] == "request":
            drafted.append(0)
        else:
            drafted[-1] += len(record["drafts"])
    assert drafted[0] > 0 == drafted[1] < drafted[2]
    assert "Blocks are not marked" in shown.stderr


def test_stats_tell_the_last_answer_and_the_whole_chat_and_reset_forgets(chat, decoder, answers):
    shown = chat(["/stats", TURNS[0], TURNS[1], "/stats", "/reset", "/stats", TURNS[1]])
    first, second = answers[:2]
    assert shown.stdout.splitlines()[-1] == decoder.generate(TURNS[1], **SHORT).splitlines()[-1]
    none, last, whole, after = shown.stderr.splitlines()
    assert none == after == "No answer yet."
    count = [len(decoder.tokenizer.encode(text)) for text in (first, second)]
    assert last.startswith(f"last answer: {min(24, count[1] + 1)} tokens, ")
    assert whole.startswith(f"whole chat:  {sum(min(24, c + 1) for c in count)} tokens, ")
    assert "acceptance length" in last


def test_a_turn_reads_only_what_is_new(chat, decoder, monkeypatch):
    read, forward = [], decoder.loaded_target.forward_hidden
    monkeypatch.setattr(
        decoder.loaded_target,
        "forward_hidden",
        lambda tokens, *rest: read.append(tokens.shape[1]) or forward(tokens, *rest),
    )
    shown = chat([*TURNS, "/stats"], "--system", "x" * 300, "--policy", 0)
    prompts, cached = [int(word) for word in shown.stderr.splitlines()[-1].split() if word.isdecimal()][-2:]
    assert prompts - cached == sum(length for length in read if length > 1)
    assert cached > prompts / 2


@pytest.mark.parametrize(("place", "presses"), [("after a block", 1), ("in a rewind", 2)])
def test_ctrl_c_ends_an_answer_and_the_next_turn_is_right(chat, decoder, answers, monkeypatch, place, presses):
    """The first waits for the end of the block; the second does not, and leaves caches of different lengths."""
    pieces: list[str] = []
    kept: list[str] = []
    show, rule, rewound = terminal.show, RULES[KVCache], []

    def press() -> None:
        kept.append("".join(pieces))
        for _ in range(presses):
            signal.raise_signal(signal.SIGINT)

    def shown(text: str) -> None:
        pieces.append(text)
        show(text)
        if place == "after a block" and len(pieces) == 3:
            press()

    def rewind(cache, rejected) -> None:
        rule(cache, rejected)
        if pieces and not kept:
            rewound.append(cache)
            if len(rewound) == 2:
                press()

    with monkeypatch.context() as patch:
        patch.setattr(terminal, "show", shown)
        if place == "in a rewind":
            patch.setitem(RULES, KVCache, rewind)
        before = signal.getsignal(signal.SIGINT)
        result = chat(TURNS, "--policy", "full" if place == "in a rewind" else 3)
        assert signal.getsignal(signal.SIGINT) is before
    assert len(kept[0]) < len(answers[0])
    assert result.stdout == "".join(f"{answer}\n" for answer in expected(decoder, TURNS, cut={0: kept[0]}))


def test_what_cannot_be_answered_is_one_line_and_the_chat_goes_on(chat, answers):
    shown = chat([TURNS[0], "/stat", "/etc/hosts", TURNS[1], "word " * 9000])
    assert shown.exit_code == 0
    assert shown.stdout == "".join(f"{answer}\n" for answer in answers[:2])
    messages = ("did you mean '/stats'", "needs a space before it", "leaves no room")
    assert all(said in line for said, line in zip(messages, shown.stderr.splitlines(), strict=True))


def test_what_would_fail_for_every_message_ends_the_chat_before_the_first(chat):
    assert_one_error(chat(TURNS, "--tree", 4, "--max-kv-size", 40), "trees need KVCache")


def test_bytes_that_are_no_text_and_targets_without_a_template_are_errors(decoder, monkeypatch):
    monkeypatch.setattr(loading, "load_decoder", lambda *_: decoder)
    assert_one_error(invoke("chat", stdin=b"\xff\xfe\n"), "not UTF-8 text")
    monkeypatch.setattr(decoder, "tokenizer", SimpleNamespace(has_chat_template=False))
    assert_one_error(invoke("chat", stdin="Hello\n"), "no chat template")
