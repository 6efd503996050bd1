"""Whether a draft model's tokens are the target's: each with the same text and id.

Knows tokenizers and sizes of tables. Must not know caches, or how anything is drafted.
"""

from typing import Any

from ...target import LoadedTargetModel


def is_draft_model_compatible(model: LoadedTargetModel, target: LoadedTargetModel) -> bool:
    """Whether ``model`` can draft for ``target``: every token of the target has the same text and id there.

    Both as :func:`dflash.load_target` returns them. Compared before a decoder is made, it costs no error; the decoder
    itself refuses another vocabulary with the first token that differs.
    """
    return vocabulary_difference(model, target) is None


def vocabulary_difference(model: LoadedTargetModel, target: LoadedTargetModel) -> str | None:
    """The first token of the target that is another one in the draft model, as a clause; ``None`` if there is none.

    Without both tokenizers only the sizes of the vocabularies can be compared, and must be equal.
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
    """What differs between tokenizers of one vocabulary: tokens without a text, the first and the last token."""
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
