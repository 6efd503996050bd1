"""The tokenizer of a GGUF file, written as files that ``transformers`` and mlx-lm load."""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from ..core.errors import CheckpointError
from ..core.files import atomic_write, write_json
from .gguf import GGUF

_CONTROL, _USER_DEFINED = 3, 4  # in tokenizer.ggml.token_type

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _split(digits: str) -> Any:
    """The pattern of LLaMA 3 and Qwen, which differ in the digits per piece."""
    pattern = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}|{_OTHERS}"
    return pre_tokenizers.Split(Regex(pattern), "isolated")


_GPT2: tuple[Any, ...] = (pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),)
_DIGITS: tuple[Any, ...] = (pre_tokenizers.Digits(individual_digits=True), *_GPT2)
_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
_LLAMA3: tuple[Any, ...] = (_split(r"\p{N}{1,3}"), _BYTES)
_QWEN2: tuple[Any, ...] = (_split(r"\p{N}"), _BYTES)

PRE_TOKENIZERS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("default", "gpt-2", "gpt2", "phi-2", "roberta-bpe"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
}
"""How text is split before merging, by llama.cpp's name (``tokenizer.ggml.pre``)."""


def build_tokenizer(gguf: GGUF) -> Tokenizer:
    """The tokenizer that a GGUF file describes.

    Raises ``CheckpointError`` for other kinds than byte-level BPE and unknown ways to split.
    """
    kind, pre = gguf.require("tokenizer.ggml.model", str), gguf.metadata.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2":
        raise CheckpointError(
            f"{gguf.path} has a tokenizer of kind {kind!r}; expected 'gpt2', a byte-level BPE, as LLaMA 3, Qwen and "
            "SmolLM have. Take this model's weights from the hub instead."
        )
    if pre not in PRE_TOKENIZERS:
        raise CheckpointError(
            f"{gguf.path} splits texts as {pre!r} does, which is not known here; known are "
            f"{', '.join(PRE_TOKENIZERS)}. Take this model's weights from the hub instead."
        )
    names = gguf.require("tokenizer.ggml.tokens", list)
    merges = [tuple(merge.split(" ", 1)) for merge in gguf.require("tokenizer.ggml.merges", list)]
    vocabulary = {name: number for number, name in enumerate(names)}
    steps = PRE_TOKENIZERS[pre]
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=steps is _LLAMA3))
    except Exception as error:  # `tokenizers` raises bare exceptions
        raise CheckpointError(f"{gguf.path} has a damaged tokenizer: {error}; download it again.") from error
    if steps is _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(steps))
    tokenizer.decoder = decoders.ByteLevel()
    types = gguf.metadata.get("tokenizer.ggml.token_type") or [1] * len(names)
    tokenizer.add_tokens(
        [
            AddedToken(name, normalized=False, special=of == _CONTROL)
            for name, of in zip(names, types, strict=True)
            if of in (_CONTROL, _USER_DEFINED)
        ]
    )
    bos = gguf.metadata.get("tokenizer.ggml.bos_token_id")
    if bos is not None and gguf.metadata.get("tokenizer.ggml.add_bos_token", steps is _LLAMA3):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{names[bos]} $A", pair=f"{names[bos]} $A $B", special_tokens=[(names[bos], bos)]
        )
    return tokenizer


def save_tokenizer(gguf: GGUF, folder: Path, max_length: int) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` with the chat template, if the file has one."""
    tokenizer = build_tokenizer(gguf)
    names = gguf.require("tokenizer.ggml.tokens", list)
    roles = {"bos": "bos", "eos": "eos", "padding": "pad", "unknown": "unk"}
    numbers = {of: gguf.metadata.get(f"tokenizer.ggml.{role}_token_id") for role, of in roles.items()}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        **{f"{of}_token": names[number] for of, number in numbers.items() if number is not None},
    }
    if template := gguf.metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    text = tokenizer.to_str(pretty=True)  # its own `save` reports a full disk by a bare exception
    atomic_write(folder / "tokenizer.json", lambda file: file.write_text(text, encoding="utf-8"))
    write_json(folder / "tokenizer_config.json", config)
