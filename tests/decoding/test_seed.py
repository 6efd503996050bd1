"""The same seed, the same text as plain mlx_lm, whatever is drafted and however many drafts a block verifies."""

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from support.models import ScriptedDrafter, qwen3_model, target

from dflash import DFlashSpeculativeDecoder, LoadedTargetModel, Policy
from dflash.adapters.conformance import small_models as small
from dflash.decoding import verify

PROMPT, COUNT, SEED, TEMP = [3, 1, 4, 1, 5], 36, 2**40 + 7, 0.8


def plain(loaded: LoadedTargetModel, seed: int = SEED, processors: list | None = None, cache=None, **options):
    """Tokens of ``mlx_lm`` with its own sampler."""
    mx.random.seed(seed)
    steps = generate_step(
        mx.array(PROMPT),
        loaded.model,
        max_tokens=COUNT,
        sampler=make_sampler(TEMP, **options),
        logits_processors=processors,
        prompt_cache=cache,
    )
    return [int(token) for token, _ in steps]


def drafted(loaded: LoadedTargetModel, text: list[int], p: float = 0.8, **options) -> list[int]:
    """Tokens of DFlash, whose drafter knows ``text`` and is right with probability ``p``."""
    decoder = DFlashSpeculativeDecoder(loaded, ScriptedDrafter(PROMPT + text, loaded.vocab_size, p))
    ids = decoder.spec_generate(PROMPT, COUNT, **({"temperature": TEMP, "seed": SEED, "stop_token_ids": []} | options))
    return ids.tolist()[0][len(PROMPT) :]


class Pausing(Policy):
    """Three plain steps after every block, and another number of verified drafts each time."""

    def __init__(self):
        self.blocks, self.asleep = 0, 0

    def sleep(self) -> int:
        return self.asleep

    def verify_length(self, drafts) -> int:
        return (5 * self.blocks) % (drafts.count + 1)

    def observe(self, block) -> None:
        self.asleep = self.asleep - 1 if block.asleep else 3
        self.blocks += not block.asleep


@pytest.fixture(params=[False, True], ids=["all rows drawn", "only those reached"])
def draws(request, monkeypatch) -> None:
    """Both ways to draw: that of a GPU and that of a CPU."""
    monkeypatch.setattr(verify, "on_cpu", lambda: request.param)


POLICIES = {"full": "full", "none": 0, "adaptive": "adaptive", "pausing": Pausing()}


@pytest.mark.usefixtures("draws")
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_seed_gives_mlx_lms_text_under_every_policy(policy):
    loaded = target("llama", 2)
    text = plain(loaded)
    assert text != plain(loaded, SEED + 1)
    for p in (0.8, 1.0):
        assert drafted(loaded, text, p, policy=policy) == text


QUANTISED = {"kv_bits": 8, "kv_group_size": 32}
CACHES = {
    **{kind: (lambda kind=kind: target(kind, 3), {}) for kind in ("qwen3", "sliding")},
    **{
        kind: (lambda kind=kind: LoadedTargetModel(small.build(kind)), {})
        for kind in ("gemma3_text", "lfm2", "mamba2", "qwen3_5")
    },
    "bounded": (lambda: LoadedTargetModel(qwen3_model(2, head_dim=32)), {"max_kv_size": 24}),
    "quantised": (lambda: LoadedTargetModel(qwen3_model(2, head_dim=32)), QUANTISED),
}


@pytest.mark.parametrize("name", CACHES)
def test_a_seed_gives_mlx_lms_text_with_every_kind_of_cache(name):
    build, limits = CACHES[name]
    loaded = build()
    cache = make_prompt_cache(loaded.model, limits.get("max_kv_size"))
    if limits == QUANTISED:
        cache = [layer.to_quantized(group_size=32, bits=8) for layer in cache]
    text = plain(loaded, cache=cache)
    assert drafted(loaded, text, policy=Pausing(), **limits) == text


FILTERS = [{"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 4}, {"top_p": 0.9, "min_p": 0.02, "top_k": 6}]
PROCESSORS = [
    {"repetition_penalty": 1.4},
    {"presence_penalty": 1.0},
    {"frequency_penalty": 0.5},
    {"logit_bias": {3: 4.0, 7: -20.0}},
]
XTC = {"xtc_probability": 0.5, "xtc_threshold": 0.05}
KEEPING = {"min_p": 0.95, "min_tokens_to_keep": 5}
OPTIONS = {
    **{"+".join(options): (options, options) for options in FILTERS},
    **{name: ({"processors": make_logits_processors(**each)}, each) for each in PROCESSORS for name in each},
    "XTC": (XTC | {"top_k": 9}, XTC | {"top_k": 9}),
    "min_tokens_to_keep": (KEEPING, KEEPING),
    "sampler of one's own": (XTC, {"temperature": None, "sampler": make_sampler(TEMP, **XTC)}),
}
"""By name, what plain mlx_lm and what DFlash is given. XTC draws twice a token, and only where it is in doubt."""


@pytest.mark.usefixtures("draws")
@pytest.mark.parametrize("name", OPTIONS)
def test_a_seed_gives_mlx_lms_text_with_every_filter_processor_and_sampler(name):
    loaded = target("llama", 2)
    theirs, ours = OPTIONS[name]
    text = plain(loaded, **theirs)
    assert text != plain(loaded)
    assert drafted(loaded, text, policy=Pausing(), **ours) == text


@pytest.mark.usefixtures("draws")
def test_a_text_that_ends_within_a_block_leaves_the_random_state_of_its_last_token():
    loaded = target("llama", 2)
    text = plain(loaded)
    stop = text[9]
    length = text.index(stop) + 1
    mx.random.seed(SEED)
    for _ in range(length):
        mx.random.uniform()
    expected = mx.random.state[0].tolist()
    for policy in ("full", 0, Pausing()):
        got = drafted(loaded, text, 1.0, stop_token_ids=[stop], policy=policy)
        assert got == text[:length]
        assert mx.random.state[0].tolist() == expected
