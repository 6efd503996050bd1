"""The command keeps its promises: clean stdout, the JSON keys, one-line errors, exit codes."""

import json
import re
import subprocess
import sys
from importlib.metadata import version

import pytest
from mlx_lm.models.cache import BatchKVCache, KVCache
from support.cli import assert_one_error, invoke
from support.models import TEXT_VOCAB, byte_tokenizer, qwen3_model, random_drafter, save_target, writer

import dflash
from dflash import backend, bench
from dflash.bench import doctor
from dflash.cli import options as cli_options
from dflash.errors import BackendError
from dflash.training.toy.tasks import samples

GENERATE_KEYS = {
    *("text", "tokens", "prompt_tokens", "generation_tokens", "accepted", "acceptance_length", "prompt_tps"),
    *("generation_tps", "peak_memory", "finish_reason"),
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> list[str]:
    """Options that name a tiny random pair on disk."""
    folder = tmp_path_factory.mktemp("pair")
    save_target(qwen3_model(1, vocab=TEXT_VOCAB), folder / "target")
    dflash.save_drafter(random_drafter(3, TEXT_VOCAB), folder / "drafter")
    return ["--target", str(folder / "target"), "--drafter", str(folder / "drafter")]


@pytest.fixture
def prompts(tmp_path) -> str:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "Hi"}\n{"prompt": "Count"}\n')
    return str(file)


# --- generate -----------------------------------------------------------------------------------------


def test_json_has_the_documented_keys_and_adds_up(pair):
    result = invoke("generate", "Hi", *pair, "--max-tokens", "30", "--json")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert set(answer) == GENERATE_KEYS
    assert sum(answer["accepted"]) + 1 == answer["generation_tokens"] == len(answer["tokens"]) <= 30
    assert answer["acceptance_length"] == pytest.approx(sum(answer["accepted"]) / len(answer["accepted"]))
    assert answer["finish_reason"] in ("stop", "length")
    assert answer["prompt_tokens"] > 2  # the chat template is there


def test_stdout_holds_the_text_and_stderr_one_line_on_speed(pair):
    text = json.loads(invoke("generate", "Hi", *pair, "--max-tokens", "30", "--json").stdout)["text"]
    result = invoke("generate", "Hi", *pair, "--max-tokens", "30")
    assert result.stdout_bytes.decode() == text + "\n"
    assert re.fullmatch(r"30 tokens, [\d.]+ tokens/s, acceptance length [\d.]+, \d+ blocks\n", result.stderr)


def test_a_dash_reads_the_prompt_and_raw_takes_it_as_it_is(pair):
    raw = json.loads(invoke("generate", "-", "--raw", *pair, "--max-tokens", "1", "--json", stdin="Hi\n").stdout)
    assert raw["prompt_tokens"] == len(byte_tokenizer().encode("Hi\n"))
    chat = [
        json.loads(invoke("generate", prompt, *pair, "--max-tokens", "9", "--json", stdin="Hi\n").stdout)
        for prompt in ("-", "Hi")
    ]
    assert chat[0]["tokens"] == chat[1]["tokens"]


def test_a_seed_repeats_a_sample_and_another_changes_it(pair):
    options = [*pair, "--max-tokens", "20", "--json", "--temp", "1", "--top-k", "50", "--top-p", "0.95"]
    answers = [json.loads(invoke("generate", "Hi", *options, "--seed", s).stdout)["tokens"] for s in "112"]
    assert answers[0] == answers[1] != answers[2]


def test_stop_ends_the_text_before_it(monkeypatch):
    monkeypatch.setattr(cli_options, "load_decoder", lambda *_: writer("one two three"))
    result = invoke("generate", "AB", "--raw", "--stop", "zzz", "--stop", " th", "--json")
    answer = json.loads(result.stdout)
    assert (answer["text"], answer["finish_reason"]) == ("one two", "stop")


def test_no_tokens_asked_for_is_no_tokens(pair):
    answer = json.loads(invoke("generate", "Hi", *pair, "--max-tokens", "0", "--json").stdout)
    assert (answer["text"], answer["tokens"], answer["acceptance_length"]) == ("", [], None)
    assert answer["prompt_tokens"] > 2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["Hi", "--target", "no/such folder", "--drafter", "x"], "No checkpoint folder at 'no/such folder'"),
        (["Hi", "--target", "only"], "give both, or neither"),
        (["", "PAIR"], "prompt is empty"),
        (["-", "PAIR"], "prompt is empty"),
        (["Hi", "PAIR", "--max-tokens", "-1"], "max_tokens must be a whole number of at least 0, got -1"),
        (["Hi", "PAIR", "--max-tokens", "600"], "600 exceeds the limit of 512"),
        (["Hi", "PAIR", "--block-size", "0"], "block_size must be .* at least 1"),
        (["Hi", "PAIR", "--temp", "-1"], "temperature -1.0"),
        (["Hi", "PAIR", "--top-p", "2"], "top_p 2.0 between 0 and 1"),
        (["Hi", "PAIR", "--stop", ""], "stop_strings must be non-empty"),
    ],
)
def test_bad_requests_are_one_line_and_exit_1(pair, args, message):
    args = [a for arg in args for a in (pair if arg == "PAIR" else [arg])]
    assert_one_error(invoke("generate", *args), message)


