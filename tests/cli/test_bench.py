"""``dflash bench`` and ``dflash doctor``: JSON to compare later, partial results, one-line errors, exit codes."""

import hashlib
import json
import re
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

import pytest
from mlx_lm.models.cache import BatchKVCache, KVCache
from support.cli import assert_one_error, invoke
from support.models import TEXT_VOCAB, random_drafter

import dflash
from dflash import evaluation as bench
from dflash.core import backend
from dflash.evaluation import doctor, speedup
from dflash.policies import threads

# --- bench --------------------------------------------------------------------------------------------


def test_bench_json_reports_prompts_and_totals(pair, prompts):
    result = invoke("bench", *pair, "--prompts", prompts, "--max-tokens", "12", "--runs", "2", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert [p["prompt"] for p in report["prompts"]] == ["Hi", "Count"]
    for prompt in report["prompts"]:
        assert prompt["identical"] is True
        assert prompt["difference"] is prompt["correct"] is None
        assert {"plain_tps", "dflash_tps", "ratio", "acceptance_length", "generation_tokens"} <= set(prompt)
        assert all(sum(committed) + 1 == prompt["generation_tokens"] for committed in prompt["committed"])
        assert prompt["ratio"]["min"] <= prompt["ratio"]["median"] <= prompt["ratio"]["max"]
    assert report["total"]["identical"] == report["total"]["prompts"] == 2
    assert report["complete"] is True
    assert report["limit"] is None  # too few blocks


def test_bench_json_has_what_is_needed_to_compare_later(pair, prompts):
    options = ["--prompts", prompts, "--max-tokens", "4", "--temp", "0.5", "--limit", "1", "--json"]
    report = json.loads(invoke("bench", *pair, *options).stdout)
    settings, environment = report["settings"], report["environment"]
    assert settings["target"] == pair[1]
    assert settings["drafter"] == [pair[3]]
    digest = hashlib.sha256(Path(prompts).read_bytes()).hexdigest()
    assert settings["prompts"] == {"source": prompts, "sha256": digest, "prompts": 1}
    assert (settings["temp"], settings["max_tokens"], settings["block_size"]) == (0.5, 4, [8])
    assert environment["versions"]["mlx"] == version("mlx")
    assert {"dflash-research", "mlx-lm", "transformers", "python"} <= set(environment["versions"])
    assert environment["device"].startswith(("cpu", "gpu"))
    assert environment["blas_threads"]
    assert datetime.fromisoformat(environment["date"]).tzinfo is not None
    assert environment["commit"] is None or re.fullmatch(r"[0-9a-f]{40}\+?", environment["commit"])


def test_bench_reports_the_measured_limit_and_the_fraction_reached(pair, prompts, monkeypatch):
    asked = []

    def measured(decoder, prompt, answer, tau, sampler):
        asked.append((answer, tau))
        return speedup.Limit(tau, plain=0.006, draft=0.001, verify=0.002)

    monkeypatch.setattr(speedup, "measure_limit", measured)
    monkeypatch.setattr(speedup, "LEAST_BLOCKS", 2)
    options = ["--prompts", prompts, "--max-tokens", "40", "--policy", "full", "--json"]
    report = json.loads(invoke("bench", *pair, *options).stdout)
    ((answer, tau),) = asked
    assert len(answer) == 40
    committed = [n for prompt in report["prompts"] for run in prompt["committed"] for n in run]
    assert tau == pytest.approx(sum(committed) / len(committed))
    limit = report["limit"]
    assert (limit["plain_ms"], limit["draft_ms"], limit["verify_ms"]) == pytest.approx((6, 1, 2))
    assert limit["speedup"] == pytest.approx(2 * tau)  # tau * 6 / (1 + 2)
    assert limit["fraction_reached"] == pytest.approx(report["total"]["overall_ratio"] / (2 * tau))


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


def test_a_prompt_that_is_too_long_is_left_out_with_a_line(pair, tmp_path, caplog):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "Hi"}\n{"prompt": "' + 600 * "x" + '"}\n{"prompt": "Count"}\n')
    result = invoke("bench", *pair, "--prompts", file, "--max-tokens", "4", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert [p["prompt"] for p in report["prompts"]] == ["Hi", "Count"]
    (sentence,) = report["left_out"]
    assert re.search(
        r"p.jsonl, line 2 is left out: 6\d\d prompt tokens and 4 new ones exceed the limit of 512", sentence
    )
    assert sentence in caplog.text
    file.write_text('{"prompt": "' + 600 * "x" + '"}\n')
    assert_one_error(invoke("bench", *pair, "--prompts", file), "No prompt of .* fits")


def test_the_default_number_of_tokens_gives_way_to_the_room_there_is(pair, tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "' + 470 * "x" + '"}\n')
    (prompt,) = json.loads(invoke("bench", *pair, "--prompts", file, "--json").stdout)["prompts"]
    assert prompt["prompt_tokens"] + prompt["generation_tokens"] == 512


def test_messages_templates_system_prompts_and_switches_are_taken(loud_pair, tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "Hi"}], "question": "Count", "answer": "3"}\n')

    def length(*options: str) -> int:
        result = invoke("bench", *loud_pair, "--prompts", file, "--max-tokens", "2", "--json", *options)
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)["prompts"][0]["prompt_tokens"]

    alone = length()
    assert length("--system", "Be brief.") > alone
    assert length("--template", "{question}: {answer}") == alone + len("Count: 3") - len("Hi")
    assert length("--chat-template-config", '{"loud": true}') == alone + 4


