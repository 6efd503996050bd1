"""Text appears in whole characters, up to the first stop string, however the tokens arrive."""

from dataclasses import dataclass
from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st
from support.models import byte_tokenizer, wrapped_tokenizer

from dflash.decoding.text import TextStream

# Few letters, so that stop strings occur and overlap; characters of 1 to 4 bytes; a merged pair; spaces.
LETTERS = "ab t\nĦ日😀👩"
TEXTS = st.text(LETTERS, max_size=30)
STOPS = st.lists(st.text(LETTERS, min_size=1, max_size=4), max_size=3)
FAST = st.booleans()


def groups(tokens: list[int], cuts: set[int]) -> list[list[int]]:
    """Tokens split before each index in ``cuts``, as blocks of any acceptance would bring them."""
    edges = [0, *sorted(c for c in cuts if 0 < c < len(tokens)), len(tokens)]
    return [tokens[a:b] for a, b in pairwise(edges)]


@dataclass
class Streamed:
    """What came out of a stream, piece by piece, and whether it ended at a stop string."""

    pieces: list[str]
    tokens: list[int]
    stopped: bool


def streamed(tokens: list[int], cuts: set[int], stops: list[str], fast: bool) -> Streamed:
    stream, came = TextStream(wrapped_tokenizer(fast).detokenizer, stops), []
    for group in groups(tokens, cuts):
        came.append(stream.add(group))
        if stream.stopped:
            break
    came.append(stream.finish())
    return Streamed([text for text, _ in came], [t for _, tokens in came for t in tokens], stream.stopped)


def cut_before_first(text: str, stops: list[str]) -> str:
    return text[: min([text.find(s) for s in stops if s in text], default=len(text))]


@given(TEXTS, st.sets(st.integers(0, 120)), STOPS, FAST)
@example("bat", {1, 2}, ["a", "bat"], True)  # the one that is complete later began first
@example("bab", {1, 2}, ["a", "bat"], False)  # as above, but begun in vain
@example("ba", {1}, ["a", "bat"], False)  # as above, and the text ends
@example("abtb", {1, 2, 3}, ["bt😀", "tb"], True)  # one begun in vain, inside it another
@example("a😀", {1, 2, 3, 4}, ["😀"], True)  # a stop that is half a token
@example("aab", {1, 2}, ["ab"], True)
def test_the_stream_is_the_text_before_its_first_stop_string_for_any_split(text, cuts, stops, fast):
    text = text.lstrip(" ")  # mlx-lm's fast detokenizer drops one leading space, as some models write one
    tokens = byte_tokenizer().encode(text)
    assert byte_tokenizer().decode(tokens) == text
    came = streamed(tokens, cuts, stops, fast)
    assert "".join(came.pieces) == cut_before_first(text, stops)
    assert came.stopped == any(s in text for s in stops)


@given(TEXTS, st.sets(st.integers(0, 120)), STOPS, FAST)
@example("xab t", {1, 2, 3}, ["ab t"], True)  # begun in one block, complete in a later one
@example("aab", {1}, ["b"], True)  # begins inside the token "ab"
@example("a日b", {2}, ["日"], False)  # begins with a character of three tokens
@example("a a", set(), [" "], True)  # begins in a space, which shows with the next token only
@example("a 😀a", {1, 2, 3, 4}, ["😀"], True)  # begins after a space that is kept back
@example("a at", {1, 2, 3}, [" at"], True)  # as above, complete in a later block
def test_the_last_token_is_the_one_in_which_the_stop_string_begins_for_any_split(text, cuts, stops, fast):
    text = text.lstrip(" ")
    tokens = byte_tokenizer().encode(text)
    came = streamed(tokens, cuts, stops, fast)
    assert came.tokens == tokens[: len(came.tokens)]
    if not came.stopped:
        assert came.tokens == tokens
        return
    kept, begin = byte_tokenizer().decode(came.tokens), len("".join(came.pieces))
    assert kept.startswith(text[: begin + 1]), "its first character is complete"
    without_last = byte_tokenizer().decode(came.tokens[:-1])
    assert not without_last.startswith(text[: begin + 1]), "and no token comes after it"


@given(TEXTS, st.sets(st.integers(0, 120)), st.integers(0, 120), FAST)
@example("\nĦa", {2}, 4, False)  # a block that ends inside the character after a newline
def test_no_piece_holds_part_of_a_character(text, cuts, end, fast):
    """Also where generation ends inside a character: then only the last piece may show that it is broken."""
    tokens = byte_tokenizer().encode(text.lstrip(" "))[:end]
    came = streamed(tokens, cuts, [], fast)
    assert all("\ufffd" not in piece for piece in came.pieces[:-1])
    assert "".join(came.pieces) == byte_tokenizer().decode(tokens)


@given(TEXTS, STOPS, FAST)
def test_text_is_shown_as_soon_as_it_cannot_begin_a_stop_string(text, stops, fast):
    """Nothing is held back for longer than the longest stop string could need."""
    text = text.lstrip(" ")
    longest = max((len(s) for s in stops), default=1)
    stream, shown, given = TextStream(wrapped_tokenizer(fast).detokenizer, stops), "", ""
    for character in text:
        shown += stream.add(byte_tokenizer().encode(character))[0]
        given += character
        if stream.stopped:
            break
        # A single space is held by mlx-lm's fast detokenizer until the next token, and a run of them in turn.
        assert len(shown) >= len(given.rstrip(" ")) - (longest - 1)
        assert given.startswith(shown)


def test_nothing_comes_after_a_stop_string():
    tokenizer = byte_tokenizer()
    stream = TextStream(wrapped_tokenizer().detokenizer, ["stop"])
    assert stream.add(tokenizer.encode("to the stop and on")) == ("to the ", tokenizer.encode("to the s"))
    assert stream.stopped
    assert stream.add(tokenizer.encode("more")) == ("", [])
    assert stream.finish() == ("", [])
