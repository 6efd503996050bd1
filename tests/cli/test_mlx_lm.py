"""``dflash generate`` for those who know ``mlx_lm.generate``: the same options and text, or what to do instead."""

import io
import json
import shutil
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from support.cli import assert_one_error, invoke
from support.models import TEXT_VOCAB, qwen3_model, random_drafter, save_target

import dflash
from dflash.errors import GenerationError
from dflash.options import ANSWERS, decode_options
from dflash.target.identity import target_fingerprint

MLX_LM = import_module("mlx_lm.generate")
PAGE = Path(dflash.__file__).parent / "docs" / "mlx-lm.md"
LORA = {"rank": 4, "scale": 20.0, "dropout": 0.0, "keys": ["self_attn.q_proj", "mlp.down_proj"]}
PROMPT = r"One\ntwo"
SAMPLED = ["--temp", "1.0", "--seed", "5"]
XTC = ["--xtc-probability", "0.5", "--xtc-threshold", "0.001"]

IN_EVERY_CALL = {"--model", "--prompt", "--max-tokens", "--verbose", "--draft-model"}  # the last to ours alone
WORKS = {
    "--trust-remote-code": ["--trust-remote-code"],
    "--adapter-path": ["--adapter-path", "{adapters}"],
    "--extra-eos-token": ["--extra-eos-token", "{tenth}"],
    "--system-prompt": ["--system-prompt", "Be brief."],
    "--prefill-response": ["--prefill-response", "Yes, "],
    "--temp": ["--temp", "0.2"],
    "--top-p": ["--top-p", "0.5"],
    "--min-p": ["--min-p", "0.7"],
    "--top-k": ["--top-k", "1"],
    "--xtc-probability": XTC,
    "--xtc-threshold": [*XTC[:2], "--xtc-threshold", "0.01"],
    "--min-tokens-to-keep": ["--min-p", "0.9", "--min-tokens-to-keep", "4"],
    "--seed": ["--seed", "6"],
    "--ignore-chat-template": ["--ignore-chat-template"],
    "--chat-template-config": ["--chat-template-config", '{{"loud": true}}'],
    "--max-kv-size": ["--max-kv-size", "20"],
    "--prefill-step-size": ["--prefill-step-size", "3"],
    "--prompt-cache-file": ["--prompt-cache-file", "{cache}"],
    "--kv-bits": ["--kv-bits", "2", "--quantized-kv-start", "0"],
    "--kv-group-size": ["--kv-bits", "2", "--quantized-kv-start", "0", "--kv-group-size", "32"],
    "--quantized-kv-start": ["--kv-bits", "2", "--quantized-kv-start", "40", "--kv-group-size", "32"],
}
SAME_TEXT = {"--trust-remote-code", "--prefill-step-size"}  # as without the option
ANSWERED = {
    "--image": ["a.png"],
    "--num-draft-tokens": ["3"],
    "--quantize-activations": [],
    "--use-default-chat-template": [],
}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, str]:
    """A target in float32 with a switch in its template, adapters for it, and a cached prompt."""
    folder = tmp_path_factory.mktemp("files")
    model = qwen3_model(1, vocab=TEXT_VOCAB, head_dim=64)
    save_target(model, folder / "target", dtype=mx.float32)
    template = folder / "target" / "chat_template.jinja"
    template.write_text(template.read_text() + "{% if loud %}LOUD{% endif %}")
    dflash.save_drafter(random_drafter(3, TEXT_VOCAB), folder / "drafter")
    save_adapters(model, folder / "adapters")
    names = {name: str(folder / name) for name in ("target", "drafter", "adapters", "cache.safetensors")}
    names["cache"] = names.pop("cache.safetensors")
    kept = invoke("cache-prompt", "--model", names["target"], "-p", "Read: ", "--draft-model", names["drafter"],
                  "--prompt-cache-file", names["cache"])  # fmt: skip
    assert kept.exit_code == 0, kept.output
    asked = ["--model", names["target"], "--prompt", PROMPT, *SAMPLED, "--json", "--draft-model", names["drafter"]]
    names["tenth"] = str(json.loads(invoke("generate", *asked, "-m", "10").stdout)["tokens"][9])
    return names


def save_adapters(model: nn.Module, folder: Path) -> None:
    """Random adapters of ``model``, which gets them too, as ``mlx_lm.lora`` writes them."""
    linear_to_lora_layers(model, 1, LORA)
    tensors = {
        name: w for name, w in tree_flatten(model.parameters()) if name.rsplit(".", 1)[-1] in ("lora_a", "lora_b")
    }
    tensors = {name: mx.random.normal(w.shape, key=mx.random.key(i)) for i, (name, w) in enumerate(tensors.items())}
    folder.mkdir()
    mx.save_safetensors(str(folder / "adapters.safetensors"), tensors)
    about = {"fine_tune_type": "lora", "num_layers": 1, "lora_parameters": LORA}
    (folder / "adapter_config.json").write_text(json.dumps(about))


