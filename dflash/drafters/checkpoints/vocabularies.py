"""Whether a draft model has the target's vocabulary: each token with the same text and id."""

from typing import Any

from ...target import LoadedTargetModel


def is_draft_model_compatible(model: LoadedTargetModel, target: LoadedTargetModel) -> bool:
    """Whether ``model`` can draft for ``target``: it has every token of the target, with the same text and id.

    Both are as :func:`dflash.load_target` returns them. A decoder would refuse another vocabulary with an error that
    names the first token that differs.
    """
    return vocabulary_difference(model, target) is None


def vocabulary_difference(model: LoadedTargetModel, target: LoadedTargetModel) -> str | None:
    """The first of the target's tokens that differs in the draft model, as a clause; ``None`` if none does.

    Without both tokenizers only the sizes of the vocabularies are compared, and must be equal.
    """
    if model.tokenizer is None or target.tokenizer is None:
        if model.vocab_size == target.vocab_size:
            return None
        return f"its vocabulary has {model.vocab_size} tokens, the target's has {target.vocab_size}"
    own = _texts(model.tokenizer)
    for token, text in _texts(target.tokenizer).items():
        if own.get(token, text) != text:
            return f"token {token} is {own[token]!r} in its vocabulary and {text!r} in the target's"
        if token >= model.vocab_size:
            return f"the target's token {token}, {text!r}, is past the {model.vocab_size} tokens of its embedding table"
    return None


def _texts(tokenizer: Any) -> dict[int, str]:
    return dict(sorted((token, text) for text, token in tokenizer.get_vocab().items()))
