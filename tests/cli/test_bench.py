"""``dflash bench``: JSON to compare later, partial results, one-line errors, exit codes."""

import hashlib
import json
import re
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.bench import result, run
from support.cli import assert_one_error, invoke
from support.models import TEXT_VOCAB, random_drafter

import dflash
from dflash import evaluation as bench
from dflash.core.errors import DFlashError
from dflash.evaluation import batch_speed, speedup


@pytest.fixture
def report(pair, prompts):
    """The JSON of a comparison, by its options."""

    def of(*options: object, given: object = prompts) -> dict:
        result = invoke("bench", *pair, "--prompts", given, "--json", *options)
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    return of


def test_bench_json_reports_prompts_totals_and_what_is_needed_to_compare_later(report, pair, prompts):
    found = report("--max-tokens", "12", "--runs", "2")
    settings, environment = found["settings"], found["environment"]
    assert [p["prompt"] for p in found["prompts"]] == ["Hi", "Count"]
    for prompt in found["prompts"]:
        assert prompt["identical"] is True
        assert all(sum(committed) + 1 == prompt["generation_tokens"] for committed in prompt["committed"])
        assert prompt["ratio"]["min"] <= prompt["ratio"]["median"] <= prompt["ratio"]["max"]
    assert found["total"]["identical"] == found["total"]["prompts"] == 2
    assert found["complete"] is True
    assert (settings["target"], settings["drafter"], settings["block_size"]) == (pair[1], [pair[3]], [8])
    digest = hashlib.sha256(Path(prompts).read_bytes()).hexdigest()
    assert settings["prompts"] == {"source": prompts, "sha256": digest, "prompts": 2}
    assert (settings["temp"], settings["max_tokens"], settings["seed"], settings["chat"]) == (0, 12, 0, True)
    assert environment["versions"]["mlx"] == version("mlx")
    assert datetime.fromisoformat(environment["date"]).tzinfo is not None
    assert environment["commit"] is None or re.fullmatch(r"[0-9a-f]{40}\+?", environment["commit"])


def test_batches_are_compared_with_mlx_lms_by_the_number_of_rows(report):
    found = report("--batch", "1,2", "--max-tokens", "12", "--runs", "2")
    assert [speed["rows"] for speed in found["batches"]] == [1, 2]
    for speed in found["batches"]:
        assert speed["different"] == 0
        assert len(speed["plain_tps"]) == len(speed["dflash_tps"]) == 2
        assert min(speed["ratio"], speed["plain_memory"], speed["dflash_memory"]) > 0
        assert 0 <= speed["drafting"] <= 1


def test_batches_in_a_table_that_fails_where_tokens_differ(pair, prompts, monkeypatch):
    asked = ("bench", *pair, "--prompts", prompts, "--batch", "2", "--max-tokens", "4")
    shown = invoke(*asked)
    assert shown.exit_code == 0, shown.output
    assert "0 of 2" in shown.stdout
    monkeypatch.setattr(batch_speed, "batch_generate", lambda *_, **__: SimpleNamespace(token_ids=[[1], [1]]))
    assert_one_error(invoke(*asked), "wrote different tokens")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--batch", "1,two"), "whole numbers and commas.*'1,two'"),
        (("--batch", "0"), "batch must be .* at least 1"),
        (("--batch", "2", "--drafter", "ngram"), "one drafter"),
        (("--batch", "2", "--stop", "e"), "leave out --stop and --stop-token"),
        (("--batch", "2", "--stop-token", "3"), "leave out --stop and --stop-token"),
        (("--batch", "2", "--tree", "4"), "tree is for one prompt at a time"),
        (("--batch", "2", "--kv-bits", "8"), "kv_bits is for one prompt at a time"),
        (("--batch", "2", "--temp", "1", "--verify", "speculative_sampling"), "verify is for one prompt at a time"),
    ],
)
def test_batches_that_cannot_be_measured_are_one_line_before_models_load(pair, prompts, options, message, monkeypatch):
    monkeypatch.delattr("dflash.cli.loading.load_decoders")
    assert_one_error(invoke("bench", *pair, "--prompts", prompts, *options), message)


def test_the_most_time_is_told_before_the_first_answer(report, monkeypatch, caplog):
    monkeypatch.setattr(bench, "time_side", lambda side, prompt: run(tokens=range(9), seconds=4.0))
    with caplog.at_level("INFO", "dflash.core.progress"):
        report("--max-tokens", "4", "--runs", "2")
    assert caplog.messages[0] == "bench: at most about 16 s"  # 2 prompts of 2 runs on 2 sides


def test_both_sides_end_and_cache_alike(report):
    """Stop strings and tokens, which plain mlx_lm has not, cut its tokens as they cut DFlash's."""
    whole, bounded = report("--max-tokens", "16"), report("--max-tokens", "16", "--max-kv-size", "8")
    first = json.loads(invoke("generate", "Hi", *_pair(whole), "--max-tokens", "16", "--json").stdout)
    middle = first["tokens"][8]
    stopped = report("--max-tokens", "16", "--stop-token", middle)
    cut = report("--max-tokens", "16", "--stop", first["text"][2:4])
    for found in (bounded, stopped, cut):
        assert found["total"]["identical"] == 2
    assert stopped["prompts"][0]["generation_tokens"] == first["tokens"].index(middle) + 1
    assert cut["prompts"][0]["generation_tokens"] < 16


