"""Small targets, drafters and tokenizers for the tests.

Random weights have a wide distribution, so that the best token leads clearly and rounding cannot change it.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.generate import generate_step
from mlx_lm.models import llama, qwen3
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, NaiveStreamingDetokenizer, TokenizerWrapper
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import dflash
from dflash import DFlashConfig, DFlashDraftModel, LoadedTargetModel, Proposal

LAYERS = 4
HIDDEN = 32


def randomize(model: nn.Module, seed: int, scale: float = 1.0) -> nn.Module:
    """Random matrices that keep the scale of activations (times ``scale``); norm weights about 1."""
    weights = []
    for i, (name, w) in enumerate(tree_flatten(model.parameters())):
        noise = mx.random.normal(w.shape, key=mx.random.key(1000 * seed + i))
        if w.ndim == 1:
            weights.append((name, 1 + 0.2 * noise))
        elif "embed_tokens" in name:
            weights.append((name, noise))
        else:
            weights.append((name, noise * scale * w.shape[-1] ** -0.5))
    model.update(tree_unflatten(weights))
    mx.eval(model.parameters())
    return model


def qwen3_model(seed: int, vocab: int = 32, layers: int = LAYERS, tied: bool = True, **changes) -> qwen3.Model:
    """Grouped heads whose size is not ``hidden_size / heads``, as in the published Qwen3 models."""
    args = {
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "num_hidden_layers": layers,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "rms_norm_eps": 1e-6,
        "vocab_size": vocab,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "rope_theta": 10_000.0,
    } | changes
    model = randomize(qwen3.Model(qwen3.ModelArgs(**args)), seed, scale=2.0)
    if not tied:
        model.lm_head.weight = model.lm_head.weight * (HIDDEN**0.5 / 2)
        mx.eval(model.parameters())
    return model


def llama_model(seed: int, vocab: int = 32, window: int | None = None, **changes) -> llama.Model:
    """Untied head; with ``window`` every second layer is sliding and keeps a ``RotatingKVCache``."""
    kinds = ["sliding_attention" if window and i % 2 else "full_attention" for i in range(LAYERS)]
    args = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": vocab,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "layer_types": kinds,
        "sliding_window": window,
    } | changes
    model = randomize(llama.Model(llama.ModelArgs(**args)), seed, scale=2.0)
    model.lm_head.weight = model.lm_head.weight * (HIDDEN**0.5 / 2)
    return model


@lru_cache(maxsize=64)
def target(kind: str, seed: int = 0, vocab: int = 32) -> LoadedTargetModel:
    """A target without tokenizer: ``qwen3`` (odd seeds: tied head), ``llama`` or ``sliding`` (window of 6)."""
    if kind == "qwen3":
        return LoadedTargetModel(qwen3_model(seed, vocab, tied=seed % 2 == 1))
    return LoadedTargetModel(llama_model(seed, vocab, window=6 if kind == "sliding" else None))


def draft_config(vocab: int = 32, **changes) -> DFlashConfig:
    """Fits the targets above; two layers, three features, grouped heads."""
    values = {
        "hidden_size": HIDDEN,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "num_target_layers": LAYERS,
        "vocab_size": vocab,
        "mask_token_id": vocab - 1,
        "block_size": 8,
        "target_layer_ids": (0, 1, 3),
        "max_position_embeddings": 512,
        "rope_theta": 10_000.0,
    } | changes
    return DFlashConfig(**values)


def random_drafter(seed: int, vocab: int = 32, **changes) -> DFlashDraftModel:
    return randomize(DFlashDraftModel(draft_config(vocab, **changes)), seed, scale=2.0)


@lru_cache(maxsize=64)
def bound_drafter(kind: str, seed: int, vocab: int = 32) -> DFlashDraftModel:
    """A real drafter with random weights, bound to ``target(kind, seed)``: rarely right, rarely all wrong."""
    sliding = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 5}
    drafter = random_drafter(seed + 500, vocab, block_size=16, **(sliding if seed % 2 else {}))
    drafter.bind(target(kind, seed, vocab))
    return drafter


@dataclass
class ScriptedCache:
    """Keeps what it is given, so that tests can check that these are the committed tokens only."""

    tokens: list[int] = field(default_factory=list)
    features: list[mx.array] = field(default_factory=list)

    @property
    def offset(self) -> int:
        return len(self.tokens)


class ScriptedDrafter:
    """Drafts the target's plain greedy tokens, each correct with probability ``p``.

    After the end of ``text`` (prompt and continuation) it drafts token 0.
    """

    def __init__(
        self,
        text: Sequence[int],
        vocab: int,
        p: float = 1.0,
        block_size: int = 16,
        layer_ids: tuple[int, ...] = (),
        seed: int = 0,
    ):
        self.text, self.vocab, self.p = list(text), vocab, p
        self.block_size, self.target_layer_ids = block_size, layer_ids
        self.random = random.Random(seed)
        self.bound: LoadedTargetModel | None = None
        self.asked: list[int] = []

    def bind(self, target: LoadedTargetModel) -> None:
        self.bound = target

    def make_cache(self) -> ScriptedCache:
        return ScriptedCache()

    def extend_context(self, features: mx.array, cache: ScriptedCache, tokens: mx.array) -> None:
        assert features.shape[:2] == tokens.shape
        assert (features.shape[2] > 0) == bool(self.target_layer_ids)
        cache.tokens += tokens[0].tolist()
        cache.features.append(features)

    def propose(self, anchor: mx.array, length: int, cache: ScriptedCache) -> Proposal:
        assert anchor.shape == (1, 1)
        assert 1 <= length < self.block_size
        self.asked.append(length)
        planned = (self.text + [0] * length)[cache.offset + 1 :][:length]
        planned += [0] * (length - len(planned))
        drafts = [t if self.random.random() < self.p else self._wrong(t) for t in planned]
        return Proposal(mx.array([drafts]))

    def _wrong(self, token: int) -> int:
        return (token + self.random.randrange(1, self.vocab)) % self.vocab


def plain_greedy(model: nn.Module, prompt: Sequence[int], max_tokens: int, **options: int) -> tuple[list[int], float]:
    """Tokens of plain mlx-lm decoding, and the smallest lead of a best token over the second best."""
    tokens, lead = [], float("inf")
    for token, logprobs in generate_step(mx.array(list(prompt)), model, max_tokens=max_tokens, **options):
        best = mx.sort(logprobs)[-2:].tolist()
        lead = min(lead, best[1] - best[0])
        tokens.append(int(token))
    return tokens, lead


# --- a target that writes a given text, whatever it reads -------------------------------------------------


class _ScriptLayer(nn.Module):
    def __call__(self, x: mx.array, cache) -> mx.array:
        cache.update_and_fetch(x[:, None, :, :4], x[:, None, :, :4])
        return x


class _ScriptBackbone(nn.Module):
    def __init__(self, script: Sequence[int], vocab: int):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, vocab)
        self.embed_tokens.weight = 10 * mx.eye(vocab)
        self.layers = [_ScriptLayer()]
        self.script = mx.array(list(script))

    def __call__(self, tokens: mx.array, cache=None) -> mx.array:
        positions = cache[0].offset + 1 + mx.arange(tokens.shape[1])
        x = self.embed_tokens(self.script[mx.minimum(positions, self.script.size - 1)])[None]
        return self.layers[0](x, cache[0])


class ScriptModel(nn.Module):
    """Token ``i`` of a sequence is ``script[i]``, whatever precedes it; ``script`` includes the prompt."""

    model_type = "qwen3"

    def __init__(self, script: Sequence[int], vocab: int):
        super().__init__()
        self.model = _ScriptBackbone(script, vocab)
        self.args = SimpleNamespace(hidden_size=vocab, vocab_size=vocab, max_position_embeddings=4096)

    @property
    def layers(self) -> list[nn.Module]:
        return self.model.layers

    def __call__(self, tokens: mx.array, cache=None) -> mx.array:
        return self.model.embed_tokens.as_linear(self.model(tokens, cache))


# --- a tokenizer ------------------------------------------------------------------------------------------

STOP, START, MASK = "<|im_end|>", "<|im_start|>", "<|mask|>"
TEXT_VOCAB = 264  # bytes, three merges, three special tokens, two unused rows as in padded models


@lru_cache(maxsize=1)
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, except for three merges, one of which is the first half of every emoji."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("ð", "Ł"), ("a", "b"), ("Ġ", "t")]  # bytes F0 9F; "ab"; " t"
    names = [*alphabet, *(a + b for a, b in merges)]
    core = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([STOP, START, MASK])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=STOP,
        clean_up_tokenization_spaces=False,
        chat_template="{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    )


def wrapped_tokenizer(fast: bool = True) -> TokenizerWrapper:
    """As mlx-lm wraps byte-level tokenizers (``fast``) and all others."""
    return TokenizerWrapper(byte_tokenizer(), BPEStreamingDetokenizer if fast else NaiveStreamingDetokenizer)


def writer(text: str, prompt: Sequence[int] = (65, 66), p: float = 1.0, fast: bool = True, **options):
    """A decoder whose target answers ``prompt`` with ``text`` and the stop token."""
    tokenizer = wrapped_tokenizer(fast)
    script = [*prompt, *tokenizer.encode(text), tokenizer.eos_token_id]
    drafter = ScriptedDrafter(script, TEXT_VOCAB, p)
    return dflash.DFlashSpeculativeDecoder(ScriptModel(script, TEXT_VOCAB), drafter, tokenizer, **options)


# --- checkpoints on disk ----------------------------------------------------------------------------------


def save_target(model: nn.Module, folder: Path, tokenizer: bool = True, dtype: mx.Dtype = mx.bfloat16) -> Path:
    """A folder that ``mlx_lm.load`` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {k: v for k, v in asdict(model.args).items() if v is not None}
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": byte_tokenizer().eos_token_id}))
    weights = {name: w.astype(dtype) for name, w in tree_flatten(model.parameters())}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    if tokenizer:
        byte_tokenizer().save_pretrained(folder)
    return folder
