"""Decoders of small random models whose tokens are written as numbers, so that a text tells its tokens."""

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper
from support.models import ScriptedDrafter, plain_greedy
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dflash import DFlashSpeculativeDecoder, LoadedTargetModel
from dflash.drafters.protocol import Proposal


class Knowing(ScriptedDrafter):
    """Drafts what the target writes after what its own context holds."""

    def propose(self, anchor: mx.array, length: int, cache) -> Proposal:
        drafts, _ = plain_greedy(self.bound.model, [*cache.tokens, anchor.item()], length)
        return Proposal(mx.array([drafts]))


def words(
    model, drafter: ScriptedDrafter | None = None, template: str | None = None, **options
) -> DFlashSpeculativeDecoder:
    """A decoder of ``model``; with a template, two of its tokens are tags."""
    names = {i: str(i) for i in range(999)} | ({40: "<think>", 41: "</think>"} if template else {})
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in names.items()}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped = TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template))
    target = LoadedTargetModel(model, wrapped)
    drafter = drafter or ScriptedDrafter(range(64), 64, 0.5)
    return DFlashSpeculativeDecoder(target, drafter, **{"policy": "full"} | options)


def ids(text: str) -> list[int]:
    return [int(word) for word in text.split()]