def _pair(found: dict) -> list[str]:
    return ["--target", found["settings"]["target"], "--drafter", *found["settings"]["drafter"]]


def test_bench_reports_the_measured_limit(report, monkeypatch):
    monkeypatch.setattr(speedup, "limit_of", lambda *_: speedup.Limit(2.0, plain=0.006, draft=0.001, verify=0.002))
    assert report("--max-tokens", "4")["limit"]["speedup"] == pytest.approx(4)


def test_ctrl_c_leaves_the_table_of_what_was_measured(pair, prompts, monkeypatch):
    true_compare = bench.compare

    def interrupted(*args, **options):
        yield next(true_compare(*args, **options))
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "compare", interrupted)
    result = invoke("bench", *pair, "--prompts", prompts, "--max-tokens", "4")
    assert result.exit_code == 130
    assert "identical on all 1 prompts" in result.stdout
    assert result.stderr == "Stopped after 1 of 2 prompts.\n"
    report = json.loads(invoke("bench", *pair, "--prompts", prompts, "--max-tokens", "4", "--json").stdout)
    assert len(report["prompts"]) == 1
    assert report["complete"] is False


def test_prompts_and_answers_keep_to_the_room_there_is(report, pair, tmp_path, caplog):
    file, longest = tmp_path / "p.jsonl", '{"prompt": "' + 600 * "x" + '"}\n'
    file.write_text('{"prompt": "' + 470 * "x" + '"}\n' + longest)
    found = report(given=file)  # asks for 512 tokens by default
    (prompt,), (sentence,) = found["prompts"], found["left_out"]
    assert prompt["prompt_tokens"] + prompt["generation_tokens"] == 512
    assert re.search(r"p.jsonl, line 2 is left out: 6\d\d prompt tokens and 1 new one.* the limit of 512", sentence)
    assert sentence in caplog.text
    file.write_text(longest)
    assert_one_error(invoke("bench", *pair, "--prompts", file), "No prompt of .* fits")


def test_several_drafters_are_compared_on_the_same_prompts(report, pair, prompts, tmp_path):
    other = tmp_path / "other"
    dflash.save_drafter(random_drafter(4, TEXT_VOCAB, block_size=4), other)
    found = report("--drafter", other, "--max-tokens", "6")
    assert list(found["drafters"]) == [pair[3], str(other)]
    assert found["settings"]["block_size"] == [8, 4]
    assert [one["total"]["identical"] for one in found["drafters"].values()] == [2, 2]
    assert_one_error(invoke("bench", *pair, *pair[2:], "--prompts", prompts), "names one drafter twice")


def test_bench_prints_a_table_and_says_sampled_at_a_temperature(pair, prompts):
    asked = ("bench", *pair, "--prompts", prompts, "--max-tokens", "8")
    greedy = invoke(*asked).stdout
    assert "identical on all 2 prompts" in greedy
    assert "ceiling      not measured: too few blocks were verified whole" in greedy
    sampled = invoke(*asked, "--temp", "0.8").stdout
    assert "sampled" in sampled
    assert "identical" not in sampled


def test_bench_exits_1_where_tokens_differ(pair, prompts, monkeypatch):
    different = result([run()], [run()], bench.Difference(3, 1, 2, 0.5))
    monkeypatch.setattr(bench, "compare", lambda *_, **__: iter([{bench.DFLASH: different}]))
    shown = invoke("bench", *pair, "--prompts", prompts)
    assert_one_error(shown, "different tokens")
    assert "different at 3 (logit margin 0.5)" in shown.stdout


@pytest.mark.parametrize(
    ("left", "message"),
    [([{bench.DFLASH: result([run()], [run()])}], "error: 1 of 2 prompts failed: no memory"), ([], "error: no memory")],
)
def test_a_prompt_that_fails_leaves_the_results_of_the_others(pair, prompts, monkeypatch, left, message):
    def failing(*_, on_failure, **__):
        yield from left
        on_failure(DFlashError("no memory"))

    monkeypatch.setattr(bench, "compare", failing)
    shown = invoke("bench", *pair, "--prompts", prompts)
    assert_one_error(shown, message)
    assert ("identical on all 1 prompts" in shown.stdout) == bool(left)


@pytest.mark.parametrize(
    ("line", "options", "message"),
    [
        ('{"prompt": }', [], "line 2 is not valid JSON"),
        ('{"prompt": "a", "check": {"kind": "riddle"}}', [], "of no known kind"),
        ('{"prompt": "a", "check": 1}', [], 'line 2: "check" must be an object, got int'),
        ('{"prompt": "a"}', ["--runs", "0"], "runs must be a whole number of at least 1, got 0"),
        ('{"prompt": "a"}', ["--max-tokens", "0"], "max_tokens must be a whole number of at least 1, got 0"),
    ],
)
def test_bad_bench_input_is_one_line_and_exit_1(pair, tmp_path, line, options, message):
    file = tmp_path / "p.jsonl"
    file.write_text(f'{{"prompt": "a"}}\n{line}\n')
    assert_one_error(invoke("bench", *pair, "--prompts", file, *options), message)
