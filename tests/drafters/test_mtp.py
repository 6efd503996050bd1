"""The target's own multi-token-prediction layer: read in every form, drafts as in NumPy, text as without it."""

import json

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from support.cli import invoke
from support.errors import refused
from support.models import TEXT_VOCAB, byte_tokenizer, plain_greedy, qwen3_model, randomize, save_target
from support.reference import Layer, attend, rms_norm, rope, sigmoid

from dflash import DFlashError, DFlashSpeculativeDecoder, LoadedTargetModel, load_drafter, load_target
from dflash.adapters.conformance import small_models
from dflash.core.files import flat
from dflash.decoding.sampling import DrawingSampler
from dflash.drafters.mtp import MTPDrafter, new_mtp_layer

HEADS, KV_HEADS, HEAD_DIM, EPS = 4, 2, 16, 1e-5
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def small(kind: str = "qwen3_5", seed: int = 0, vocab: int = TEXT_VOCAB):
    """A hybrid target with untied head whose best tokens lead clearly."""
    dense = {} if kind.endswith("moe") else {"num_experts": 0}
    mx.random.seed(seed)  # mlx-lm draws the decay of recurrent layers
    return small_models.build(kind, seed, vocab_size=vocab, **dense)


def mtp_weights(model, seed: int = 3) -> dict[str, mx.array]:
    """Of a random layer, in mlx-lm's form."""
    layer = randomize(new_mtp_layer(LoadedTargetModel(model)), seed, scale=2.0)
    return {f"mtp.{name}": w for name, w in flat(layer.parameters()).items()}


def text_config(model) -> dict:
    args = getattr(model, "language_model", model).args
    return {k: v for k, v in vars(args).items() if v is not None}


def write(folder, model, mtp: dict, published: bool = False):
    """The target's files with the layer: as mlx-lm would keep it, or as published, norms less 1 and other axes."""
    folder.mkdir(parents=True)
    config = {"model_type": model.model_type, "text_config": text_config(model), "eos_token_id": TEXT_VOCAB - 4}
    (folder / "config.json").write_text(json.dumps(config))
    weights = dict(tree_flatten(model.parameters())) | mtp
    if published:
        norms = ("layernorm.weight", "model.norm.weight", "q_norm.weight", "k_norm.weight")
        for name, w in weights.items():
            if name.endswith("conv1d.weight"):
                weights[name] = w.moveaxis(2, 1)
            elif (name.startswith("mtp") and "norm" in name) or name.endswith(norms):
                weights[name] = w - 1
        weights = {name.replace("language_model.model", "model.language_model"): w for name, w in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), {n: mx.contiguous(w) for n, w in weights.items()})
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A target with its layer as published and as converted, and the layer's weights."""
    model, folder = small(), tmp_path_factory.mktemp("mtp")
    mtp = mtp_weights(model)
    write(folder / "published", model, mtp, published=True)
    return write(folder / "converted", model, mtp), folder / "published", mtp


