"""Decoders of small random models whose tokens are written as numbers, so that a text tells its tokens."""

from mlx_lm.tokenizer_utils import TokenizerWrapper
from support.models import ScriptedDrafter
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dflash import DFlashSpeculativeDecoder, LoadedTargetModel


def words(model, share: float = 0.5, template: str | None = None, **options) -> DFlashSpeculativeDecoder:
    """A decoder of ``model``; with a template, two of its tokens are tags."""
    names = {i: str(i) for i in range(999)} | ({40: "<think>", 41: "</think>"} if template else {})
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in names.items()}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped = TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template))
    target = LoadedTargetModel(model, wrapped)
    drafter = ScriptedDrafter(list(range(64)), 64, share)
    return DFlashSpeculativeDecoder(target, drafter, **{"policy": "full"} | options)


def ids(text: str) -> list[int]:
    return [int(word) for word in text.split()]