def test_several_drafters_are_compared_on_the_same_prompts(pair, prompts, tmp_path):
    other = tmp_path / "other"
    dflash.save_drafter(random_drafter(4, TEXT_VOCAB, block_size=4), other)
    options = [*pair, "--drafter", other, "--prompts", prompts, "--max-tokens", "6"]
    result = invoke("bench", *options, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert list(report["drafters"]) == [pair[3], str(other)]
    assert report["settings"]["block_size"] == [8, 4]
    for found in report["drafters"].values():
        assert found["total"]["identical"] == 2
    table = invoke("bench", *options)
    assert "other" in table.stdout
    assert table.stdout.count("identical on all 2 prompts") == 2
    assert_one_error(invoke("bench", *pair, *pair[2:], "--prompts", prompts), "names one drafter twice")


def test_bench_prints_a_table_and_says_sampled_at_a_temperature(pair, prompts):
    greedy = invoke("bench", *pair, "--prompts", prompts, "--max-tokens", "8")
    assert greedy.exit_code == 0, greedy.output
    assert "identical on all 2 prompts" in greedy.stdout
    assert "ceiling      not measured: it takes 50 blocks, at least half of them verified whole" in greedy.stdout
    sampled = invoke("bench", *pair, "--prompts", prompts, "--max-tokens", "8", "--temp", "0.8")
    assert sampled.exit_code == 0, sampled.output
    assert "sampled" in sampled.stdout
    assert "identical" not in sampled.stdout


def test_bench_exits_1_with_position_and_margin_where_tokens_differ(pair, prompts, monkeypatch):
    true_side = bench.dflash_side

    def wrong_at_3(*args):
        answer, written = true_side(*args), []

        def wrong(prompt):
            written.clear()
            for step in answer(prompt):
                changed = [t if len(written) + i != 3 else (t + 1) % 200 for i, t in enumerate(step.tokens)]
                written.extend(step.tokens)
                yield step._replace(tokens=changed)

        return wrong

    monkeypatch.setattr(bench, "dflash_side", wrong_at_3)
    result = invoke("bench", *pair, "--prompts", prompts, "--max-tokens", "8")
    assert_one_error(result, "different tokens")
    assert re.search(r"different at 3 \(logit margin [\d.e-]+\)", result.stdout)
    assert "DIFFERENT on 2 of 2" in result.stdout


def test_one_prompt_that_fails_leaves_the_results_of_the_others(pair, prompts, monkeypatch):
    true_side = bench.dflash_side

    def fails_on_the_longer(*args, **options):
        answer = true_side(*args, **options)

        def side(prompt):
            if len(prompt) > shortest:
                raise RuntimeError("no memory")
            return answer(prompt)

        return side

    first = json.loads(
        invoke("bench", *pair, "--prompts", prompts, "--limit", "1", "--max-tokens", "2", "--json").stdout
    )
    shortest = first["prompts"][0]["prompt_tokens"]
    monkeypatch.setattr(bench, "dflash_side", fails_on_the_longer)
    result = invoke("bench", *pair, "--prompts", prompts, "--max-tokens", "8")
    assert_one_error(result, "1 of 2 prompts failed: DFlash failed on prompt 2: no memory")
    assert "identical on all 1 prompts" in result.stdout


@pytest.mark.parametrize(("side", "name"), [("plain_side", "plain mlx_lm"), ("dflash_side", "DFlash")])
def test_bench_exits_1_naming_the_side_that_fails(pair, prompts, monkeypatch, side, name):
    def broken(*_):
        raise RuntimeError("no memory")

    monkeypatch.setattr(bench, side, lambda *_, **__: broken)
    assert_one_error(invoke("bench", *pair, "--prompts", prompts), f"{name} failed on prompt 1: no memory")


@pytest.mark.parametrize(
    ("line", "options", "message"),
    [
        ('{"prompt": }', [], "line 2 is not valid JSON"),
        ('{"prompt": "a", "check": {"kind": "riddle"}}', [], "of no known kind"),
        ('{"prompt": "a", "check": 1}', [], 'line 2: "check" must be an object, got int'),
        ('{"prompt": " "}', [], "line 2: the prompt is empty"),
        ('["a"]', [], "line 2 must hold an object, not a list"),
        ('{"prompt": "a"}', ["--limit", "0"], "--limit must be at least 1, got 0"),
        ('{"prompt": "a"}', ["--template", "{question}"], "has no 'question' for the template"),
        ('{"prompt": "a"}', ["--runs", "0"], "runs must be at least 1, got 0"),
        ('{"prompt": "a"}', ["--max-tokens", "-1"], "max_tokens must be at least 1 to compare, got -1"),
    ],
)
def test_bad_bench_input_is_one_line_and_exit_1(pair, tmp_path, line, options, message):
    file = tmp_path / "p.jsonl"
    file.write_text(f'{{"prompt": "a"}}\n{line}\n')
    assert_one_error(invoke("bench", *pair, "--prompts", file, *options), message)


def test_a_missing_prompt_file_is_one_line_and_exit_1():
    assert_one_error(invoke("bench", "--prompts", "nope.jsonl"), "There is no file 'nope.jsonl'")


# --- doctor -------------------------------------------------------------------------------------------


def test_doctor_shows_this_machine_and_a_target(pair):
    result = invoke("doctor", *pair[:2])
    assert result.exit_code == 0, result.output
    for expected in ("dflash-research", "mlx-lm", "GFLOP/s", backend.blas, "QwenAdapter", "4 KVCache (trim)"):
        assert expected in result.stdout


@pytest.mark.skipif(not backend.on_cpu() or not backend.blas_threads(), reason="no BLAS whose threads can be set")
def test_doctor_shows_how_many_threads_decode_and_why(pair, monkeypatch):
    for name in threads.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(backend, "blas_threads", lambda: 2)
    monkeypatch.setattr(backend, "set_blas_threads", lambda count: True)  # or other tests would compute with two
    lines = [x for x in invoke("doctor", *pair[:2]).stdout.splitlines() if x.startswith("BLAS threads")]
    assert re.search(r"up to 2; each decoder takes the quickest", lines[0])
    assert re.search(r"[12]: a pass of 16 tokens takes .* ms with 1, .* ms with 2", lines[1])
    monkeypatch.setenv("MKL_NUM_THREADS", "2")
    assert invoke("doctor").stdout.count("2: MKL_NUM_THREADS is set") == 1


def test_doctor_says_from_which_acceptance_a_length_pays_and_which_one_is_best():
    rows = doctor.costs_report({0: 0.010, 1: 0.012, 3: 0.025})
    assert rows[1] == ("1", "12.00", "1.20", "0.20", "1.08*", "1.25*", "1.42*", "1.58*")
    assert rows[2] == ("3", "25.00", "2.50", "0.70", "0.57", "0.75", "1.01", "1.38")


def test_doctor_times_every_length_and_plain_steps_of_whole_pauses(pair):
    assert "what a block costs and brings" in invoke("doctor", *pair).stdout
    policy = doctor.EachLength([1, 3])
    assert policy.sleep() == 4


def test_doctor_names_tokens_that_a_new_drafter_can_take_for_its_mask(pair):
    (line,) = [x for x in invoke("doctor", *pair[:2]).stdout.splitlines() if x.startswith("unused tokens")]
    assert "'<|mask|>' (261)" in line
    assert f"{TEXT_VOCAB - 1} (no text)" in line  # a row of the table without a token


def test_the_bundled_target_takes_drafters_that_need_no_training(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "Write a function that doubles each number and sums them."}\n')
    names = ["--drafter", "bundled", "--drafter", "ngram"]
    result = invoke("bench", *names, "--prompts", file, "--max-tokens", "24", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["drafters"]
    assert list(found) == ["bundled", "ngram"]
    assert all(report["total"]["identical"] == 1 for report in found.values())
    assert found["bundled"]["total"]["acceptance_length"] > found["ngram"]["total"]["acceptance_length"]


def test_doctor_reports_a_cache_that_cannot_be_rewound():
    shown = doctor.describe_caches([KVCache(), BatchKVCache([0]), KVCache()])
    assert shown == "2 KVCache (trim), 1 BatchKVCache (no exact rewind: cannot be decoded)"


def test_doctor_on_a_missing_target_is_one_line():
    assert_one_error(invoke("doctor", "--target", "no such folder"), "No checkpoint folder")