def theirs(monkeypatch, capsys, *args: str) -> str:
    """What ``mlx_lm.generate ARGS`` prints."""
    monkeypatch.setattr("sys.argv", ["mlx_lm.generate", *args])
    capsys.readouterr()
    MLX_LM.main()
    return capsys.readouterr().out


def ours(files: dict[str, str], *args: str) -> str:
    """What ``dflash generate ARGS`` prints, with a drafter that is rarely right."""
    result = invoke("generate", "--draft-model", files["drafter"], *args)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return result.stdout_bytes.decode()


def arguments(files: dict[str, str], *options: str) -> list[str]:
    """What both commands are given; options may stand for files."""
    common = ["--model", files["target"], "--prompt", PROMPT, "--max-tokens", "16", "--verbose", "F"]
    return [*common, *SAMPLED, *(option.format(**files) for option in options)]


def known_to_mlx_lm() -> dict[str, list[str]]:
    """The long name of each option of ``mlx_lm.generate``, and all of its names."""
    actions = MLX_LM.setup_arg_parser()._actions
    return {a.option_strings[0]: a.option_strings for a in actions if "--help" not in a.option_strings}


def test_every_option_of_mlx_lm_works_or_is_answered_and_is_on_the_page():
    known = set(known_to_mlx_lm())
    assert known == {*IN_EVERY_CALL, *WORKS, *ANSWERED}
    page = PAGE.read_text()
    assert [name for name in sorted(known) if f"`{name}`" not in page] == []


@pytest.fixture(scope="module")
def answer(files) -> Callable[..., str]:
    """The text of ``dflash generate`` with options, made once."""
    return cache(lambda *options: ours(files, *arguments(files, *options)))


@pytest.mark.parametrize("name", WORKS)
def test_an_option_that_works_gives_mlx_lms_text_with_its_seed(name, files, answer, monkeypatch, capsys):
    options = WORKS[name]
    assert answer(*options) == theirs(monkeypatch, capsys, *arguments(files, *options))
    without = answer(*options[: options.index(name)])
    assert (answer(*options) == without) is (name in SAME_TEXT)


@pytest.mark.parametrize("name", ANSWERED)
def test_an_option_that_does_not_work_is_answered_in_one_line(name, files):
    result = invoke("generate", "Hi", "--model", files["target"], name, *ANSWERED[name])
    assert_one_error(result, f"{name} is not here: {ANSWERS[name[2:].replace('-', '_')][:20]}", code=2)


def test_short_names_standard_input_and_the_line_on_speed(files, monkeypatch, capsys):
    args = ["--model", files["target"], "-m", "20", *SAMPLED]
    result = invoke("generate", "--draft-model", files["drafter"], "-p", "-", *args, stdin="Hi \n")
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi \n"))
    assert result.stdout_bytes.decode() == theirs(monkeypatch, capsys, "-p", "-", "--verbose", "F", *args)
    assert result.stderr.startswith("20 tokens, ")
    for given in ([], ["Hi", "--prompt", "Ho"]):
        assert invoke("generate", *given).exit_code == 2


def test_a_begun_answer_follows_a_cached_prompt(files):
    """The answer begins with the words of the prompt, which are looked for in what the template makes."""
    given = ["--model", files["target"], "--draft-model", files["drafter"], "--prefill-response", "Why?", "--json"]
    whole = invoke("generate", "Read: Why?", *given, "-m", "9")
    cached = invoke("generate", "Why?", *given, "-m", "9", "--prompt-cache-file", files["cache"])
    assert json.loads(cached.stdout)["prompt_tokens"] == json.loads(whole.stdout)["prompt_tokens"]
    assert json.loads(cached.stdout)["tokens"] == json.loads(whole.stdout)["tokens"]


# --- adapters -------------------------------------------------------------------------------------------


def test_adapters_make_another_target_for_drafters_and_caches(files, tmp_path, caplog):
    plain, adapted = dflash.load_target(files["target"]), dflash.load_target(files["target"], False, files["adapters"])
    drafter = random_drafter(3, TEXT_VOCAB, target_fingerprint=target_fingerprint(plain))
    dflash.save_drafter(drafter, tmp_path / "drafter")
    assert target_fingerprint(adapted) != target_fingerprint(plain)
    for adapters, warned in ([], False), (["--adapter-path", files["adapters"]], True):
        caplog.clear()
        given = ["-m", "2", "--model", files["target"], "--drafter", tmp_path / "drafter", *adapters]
        shown = invoke("generate", "Hi", *given)
        assert shown.exit_code == 0, shown.output
        assert ("trained for another target" in caplog.text) is warned
    given = ["--model", files["target"], "--drafter", files["drafter"], "--adapter-path", files["adapters"]]
    cached = invoke("generate", "Hi", *given, "--prompt-cache-file", files["cache"])
    assert_one_error(cached, "made for another target")


