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


def special_token_differences(model: LoadedTargetModel, target: LoadedTargetModel) -> list[str]:
    """Up to three differences between tokenizers of one vocabulary: unknown tokens, begin and end of text."""
    if model.tokenizer is None or target.tokenizer is None:
        return []
    own, theirs = _texts(model.tokenizer), _texts(target.tokenizer)
    found = [
        f"its tokenizer does not know the target's token {i}, {text!r}" for i, text in theirs.items() if i not in own
    ]
    for name in ("bos_token", "eos_token"):
        ours, wanted = (getattr(m.tokenizer, name, None) for m in (model, target))
        if ours != wanted:
            found.append(f"its {name} is {ours!r} and the target's is {wanted!r}")
    return found[:3]


def _texts(tokenizer: Any) -> dict[int, str]:
    return dict(sorted((token, text) for text, token in tokenizer.get_vocab().items()))
