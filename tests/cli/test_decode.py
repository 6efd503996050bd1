"""``dflash generate`` and ``dflash demo``: clean stdout, the JSON keys, one-line errors, exit codes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.cli import assert_one_error, invoke
from support.models import byte_tokenizer, writer

from dflash import evaluation as bench
from dflash.cli import loading
from dflash.training.toy.tasks import samples

GENERATE_KEYS = {
    *("text", "tokens", "prompt_tokens", "generation_tokens", "accepted", "acceptance_length", "prompt_tps"),
    *("generation_tps", "peak_memory", "finish_reason", "committed", "drafted"),
}

# --- generate -----------------------------------------------------------------------------------------


def test_json_has_the_documented_keys_and_adds_up(pair):
    result = invoke("generate", "Hi", *pair, "--max-tokens", "30", "--json")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert set(answer) == GENERATE_KEYS
    assert sum(answer["committed"]) + 1 == answer["generation_tokens"] == len(answer["tokens"]) <= 30
    assert answer["acceptance_length"] == pytest.approx((len(answer["tokens"]) - 1) / len(answer["drafted"]))
    assert all(0 <= a <= d < 8 for a, d in zip(answer["accepted"], answer["drafted"], strict=True))
    assert answer["finish_reason"] in ("stop", "length")
    assert answer["prompt_tokens"] > 2  # the chat template is there


def test_stdout_holds_the_text_and_stderr_one_line_on_speed(pair):
    text = json.loads(invoke("generate", "Hi", *pair, "--max-tokens", "30", "--json").stdout)["text"]
    result = invoke("generate", "Hi", *pair, "--max-tokens", "30")
    assert result.stdout_bytes.decode() == text + "\n"
    assert re.fullmatch(
        r"30 tokens, [\d.]+ tokens/s, acceptance length [\d.]+, \d+ blocks; "
        r"prompt \d+ tokens, [\d.]+ tokens/s; peak memory [\d.]+ GB\n",
        result.stderr,
    )
    assert invoke("generate", "Hi", *pair, "--max-tokens", "1").stderr == "1 token, too few to time\n"
    answer = json.loads(invoke("generate", "Hi", *pair, "--max-tokens", "0", "--json").stdout)
    assert (answer["text"], answer["tokens"], answer["acceptance_length"]) == ("", [], None)


def test_an_answer_that_the_context_ended_says_so_unless_its_end_was_asked_for(pair):
    prompt, asked = "long " * 98, ("--max-tokens", "22")
    note = "The answer ends here because the context of 512 tokens is full."
    assert invoke("generate", prompt, "--raw", *pair).stderr.splitlines()[1:] == [note]
    assert invoke("generate", prompt, "--raw", *pair, *asked).stderr.splitlines()[1:] == []


def test_a_dash_reads_the_prompt_and_raw_takes_it_as_it_is(pair):
    def answer(*options: str) -> dict:
        shown = invoke("generate", *options, *pair, "--max-tokens", "9", "--json", stdin="Hi\n")
        return json.loads(shown.stdout)

    assert answer("-", "--raw")["prompt_tokens"] == len(byte_tokenizer().encode("Hi\n"))
    assert answer("-")["tokens"] == answer("Hi")["tokens"]


def test_an_argument_that_is_not_utf8_or_a_prompt_that_is_empty_is_one_line(pair):
    latin1 = b"caf\xe9".decode("utf-8", "surrogateescape")  # as Python hands over such an argument
    for command in ("generate", "demo"):
        assert_one_error(invoke(command, latin1, *pair), "The prompt is not UTF-8 text .character 4.")
        for prompt in ("", "  ", "-"):
            assert_one_error(invoke(command, prompt, *pair, stdin=""), "The prompt is empty; expected text")
    assert_one_error(invoke("generate", "Hi", *pair, "--stop", latin1), "--stop is not UTF-8 text")


def test_a_character_that_the_output_lacks_is_shown_by_its_code(monkeypatch):
    """In a process of its own: the encoding of stdout is chosen as Python starts."""
    program = (
        "import sys; from dflash.cli import loading, main; from support.models import writer;"
        "loading.load_decoder = lambda *_: writer('caf\\u00e9 \\U0001f642');"
        "sys.argv[1:] = ['generate', 'AB', '--raw']; main()"
    )
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONPATH": str(Path(__file__).parents[1])}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=False)
    assert run.returncode == 0, run.stderr.decode()
    assert run.stdout == b"caf\\xe9 \\U0001f642\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--max-tokens", "600"], "600 exceeds the limit of 512"),
        (["--temp", "1", "--top-k", "1000000"], "top_k must be less than the target's vocabulary"),
        (["--logit-bias", '{"9999": 1}'], "logit_bias names token 9999"),
    ],
)
def test_bad_requests_are_one_line_and_exit_1(pair, args, message):
    assert_one_error(invoke("generate", "Hi", *pair, *args), message)


# --- demo ---------------------------------------------------------------------------------------------


def demo_with(monkeypatch, tmp_path, answer: str, sample, *args: str):
    """Run the demo with a target that writes ``answer`` and one held-out request."""
    file = tmp_path / "heldout.jsonl"
    file.write_text(json.dumps({"prompt": sample.prompt, "check": sample.check}) + "\n")
    monkeypatch.setattr(bench, "HELDOUT", file)
    prompt = writer("").loaded_target.build_prompt(args[0] if args else sample.prompt)
    monkeypatch.setattr(loading, "load_decoder", lambda *_, **__: writer(answer, prompt, p=0.9))
    return invoke("demo", *args)


def long_function():
    """Long enough for the demo, and short enough for its limit, with a token a byte."""
    found = samples(0, 200, "heldout")
    return next(s for s in found if s.kind == "function" and 150 < len(s.answer) < 450)


def test_the_demo_shows_both_answers_and_exits_1_where_one_fails_its_check(monkeypatch, tmp_path):
    sample = long_function()
    result = demo_with(monkeypatch, tmp_path, sample.answer, sample)
    assert result.exit_code == 0, result.output
    assert result.stdout.count(sample.answer) == 2
    for expected in (sample.prompt, "plain mlx_lm", "DFlash", "ratio", "identical", "passes its check"):
        assert expected in result.stdout
    result = demo_with(monkeypatch, tmp_path, "def f(x):\n    " + 80 * "# " + "\n    return None\n", sample)
    assert result.exit_code == 1
    assert "FAILS its check" in result.stdout


def test_the_demo_takes_a_request_of_ones_own_or_one_that_suits(monkeypatch, tmp_path):
    own = demo_with(monkeypatch, tmp_path, "Hello there", long_function(), "Greet me")
    assert own.exit_code == 0, own.output
    assert "identical" in own.stdout
    assert "check" not in own.stdout
    for unfit in ("def f(): short", "No function. " * 20):
        assert_one_error(demo_with(monkeypatch, tmp_path, unfit, long_function()), "No request is answered")


# --- prompt caches ------------------------------------------------------------------------------------


def test_a_cached_prompt_is_continued_within_its_message(pair, tmp_path):
    file = tmp_path / "cache.safetensors"
    kept = invoke("cache-prompt", "Read this: abc. ", *pair, "--prompt-cache-file", file)
    assert kept.exit_code == 0, kept.output
    assert re.match(rf"{re.escape(str(file))}: \d+ tokens, ", kept.stdout)
    options = [*pair, "--max-tokens", "12", "--json"]
    whole = json.loads(invoke("generate", "Read this: abc. What?", *options).stdout)
    ours = json.loads(invoke("generate", "What?", *options, "--prompt-cache-file", file).stdout)
    assert (ours["tokens"], ours["prompt_tokens"]) == (whole["tokens"], whole["prompt_tokens"])
    raw = [*options, "--raw"]
    invoke("cache-prompt", "Read", *pair, "--raw", "--prompt-cache-file", file)
    ours = json.loads(invoke("generate", " this", *raw, "--prompt-cache-file", file).stdout)
    assert ours["tokens"] == json.loads(invoke("generate", "Read this", *raw).stdout)["tokens"]
    assert_one_error(invoke("generate", "a", *pair, "--prompt-cache-file", tmp_path / "no"), "no is no prompt cache")
    assert_one_error(
        invoke("generate", "a", *pair, "--prompt-cache-file", file, "--system", "s"), "give --system to dflash cache"
    )
    assert_one_error(invoke("cache-prompt", "a", *pair, "--prompt-cache-file", tmp_path / "x.txt"), "safetensors file")
