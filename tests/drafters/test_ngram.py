"""Copying from the text so far: the best place, no more than its evidence allows, and the target's own text."""

import random

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cli import invoke
from support.models import TEXT_VOCAB, ScriptModel, plain_greedy, target, wrapped_tokenizer

import dflash
from dflash.adapters.conformance import small_models as small
from dflash.core.errors import GenerationError
from dflash.drafters.ngram import COMPARED, LONGEST, NgramCache, NgramDrafter

NEAR_TIE = 1e-4

SOURCE = '''
def load_table(path, separator=","):
    """Rows of a file as lists of cells."""
    rows = []
    with open(path, encoding="utf-8") as file:
        for line in file:
            cells = line.rstrip("\\n").split(separator)
            if not any(cells):
                continue
            rows.append(cells)
    return rows


def column_widths(rows):
    """The width of each column, in characters."""
    widths = [0] * max(len(cells) for cells in rows)
    for cells in rows:
        for i, cell in enumerate(cells):
            widths[i] = max(widths[i], len(cell))
    return widths


def print_table(path):
    """A file as a table with aligned columns."""
    rows = load_table(path)
    widths = column_widths(rows)
    for cells in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths)))
'''


def held(*tokens: int) -> NgramCache:
    cache = NgramCache()
    cache.extend(list(tokens))
    return cache


def agreement(text: list[int], end: int) -> int:
    """Tokens before ``end`` that equal the end of ``text``, the slow way."""
    return max(n for n in range(min(end, LONGEST) + 1) if text[end - n : end] == text[len(text) - n :])


@settings(max_examples=150)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.lists(st.integers(1, 9), max_size=9))
def test_the_place_that_is_copied_has_the_longest_agreement(text, pieces):
    *before, anchor = text
    cache = held()
    for piece in pieces:
        cache.extend(before[cache.offset : cache.offset + piece])
    cache.extend(before[cache.offset :])
    assert cache.tokens == before
    end, agrees = cache.best_place(anchor)
    longest = max((agreement(text, end) for end in range(1, len(before))), default=0)
    assert agrees == (longest if longest >= 2 else 0)
    assert agrees == 0 or agreement(text, end) == agrees
    draft = cache.continuation(anchor, 15)
    assert len(draft) == min(15, 2 * agrees)
    assert draft[: len(before) - end] == before[end : end + len(draft)] or not agrees
    assert cache.tokens == before
    assert cache.continuation(anchor, 15) == draft, "a proposal changes nothing"


def test_of_places_that_agree_equally_the_latest_is_copied():
    assert held(1, 2, 3, 9, 1, 2, 4, 8, 1).continuation(2, 1) == [4]


@pytest.mark.parametrize("edited", [[999, 301], [301], [999, 998, 301], [999, 998, 997]])
def test_copying_resumes_where_it_was_left(edited):
    """After an edit the last two tokens occur in many places; the right one is where the copy would have come to."""
    line = [1, 2]  # begins every line
    source = [token for i in range(40) for token in (*line, 100 + i, 200 + i, 300 + i)]
    cache = held(*source, 50)
    cache.extend([*line, 100, 200, 300, *line])  # line 0, copied plainly
    assert cache.continuation(101, 5)[:3] == [201, 301, 1]  # line 1 is found by its own token
    cache.extend([101, *edited, 1])
    assert cache.continuation(2, 3) == [102, 202, 302]


def test_a_repetition_goes_on_past_the_end_of_the_text():
    assert held(7, 1, 2, 3, 1, 2, 3, 1).continuation(2, 8) == [3, 1, 2, 3, 1, 2, 3, 1][: 2 * 5]
    assert held(5, 5, 5).continuation(5, 9) == [5, 5, 5, 5]


@pytest.mark.parametrize("tokens", [[], [1], [1, 2], [1, 2, 3, 4]])
def test_nothing_is_proposed_where_nothing_agrees(tokens):
    drafter = NgramDrafter()
    cache = drafter.make_cache()
    cache.extend(tokens)
    proposal = drafter.propose(mx.array([[2]]), 15, cache)
    assert proposal.tokens.shape == (1, 0)
    assert proposal.logits is None


@pytest.mark.parametrize("sizes", [(), (0,), (4, -1)])
def test_sizes_below_one_are_refused(sizes):
    with pytest.raises(GenerationError, match="at least 1"):
        NgramDrafter(sizes=sizes)


def test_a_file_with_one_name_changed_is_drafted_almost_whole():
    tokenizer = wrapped_tokenizer()
    answer = [*tokenizer.encode(SOURCE.replace("widths", "column_sizes")), tokenizer.eos_token_id]
    prompt = tokenizer.encode("Repeat this with one name changed:\n" + SOURCE)
    model = ScriptModel([*prompt, *answer], TEXT_VOCAB)
    decoder = dflash.DFlashSpeculativeDecoder(model, NgramDrafter(), tokenizer, policy="full")
    blocks: list[list[int]] = []
    ids = decoder.spec_generate([prompt], len(answer), stream_callback=blocks.append)
    assert ids.tolist() == [[*prompt, *answer]]
    assert (len(answer) - 1) / (len(blocks) - 1) > 9  # of 16; 6.5 if the latest place is copied


@pytest.mark.parametrize("kind", ["sliding", "mamba2"])
def test_the_text_is_the_targets_own(kind):
    """Random targets soon repeat themselves, so that drafts are accepted and rejected."""
    mx.random.seed(0)  # mlx-lm samples some vectors of recurrent layers
    loaded = target(kind, 3) if kind == "sliding" else dflash.LoadedTargetModel(small.build(kind))
    prompt, count = [3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4], 40
    expected, lead = plain_greedy(loaded.model, prompt, count)
    assert lead > NEAR_TIE
    decoder = dflash.DFlashSpeculativeDecoder(loaded, NgramDrafter(sizes=(2, 1)), policy="full")
    assert decoder.spec_generate([prompt], count).tolist() == [prompt + expected]


class CountedReads(list):
    reads = 0

    def __getitem__(self, at):
        self.reads += 1
        return super().__getitem__(at)


def test_a_lookup_reads_no_more_tokens_of_a_longer_text():
    """Of two tokens, so that each n-gram occurs a thousand times."""
    chance = random.Random(0)
    cache = held(*(chance.randrange(2) for _ in range(32_768)))
    cache.tokens = CountedReads(cache.tokens)
    for _ in range(20):
        before = cache.tokens.reads
        draft = cache.continuation(chance.randrange(2), 15)
        assert cache.tokens.reads - before < 2 * (COMPARED + 2) * LONGEST
        cache.extend([0, *draft])


def test_it_is_loaded_by_its_name_in_python_and_on_the_command_line(target_folder):
    assert isinstance(dflash.load_drafter("ngram"), NgramDrafter)
    plain = invoke("generate", "hello", "--target", target_folder, "--drafter", "ngram", "--max-tokens", 12)
    assert plain.exit_code == 0, plain.output
    decoder = dflash.DFlashSpeculativeDecoder.from_pretrained(target_folder, "ngram")
    assert decoder.generate("hello", max_tokens=12) in plain.stdout