# --- bench --------------------------------------------------------------------------------------------


def test_bench_json_reports_prompts_totals_and_the_limit(pair, prompts):
    result = invoke("bench", *pair, "--prompts", prompts, "--max-tokens", "12", "--runs", "2", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert [p["prompt"] for p in report["prompts"]] == ["Hi", "Count"]
    for prompt in report["prompts"]:
        assert prompt["identical"] is True
        assert prompt["difference"] is prompt["correct"] is None
        assert {"plain_tps", "dflash_tps", "ratio", "acceptance_length", "generation_tokens"} <= set(prompt)
        assert all(sum(accepted) + 1 == prompt["generation_tokens"] for accepted in prompt["accepted"])
        assert prompt["ratio"]["min"] <= prompt["ratio"]["median"] <= prompt["ratio"]["max"]
    assert report["total"]["identical"] == report["total"]["prompts"] == 2
    limit = report["limit"]
    parts = limit["plain_ms"] / (limit["draft_ms"] + limit["verify_ms"])
    assert limit["speedup"] == pytest.approx(limit["acceptance_length"] * parts)
    assert limit["share_reached"] == pytest.approx(report["total"]["overall_ratio"] / limit["speedup"])


def test_bench_prints_a_table_and_says_sampled_at_a_temperature(pair, prompts):
    greedy = invoke("bench", *pair, "--prompts", prompts, "--max-tokens", "8")
    assert greedy.exit_code == 0, greedy.output
    assert "identical on all 2 prompts" in greedy.stdout
    sampled = invoke("bench", *pair, "--prompts", prompts, "--max-tokens", "8", "--temp", "0.8")
    assert sampled.exit_code == 0, sampled.output
    assert "sampled" in sampled.stdout
    assert "identical" not in sampled.stdout


def test_bench_exits_1_with_position_and_margin_where_tokens_differ(pair, prompts, monkeypatch):
    true_side = bench.dflash_side

    def wrong_at_3(*args):
        answer, seen = true_side(*args), []

        def wrong(prompt):
            seen.clear()
            for tokens, text, committed in answer(prompt):
                changed = [t if len(seen) + i != 3 else (t + 1) % 200 for i, t in enumerate(tokens)]
                seen.extend(tokens)
                yield changed, text, committed

        return wrong

    monkeypatch.setattr(bench, "dflash_side", wrong_at_3)
    result = invoke("bench", *pair, "--prompts", prompts, "--max-tokens", "8")
    assert_one_error(result, "different tokens")
    assert re.search(r"different at 3 \(logit margin [\d.e-]+\)", result.stdout)
    assert "DIFFERENT on 2 of 2" in result.stdout


@pytest.mark.parametrize(("side", "name"), [("plain_side", "plain mlx_lm"), ("dflash_side", "DFlash")])
def test_bench_exits_1_naming_the_side_that_fails(pair, prompts, monkeypatch, side, name):
    def broken(*_):
        raise RuntimeError("no memory")

    monkeypatch.setattr(bench, side, lambda *_: broken)
    assert_one_error(invoke("bench", *pair, "--prompts", prompts), f"{name} failed on prompt 1: no memory")


@pytest.mark.parametrize(
    ("line", "options", "message"),
    [
        ('{"prompt": }', [], "line 2 is not valid JSON"),
        ('{"prompt": "a", "check": {"kind": "riddle"}}', [], "not of a kind that is known"),
        ('{"prompt": "a"}', ["--runs", "0"], "runs must be at least 1, got 0"),
        ('{"prompt": "a"}', ["--max-tokens", "-1"], "max_tokens must be at least 1 to compare, got -1"),
    ],
)
def test_bad_bench_input_is_one_line_and_exit_1(pair, tmp_path, line, options, message):
    file = tmp_path / "p.jsonl"
    file.write_text(f'{{"prompt": "a"}}\n{line}\n')
    assert_one_error(invoke("bench", *pair, "--prompts", file, *options), message)


def test_a_missing_prompt_file_is_one_line_and_exit_1():
    assert_one_error(invoke("bench", "--prompts", "nope.jsonl"), "Cannot read the prompts in nope.jsonl")


# --- demo ---------------------------------------------------------------------------------------------


def demo_with(monkeypatch, tmp_path, answer: str, sample, *args: str):
    """Run the demo with a target that writes ``answer`` and one held-out request."""
    file = tmp_path / "heldout.jsonl"
    file.write_text(json.dumps({"prompt": sample.prompt, "check": sample.check}) + "\n")
    monkeypatch.setattr(bench, "HELDOUT", file)
    prompt = writer("").loaded_target.build_prompt(args[0] if args else sample.prompt)
    monkeypatch.setattr(cli_options, "load_decoder", lambda *_: writer(answer, prompt, p=0.9))
    return invoke("demo", *args)


def long_function():
    """Long enough for the demo, and short enough for its limit, with a token a byte."""
    found = samples(0, 200, "heldout")
    return next(s for s in found if s.kind == "function" and 150 < len(s.answer) < 450)


def test_the_demo_shows_both_answers_and_passes_its_check(monkeypatch, tmp_path):
    sample = long_function()
    result = demo_with(monkeypatch, tmp_path, sample.answer, sample)
    assert result.exit_code == 0, result.output
    assert result.stdout.count(sample.answer) == 2
    for expected in (sample.prompt, "plain mlx_lm", "DFlash", "ratio", "identical", "passes its check"):
        assert expected in result.stdout


def test_the_demo_exits_1_when_the_function_fails_its_check(monkeypatch, tmp_path):
    sample = long_function()
    wrong = "def f(x):\n    " + 80 * "# " + "\n    return None\n"
    result = demo_with(monkeypatch, tmp_path, wrong, sample)
    assert result.exit_code == 1
    assert "FAILS its check" in result.stdout


def test_the_demo_takes_a_request_of_ones_own_and_checks_nothing(monkeypatch, tmp_path):
    result = demo_with(monkeypatch, tmp_path, "Hello there", long_function(), "Greet me")
    assert result.exit_code == 0, result.output
    assert "identical" in result.stdout
    assert "check" not in result.stdout


def test_the_demo_says_so_when_no_request_suits(monkeypatch, tmp_path):
    assert_one_error(demo_with(monkeypatch, tmp_path, "def f(): short", long_function()), "No request is answered")


# --- doctor and the rest ------------------------------------------------------------------------------


def test_doctor_shows_this_machine_and_a_target(pair):
    result = invoke("doctor", *pair[:2])
    assert result.exit_code == 0, result.output
    for expected in ("dflash-research", "mlx-lm", "GFLOP/s", backend.blas, "QwenAdapter", "4 KVCache (trim)"):
        assert expected in result.stdout


def test_doctor_reports_a_cache_that_cannot_be_rewound():
    shown = doctor.describe_caches([KVCache(), BatchKVCache([0]), KVCache()])
    assert shown == "2 KVCache (trim), 1 BatchKVCache (no exact rewind: cannot be decoded)"


def test_doctor_on_a_missing_target_is_one_line():
    assert_one_error(invoke("doctor", "--target", "no such folder"), "No checkpoint folder")


def test_no_backend_is_one_line(monkeypatch):
    def no_backend():
        raise BackendError("MLX has no backend on this machine.")

    monkeypatch.setattr(backend, "require_mlx", no_backend)
    assert_one_error(invoke("doctor"), "MLX has no backend")


def test_version_and_help():
    assert invoke("--version").stdout == f"dflash-research {version('dflash-research')}\n"
    for command in ("generate", "bench", "doctor", "demo"):
        result = invoke(command, "--help")
        assert result.exit_code == 0
        assert f"dflash {command}" in result.stdout.split("Examples:")[1]


@pytest.mark.parametrize("args", [["generate"], ["generate", "a", "--nope"], ["bench", "--runs", "x"], ["nope"]])
def test_wrong_usage_exits_2(args):
    assert invoke(*args).exit_code == 2


def test_debug_shows_the_traceback():
    result = invoke("--debug", "generate", "Hi", "--target", "only")
    assert isinstance(result.exception, dflash.DFlashError)


def test_ctrl_c_exits_130_quietly(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli_options, "load_decoder", interrupted)
    result = invoke("generate", "Hi")
    assert (result.exit_code, result.stderr) == (130, "")


def test_a_reader_that_goes_away_is_no_error_message(pair):
    command = [
        sys.executable,
        "-c",
        "from dflash.cli import main; main()",
        "generate",
        "Hi",
        *pair,
        "--max-tokens",
        "30",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 1