def test_adapters_of_another_scale_make_another_target(files, tmp_path):
    folder = shutil.copytree(files["adapters"], tmp_path / "adapters")
    about = folder / "adapter_config.json"
    about.write_text(about.read_text().replace('"scale": 20.0', '"scale": 2.0'))
    targets = [dflash.load_target(files["target"], adapter_path=path) for path in (files["adapters"], folder)]
    assert target_fingerprint(targets[0]) != target_fingerprint(targets[1])


def test_a_bundled_drafter_is_said_to_be_made_for_the_plain_target(tmp_path, caplog):
    save_adapters(dflash.load_target("bundled").model, tmp_path / "adapters")
    shown = invoke("generate", "Hi", "--target", "bundled", "--adapter-path", tmp_path / "adapters", "-m", "3")
    assert shown.exit_code == 0, shown.output
    assert "made for the target without adapters" in caplog.text


def test_a_traces_target_names_its_adapters(files, tmp_path):
    trace = tmp_path / "t.jsonl"
    ours(
        files,
        *("Hi", "--model", files["target"], "--adapter-path", files["adapters"], "--trace", str(trace)),
        *("-m", "5", "--verbose", "F"),
    )
    assert json.loads(trace.read_text().splitlines()[0])["adapters"] == files["adapters"]


BAD_ADAPTERS = {
    "no folder": ({}, "adapters/adapter_config.json"),
    "no JSON": ({"adapter_config.json": "{"}, "adapter_config.json"),
    "no weights": ({"adapter_config.json": json.dumps({"num_layers": 1, "lora_parameters": LORA})}, "adapters"),
    "no number of layers": ({"adapter_config.json": json.dumps({"lora_parameters": LORA})}, "num_layers"),
    "no rank": ({"adapter_config.json": json.dumps({"num_layers": 1, "lora_parameters": {"scale": 1}})}, "rank"),
}


@pytest.mark.parametrize("name", BAD_ADAPTERS)
def test_bad_adapters_are_one_line(name, files, tmp_path):
    contents, message = BAD_ADAPTERS[name]
    folder = tmp_path / "adapters"
    if contents:
        folder.mkdir()
    for file, text in contents.items():
        (folder / file).write_text(text)
    assert_one_error(invoke("generate", "Hi", "--model", files["target"], "--adapter-path", folder), message)
    assert_one_error(invoke("generate", "Hi", "--adapter-path", folder), "adapter_path needs the target")


@pytest.mark.parametrize("command", ["prompts", "prepare", "fit", "recipe", "cache-features", "train", "adapt"])
def test_training_says_to_fuse_adapters(command):
    assert_one_error(invoke(command, "--adapter-path", "adapters"), "--adapter-path is not here: .*mlx_lm.fuse", code=2)


def test_an_unknown_end_token_is_one_line(files):
    for token in ("<|nope|>", str(TEXT_VOCAB)):
        result = invoke("generate", "Hi", "--model", files["target"], "--extra-eos-token", token)
        assert_one_error(result, "extra_eos_token .* is no token of this target's tokenizer")


# --- Python ---------------------------------------------------------------------------------------------


def test_python_takes_mlx_lms_names_or_says_ours(files):
    decoder = dflash.DFlashSpeculativeDecoder.from_pretrained(model=files["target"], draft_model=files["drafter"])
    for theirs_, ours_ in (
        ({"temp": 1.0, "seed": 3}, {"temperature": 1.0, "seed": 3}),
        ({"stop": ["&"]}, {"stop_strings": ["&"]}),
    ):
        assert decoder.generate("Hi", 30, **theirs_) == decoder.generate("Hi", 30, **ours_)
    assert decoder.generate("Hi", 30) != decoder.generate("Hi", 30, stop=["&"])
    for name, answer in ANSWERS.items():
        with pytest.raises(GenerationError, match=f"Unknown option '{name}'; {answer[:15]}"):
            decoder.generate("Hi", **{name: 1})
    for names in (["temp", "temperature"], ["temperature", "temp"], ["stop", "stop_strings"]):
        with pytest.raises(GenerationError, match=" and ".join(names) + " are the same option"):
            decode_options(dict.fromkeys(names, 1.0))
    with pytest.raises(GenerationError, match="target and model are the same option"):
        dflash.DFlashSpeculativeDecoder.from_pretrained("x", model="x")