class DenseMTP(Layer):
    """The layer from its formulas: float64, everything computed again for each draft."""

    def __init__(self, weights: dict[str, mx.array], target: LoadedTargetModel):
        args = text_config(target.model)
        self.dims = int(HEAD_DIM * args["partial_rotary_factor"])
        shape = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": self.dims}
        weights = {name.removeprefix("mtp."): np.array(w, np.float64) for name, w in weights.items()}
        super().__init__(weights, "layers.0", shape | {"rms_norm_eps": EPS, "rope_theta": args["rope_theta"]})
        self.table = np.array(target.embed(mx.arange(TEXT_VOCAB)), np.float64)
        self.head = np.array(target.adapter.language_model.lm_head.weight, np.float64)

    def outer_norm(self, name: str, x: np.ndarray) -> np.ndarray:
        return rms_norm(x, self.weights[f"{name}.weight"], EPS)

    def turned(self, name: str, x_HLD: np.ndarray) -> np.ndarray:
        x_HLD = self.normed(f"self_attn.{name}", x_HLD)
        first = rope(x_HLD[..., : self.dims], np.arange(x_HLD.shape[1]), self.inverse)
        return np.concatenate([first, x_HLD[..., self.dims :]], axis=-1)

    def __call__(self, tokens: list[int], hidden: np.ndarray) -> np.ndarray:
        """Hidden states of rows that pair ``tokens`` with ``hidden``."""
        both = [
            self.outer_norm("pre_fc_norm_embedding", self.table[tokens]), self.outer_norm("pre_fc_norm_hidden", hidden)
        ]  # fmt: skip
        x = np.concatenate(both, axis=-1) @ self.weights["fc.weight"].T
        u = self.normed("input_layernorm", x)
        q, gate = np.split(self.project("q_proj", u, HEADS), 2, axis=-1)
        k, v = self.turned("k_norm", self.project("k_proj", u, KV_HEADS)), self.project("v_proj", u, KV_HEADS)
        k, v = (np.repeat(y, HEADS // KV_HEADS, axis=0) for y in (k, v))
        out = attend(self.turned("q_norm", q), k, v, np.tri(len(x), dtype=bool)) * sigmoid(gate)
        x = x + self.linear("self_attn.o_proj", np.concatenate(list(out), axis=-1))
        return self.outer_norm("norm", x + self.mlp(self.normed("post_attention_layernorm", x)))

    def logits(self, tokens: list[int], hidden: np.ndarray, anchor: int, drafts: list[int]) -> np.ndarray:
        """Logits of the drafts after ``anchor``, each from the drafts before it."""
        rows, states, logits = [*tokens[1:], anchor], hidden, []
        for draft in drafts:
            y = self(rows, states)[-1]
            logits.append(self.head @ y)
            rows, states = [*rows, draft], np.concatenate([states, y[None]])
        return np.stack(logits)


@pytest.mark.parametrize("form", [0, 1], ids=["converted", "published"])
def test_drafts_follow_the_formulas_however_the_context_arrives(files, form):
    target, drafter = load_target(files[form]), load_drafter("mtp")
    drafter.bind(target)
    dense, sampler = DenseMTP(files[2], target), DrawingSampler(3.0)
    text = np.random.default_rng(0).integers(0, TEXT_VOCAB, 24).tolist()
    hidden, _ = target.forward_hidden(mx.array([text]), None, ())
    hidden = np.array(hidden[0], np.float64)
    caches, cache, start = target.make_cache(), drafter.make_cache(), 0
    for size in (1, 2, 7, 3, 1, 9):
        piece = mx.array([text[start : start + size]])
        _, features = target.forward_with_hidden_states(piece, caches, drafter.target_layer_ids)
        drafter.extend_context(features, cache, piece)
        start += size
        assert cache.offset == start
        greedy = drafter.propose(mx.array([[7]]), 3, cache)
        sampled = drafter.draw(mx.array([[7]]), 3, cache, sampler)
        for proposal in (greedy, sampled):
            expected = dense.logits(text[:start], hidden[:start], 7, proposal.tokens[0].tolist())
            np.testing.assert_allclose(np.array(proposal.logits[0]), expected, atol=2e-3, rtol=1e-3)
        assert greedy.tokens.tolist() == mx.argmax(greedy.logits, axis=-1).tolist()
        np.testing.assert_array_equal(np.array(sampled.log_q[0]), np.array(sampler.log_distribution(sampled.logits[0])))


def test_the_text_is_that_of_plain_decoding_where_drafts_are_right_by_accident(tmp_path):
    model, prompt = small(vocab=4), [3, 1, 2, 0, 1]
    target = load_target(write(tmp_path / "target", model, mtp_weights(model)))
    expected, lead = plain_greedy(target.model, prompt, 40)
    assert lead > 1e-4
    decoder, steps = DFlashSpeculativeDecoder(target, MTPDrafter()), []
    text = decoder.spec_generate(prompt, 40, stop_token_ids=[], stream_callback=steps.append).tolist()
    assert text == [[*prompt, *expected]]
    assert {1, 2, 3} <= {len(step) for step in steps[1:]}, "always right or always wrong; the comparison means nothing"
    sampled = decoder.spec_generate(prompt, 20, 1.0, stop_token_ids=[], seed=4, verify="speculative_sampling")
    assert sampled.shape == (1, 25)


@pytest.mark.parametrize("form", ["one by one", "joined"])
def test_experts_are_read_as_published(tmp_path, form):
    model = small("qwen3_5_moe")
    mtp = mtp_weights(model)
    one, published = "mtp.layers.0.mlp.switch_mlp.", "mtp.layers.0.mlp.experts."
    experts = {part: mtp.pop(f"{one}{part}_proj.weight") for part in ("gate", "up", "down")}
    if form == "joined":
        stored = {
            "gate_up_proj": mx.concatenate([experts["gate"], experts["up"]], axis=1),
            "down_proj": experts["down"],
        }
        stored = {published + name: w for name, w in stored.items()}
    else:
        stored = {f"{published}{i}.{part}_proj.weight": w[i] for part, w in experts.items() for i in range(len(w))}
    target = load_target(write(tmp_path / "target", model, mtp | stored, published=True))
    drafter = MTPDrafter()
    drafter.bind(target)
    read = flat(drafter.layer.parameters())
    for part, w in experts.items():
        assert mx.array_equal(read[f"layers.0.mlp.switch_mlp.{part}_proj.weight"], w).item()
    expected, _ = plain_greedy(target.model, PROMPT, 12)
    decoder = DFlashSpeculativeDecoder(target, drafter)
    assert decoder.spec_generate(PROMPT, 12, stop_token_ids=[]).tolist() == [[*PROMPT, *expected]]


def test_a_quantised_layer_is_read(tmp_path, files):
    mtp = dict(files[2])
    for name in [n for n, w in mtp.items() if w.ndim == 2]:
        parts = mx.quantize(mtp[name], group_size=32, bits=8)
        names = (name, name.replace(".weight", ".scales"), name.replace(".weight", ".biases"))
        mtp |= dict(zip(names, parts, strict=True))
    folder = write(tmp_path / "target", small(), mtp)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"quantization": {"group_size": 32, "bits": 8}}))
    drafter = MTPDrafter()
    drafter.bind(load_target(folder))
    assert flat(drafter.layer.parameters())["fc.weight"].dtype == mx.uint32


