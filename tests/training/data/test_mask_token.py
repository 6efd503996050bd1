"""Mask tokens: those that no text uses are listed, one that the dataset uses is refused with the others named."""

import pytest
from support.conversations import TINY
from support.models import MASK, START, STOP, TEXT_VOCAB, byte_tokenizer, qwen3_model

from dflash import LoadedTargetModel
from dflash.core.errors import DataError
from dflash.training.data.mask_token import UnusedToken, require_unused, suggestion, unused_tokens
from dflash.training.data.sequences import Sequences


def target_with(extra: list[str] = (), rows: int = 3) -> LoadedTargetModel:
    """A target whose tokenizer has the ``extra`` special tokens, and ``rows`` embeddings more than tokens."""
    tokenizer = byte_tokenizer().__class__(
        tokenizer_object=byte_tokenizer().backend_tokenizer.from_str(byte_tokenizer().backend_tokenizer.to_str()),
        eos_token=STOP,
        chat_template=byte_tokenizer().chat_template,
    )
    tokenizer.add_special_tokens({"additional_special_tokens": [START, MASK, *extra]})
    return LoadedTargetModel(qwen3_model(1, len(tokenizer) + rows, **TINY), tokenizer)


def number(target: LoadedTargetModel, token: str) -> int:
    return target.tokenizer.get_vocab()[token]


def test_mask_and_reserved_tokens_come_first_then_ids_without_text_then_other_specials():
    target = target_with(["<|fim|>", "<|reserved_special_token_7|>", "<unused3>"])
    found = [token.text for token in unused_tokens(target)]
    assert found == [MASK, "<|reserved_special_token_7|>", "<unused3>", None, None, None, "<|fim|>"]
    assert [token.id for token in unused_tokens(target)][3:6] == list(range(target.vocab_size))[-3:]
    assert suggestion(target).startswith(f"one of '{MASK}' ({number(target, MASK)}), ")
    assert suggestion(target).endswith(" and 2 more")


def test_tokens_of_the_template_the_end_and_the_dataset_are_used():
    target = target_with(["<unused1>"], rows=0)
    for token in (START, STOP):
        assert number(target, token) not in [unused.id for unused in unused_tokens(target)]
    dataset = Sequences.from_lists([[1, number(target, MASK)]], [[2]])
    assert unused_tokens(target, dataset) == [UnusedToken(number(target, "<unused1>"), "<unused1>")]


def test_a_mask_that_the_dataset_holds_is_refused_with_those_that_it_does_not():
    target = target_with(rows=0)
    dataset = Sequences.from_lists([[1, number(target, START)], [number(target, START)]], [[2], [2]])
    with pytest.raises(DataError) as error:
        require_unused(number(target, START), target, dataset)
    assert str(error.value) == (
        f"The mask token '{START}' ({number(target, START)}) occurs 2 times in the dataset, but a mask must be a token "
        f"that no text uses. Set drafter.mask_token to '{MASK}' ({number(target, MASK)})."
    )
    with pytest.raises(DataError, match="this tokenizer reserves none"):
        require_unused(1, target, Sequences.from_lists([[1]], [[number(target, MASK)]]))


def test_an_ordinary_token_is_warned_of_even_where_the_dataset_lacks_it(caplog):
    target = target_with()
    for token_id in (number(target, MASK), target.vocab_size - 1):
        require_unused(token_id, target)
    assert not caplog.text
    require_unused(97, target)
    assert f"is one that text or the chat template may use; better is one of '{MASK}'" in caplog.text


def test_a_target_without_a_tokenizer_is_refused():
    with pytest.raises(DataError, match="without a tokenizer"):
        unused_tokens(LoadedTargetModel(qwen3_model(1, TEXT_VOCAB, **TINY)))
