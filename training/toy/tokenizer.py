"""A small byte-level BPE tokenizer, learned from text and saved as a Hugging Face fast tokenizer.

Every text survives encoding and decoding exactly: bytes are the alphabet, nothing is normalised, no space
is added in front. Digits never merge, so that numbers look alike whatever their length.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from dflash.core.files import write_json

PAD, USER, ASSISTANT, END, MASK = SPECIAL_TOKENS = ("<|pad|>", "<|user|>", "<|assistant|>", "<|end|>", "<|mask|>")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|assistant|>' if message['role'] == 'assistant' else '<|user|>' }}{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

# One digit, a word, or a run of signs, each with the space before it; then white space, leaving its last
# space to the word that follows.
_PIECES = r" ?\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn merges from ``texts``. Special tokens take the first ids, in the order of `SPECIAL_TOKENS`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``, which `transformers` and `mlx_lm` load."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "eos_token": END,
        "pad_token": PAD,
        "mask_token": MASK,
        "additional_special_tokens": [USER, ASSISTANT],
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(folder / "tokenizer_config.json", config)


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """Id of a special token. Raises ``ValueError`` if the vocabulary lacks it."""
    number = tokenizer.token_to_id(token)
    if number is None:
        raise ValueError(f"The tokenizer has no token {token!r}.")
    return number


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Token ids of one user message, up to and with the token that asks for the answer."""
    return tokenizer.encode(f"{USER}{prompt}{END}{ASSISTANT}", add_special_tokens=False).ids


def encode_answer(tokenizer: Tokenizer, answer: str) -> list[int]:
    """Token ids of an answer and its end."""
    return tokenizer.encode(answer + END, add_special_tokens=False).ids
