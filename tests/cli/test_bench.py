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


@pytest.fixture
def report(pair, prompts):
    """The JSON of a comparison, by its options."""

    def of(*options: object, given: object = prompts) -> dict:
        result = invoke("bench", *pair, "--prompts", given, "--json", *options)
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    return of


def test_bench_json_reports_prompts_and_totals(report):
    found = report("--max-tokens", "12", "--runs", "2")
    assert [p["prompt"] for p in found["prompts"]] == ["Hi", "Count"]
    for prompt in found["prompts"]:
        assert prompt["identical"] is True
        assert prompt["difference"] is prompt["correct"] is None
        assert {"plain_tps", "dflash_tps", "ratio", "acceptance_length", "generation_tokens"} <= set(prompt)
        assert all(sum(committed) + 1 == prompt["generation_tokens"] for committed in prompt["committed"])
        assert prompt["ratio"]["min"] <= prompt["ratio"]["median"] <= prompt["ratio"]["max"]
    assert found["total"]["identical"] == found["total"]["prompts"] == 2
    assert found["complete"] is True
    assert found["limit"] is None  # too few blocks


def test_bench_json_has_what_is_needed_to_compare_later(report, pair, prompts):
    found = report("--max-tokens", "4", "--temp", "0.5", "--limit", "1")
    settings, environment = found["settings"], found["environment"]
    assert (settings["target"], settings["drafter"]) == (pair[1], [pair[3]])
    digest = hashlib.sha256(Path(prompts).read_bytes()).hexdigest()
    assert settings["prompts"] == {"source": prompts, "sha256": digest, "prompts": 1}
    assert (settings["temp"], settings["max_tokens"], settings["block_size"]) == (0.5, 4, [8])
    assert (settings["seed"], settings["verify"], settings["logits_processor"], settings["chat"]) == (
        0,
        None,
        None,
        True,
    )
    assert environment["versions"]["mlx"] == version("mlx")
    assert {"dflash-research", "mlx-lm", "transformers", "python"} <= set(environment["versions"])
    assert environment["device"].startswith(("cpu", "gpu"))
    assert environment["blas_threads"]
    assert datetime.fromisoformat(environment["date"]).tzinfo is not None
    assert environment["commit"] is None or re.fullmatch(r"[0-9a-f]{40}\+?", environment["commit"])


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


def test_bench_reports_the_measured_limit_and_the_fraction_reached(report, monkeypatch):
    asked = []

    def measured(decoder, prompt, answer, tau, sampler):
        asked.append((answer, tau))
        return speedup.Limit(tau, plain=0.006, draft=0.001, verify=0.002)

    monkeypatch.setattr(speedup, "measure_limit", measured)
    monkeypatch.setattr(speedup, "LEAST_BLOCKS", 2)
    found = report("--max-tokens", "40", "--policy", "full")
    ((answer, tau),) = asked
    assert len(answer) == 40
    committed = [n for prompt in found["prompts"] for run in prompt["committed"] for n in run]
    assert tau == pytest.approx(sum(committed) / len(committed))
    limit = found["limit"]
    assert (limit["plain_ms"], limit["draft_ms"], limit["verify_ms"]) == pytest.approx((6, 1, 2))
    assert limit["speedup"] == pytest.approx(2 * tau)  # tau * 6 / (1 + 2)
    assert limit["fraction_reached"] == pytest.approx(found["total"]["overall_ratio"] / (2 * tau))


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
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "' + 470 * "x" + '"}\n')
    (prompt,) = report(given=file)["prompts"]  # asked for 512 tokens by default
    assert prompt["prompt_tokens"] + prompt["generation_tokens"] == 512
    file.write_text('{"prompt": "Hi"}\n{"prompt": "' + 600 * "x" + '"}\n{"prompt": "Count"}\n')
    found = report("--max-tokens", "4", given=file)
    assert [p["prompt"] for p in found["prompts"]] == ["Hi", "Count"]
    (sentence,) = found["left_out"]
    assert re.search(
        r"p.jsonl, line 2 is left out: 6\d\d prompt tokens and 4 new ones exceed the limit of 512", sentence
    )
    assert sentence in caplog.text
    file.write_text('{"prompt": "' + 600 * "x" + '"}\n')
    assert_one_error(invoke("bench", *pair, "--prompts", file), "No prompt of .* fits")


