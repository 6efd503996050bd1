"""Text appears in whole characters, up to the first stop string, however the tokens arrive."""

from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st
from support.models import byte_tokenizer, wrapped_tokenizer

from dflash.text import TextStream

# Few letters, so that stop strings occur and overlap; characters of 1 to 4 bytes; a merged pair; spaces.
LETTERS = "ab t\nĦ日😀👩"
TEXTS = st.text(LETTERS, max_size=30)
STOPS = st.lists(st.text(LETTERS, min_size=1, max_size=4), max_size=3)
FAST = st.booleans()


def groups(tokens: list[int], cuts: set[int]) -> list[list[int]]:
    """Tokens split before each index in ``cuts``, as blocks of any acceptance would bring them."""
    edges = [0, *sorted(c for c in cuts if 0 < c < len(tokens)), len(tokens)]
    return [tokens[a:b] for a, b in pairwise(edges)]


def streamed(tokens: list[int], cuts: set[int], stops: list[str], fast: bool) -> tuple[list[str], TextStream]:
    stream, pieces = TextStream(wrapped_tokenizer(fast).detokenizer, stops), []
    for group in groups(tokens, cuts):
        pieces.append(stream.add(group))
        if stream.stopped:
            break
    pieces.append(stream.finish())
    return pieces, stream


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
    pieces, stream = streamed(tokens, cuts, stops, fast)
    assert "".join(pieces) == cut_before_first(text, stops)
    assert stream.stopped == any(s in text for s in stops)


@given(TEXTS, st.sets(st.integers(0, 120)), st.integers(0, 120), FAST)
@example("\nĦa", {2}, 4, False)  # a block that ends inside the character behind a newline
def test_no_piece_holds_part_of_a_character(text, cuts, end, fast):
    """Also where generation ends inside a character: then only the last piece may show that it is broken."""
    tokens = byte_tokenizer().encode(text.lstrip(" "))[:end]
    pieces, _ = streamed(tokens, cuts, [], fast)
    assert all("\ufffd" not in piece for piece in pieces[:-1])
    assert "".join(pieces) == byte_tokenizer().decode(tokens)


@given(TEXTS, STOPS, FAST)
def test_text_is_shown_as_soon_as_it_cannot_begin_a_stop_string(text, stops, fast):
    """Nothing is held back for longer than the longest stop string could need."""
    text = text.lstrip(" ")
    longest = max((len(s) for s in stops), default=1)
    stream, shown, seen = TextStream(wrapped_tokenizer(fast).detokenizer, stops), "", ""
    for character in text:
        shown += stream.add(byte_tokenizer().encode(character))
        seen += character
        if stream.stopped:
            break
        # A single space is held by mlx-lm's fast detokenizer until the next token, and a run of them in turn.
        assert len(shown) >= len(seen.rstrip(" ")) - (longest - 1)
        assert seen.startswith(shown)


def test_nothing_is_shown_behind_a_stop_string():
    tokenizer = byte_tokenizer()
    stream = TextStream(wrapped_tokenizer().detokenizer, ["stop"])
    assert stream.add(tokenizer.encode("to the stop and on")) == "to the "
    assert stream.stopped
    assert stream.add(tokenizer.encode("more")) == ""
    assert stream.finish() == ""


def test_a_half_stop_string_is_shown_when_the_text_ends():
    tokenizer = byte_tokenizer()
    stream = TextStream(wrapped_tokenizer().detokenizer, ["stop!"])
    assert stream.add(tokenizer.encode("non-stop")) == "non-"
    assert stream.finish() == "stop"
    assert not stream.stopped
