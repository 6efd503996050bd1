"""The toy tokenizer round-trips any text and is one that mlx-lm loads."""

from hypothesis import given, settings
from hypothesis import strategies as st

import dflash  # noqa: F401  (loads a fast BLAS before MLX)
from dflash.training.toy.tokenizer import encode_answer, save_tokenizer, train_tokenizer

TOKENIZER = train_tokenizer(["def f(x):\n    return [x, 12, 345]\n", "How many? Answer: 27", "  naïve — 東京\t!"], 300)


@given(st.text(max_size=40).filter(lambda text: "<|" not in text))
@settings(max_examples=50)
def test_tokenizer_round_trips_any_text(text):
    assert TOKENIZER.decode(encode_answer(TOKENIZER, text), skip_special_tokens=True) == text


def test_mlx_lm_loads_the_tokenizer(tmp_path):
    from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer
    from mlx_lm.tokenizer_utils import load as load_tokenizer

    save_tokenizer(TOKENIZER, tmp_path, 64)
    tokenizer = load_tokenizer(tmp_path)
    assert isinstance(tokenizer.detokenizer, BPEStreamingDetokenizer)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "x 1"}], add_generation_prompt=True)
    assert tokenizer.decode(ids) == "<|user|>x 1<|end|><|assistant|>"
    assert tokenizer.eos_token_ids == {tokenizer.convert_tokens_to_ids("<|end|>")}