def test_the_command_line_drafts_with_it(files):
    command = ["generate", "ab", "--target", files[1], "--max-tokens", "8", "--raw", "--json", "--policy", "full"]
    with_mtp, with_ngram = (invoke(*command, "--drafter", name) for name in ("mtp", "ngram"))
    assert with_mtp.exit_code == 0, with_mtp.stderr
    assert json.loads(with_mtp.stdout)["text"] == json.loads(with_ngram.stdout)["text"]


def test_what_has_no_such_layer_is_refused(tmp_path, files):
    unloaded = LoadedTargetModel(small())
    without = load_target(write(tmp_path / "without", small(), {}))
    more = load_target(
        write(tmp_path / "more", small(), dict(files[2]) | {"mtp.layers.1.mlp.up_proj.weight": mx.ones(3)})
    )
    other = load_target(save_target(qwen3_model(0, TEXT_VOCAB), tmp_path / "other"))
    mx.save_safetensors(str(tmp_path / "other" / "mtp.safetensors"), dict(files[2]))
    for target, words in (
        (unloaded, ["load the target by its folder"]),
        (without, ["holds no mtp.* tensors"]),
        (more, ["layers.1.mlp.up_proj.weight"]),
        (other, ["Qwen3-Next and Qwen3.5"]),
    ):
        with pytest.raises(DFlashError) as error:
            MTPDrafter().bind(target)
        refused(error, *words)