def test_several_drafters_are_compared_on_the_same_prompts(report, pair, prompts, tmp_path):
    other = tmp_path / "other"
    dflash.save_drafter(random_drafter(4, TEXT_VOCAB, block_size=4), other)
    found = report("--drafter", other, "--max-tokens", "6")
    assert list(found["drafters"]) == [pair[3], str(other)]
    assert found["settings"]["block_size"] == [8, 4]
    assert [one["total"]["identical"] for one in found["drafters"].values()] == [2, 2]
    table = invoke("bench", *pair, "--drafter", other, "--prompts", prompts, "--max-tokens", "6")
    assert "other" in table.stdout
    assert table.stdout.count("identical on all 2 prompts") == 2
    assert_one_error(invoke("bench", *pair, *pair[2:], "--prompts", prompts), "names one drafter twice")


def test_bench_prints_a_table_and_says_sampled_at_a_temperature(pair, prompts):
    asked = ("bench", *pair, "--prompts", prompts, "--max-tokens", "8")
    greedy = invoke(*asked).stdout
    assert "identical on all 2 prompts" in greedy
    assert "ceiling      not measured: it takes 50 blocks, at least half of them verified whole" in greedy
    sampled = invoke(*asked, "--temp", "0.8").stdout
    assert "sampled" in sampled
    assert "identical" not in sampled


def test_bench_exits_1_with_position_and_margin_where_tokens_differ(pair, prompts, monkeypatch):
    true_side = bench.dflash_side

    def wrong_at_3(*args):
        answer = true_side(*args)

        def wrong(prompt):
            written = 0
            for step in answer(prompt):
                changed = [(t + 1) % 200 if written + i == 3 else t for i, t in enumerate(step.tokens)]
                written += len(step.tokens)
                yield step._replace(tokens=changed)

        return wrong

    monkeypatch.setattr(bench, "dflash_side", wrong_at_3)
    result = invoke("bench", *pair, "--prompts", prompts, "--max-tokens", "8")
    assert_one_error(result, "different tokens")
    assert re.search(r"different at 3 \(logit margin [\d.e-]+\)", result.stdout)
    assert "DIFFERENT on 2 of 2" in result.stdout


@pytest.mark.parametrize(("side", "name"), [("plain_side", "plain mlx_lm"), ("dflash_side", "DFlash")])
def test_a_prompt_that_fails_leaves_the_results_of_the_others(report, pair, prompts, monkeypatch, side, name):
    shortest = report("--limit", "1", "--max-tokens", "2")["prompts"][0]["prompt_tokens"]
    true_side, longest = getattr(bench, side), shortest

    def failing_side(*args, **options):
        answer = true_side(*args, **options)

        def failing(prompt):
            if len(prompt) > longest:
                raise RuntimeError("no memory")
            return answer(prompt)

        return failing

    monkeypatch.setattr(bench, side, failing_side)
    result = invoke("bench", *pair, "--prompts", prompts, "--max-tokens", "8")
    assert_one_error(result, f"1 of 2 prompts failed: {name} failed on prompt 2: no memory")
    assert "identical on all 1 prompts" in result.stdout
    longest = 0
    assert_one_error(invoke("bench", *pair, "--prompts", prompts), f"{name} failed on prompt 1: no memory")


@pytest.mark.parametrize(
    ("line", "options", "message"),
    [
        ('{"prompt": }', [], "line 2 is not valid JSON"),
        ('{"prompt": "a", "check": {"kind": "riddle"}}', [], "of no known kind"),
        ('{"prompt": "a", "check": 1}', [], 'line 2: "check" must be an object, got int'),
        ('{"prompt": " "}', [], "line 2: the prompt is empty"),
        ('["a"]', [], "line 2 must hold an object, not a list"),
        ('{"prompt": "a"}', ["--runs", "0"], "runs must be at least 1, got 0"),
        ('{"prompt": "a"}', ["--max-tokens", "0"], "max_tokens must be at least 1 to compare, got 0"),
    ],
)
def test_bad_bench_input_is_one_line_and_exit_1(pair, tmp_path, line, options, message):
    file = tmp_path / "p.jsonl"
    file.write_text(f'{{"prompt": "a"}}\n{line}\n')
    assert_one_error(invoke("bench", *pair, "--prompts", file, *options), message)


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
