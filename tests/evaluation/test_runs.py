"""Runs are fair and say who failed: alternation, identity, sampling, room for the answer."""

from contextlib import contextmanager
from types import SimpleNamespace

import mlx.core as mx
import pytest
from mlx_lm.sample_utils import make_sampler
from support.bench import PROMPTS, scripted_side
from support.models import writer

from dflash import DFlashError
from dflash import evaluation as bench
from dflash.evaluation import DFLASH, PLAIN, runs
from dflash.evaluation.report import Report


def compared(target, plain, dflash, prompts=PROMPTS, runs=1, **options):
    """Results of one drafter."""
    return [r[DFLASH] for r in bench.compare(target, plain, {DFLASH: dflash}, prompts, runs, **options)]


@pytest.mark.parametrize(("runs", "turns"), [(1, "pab" + "abp"), (2, "pab" + "abp" + "abp" + "bpa")])
def test_sides_alternate_share_the_plain_runs_and_the_warm_up_is_not_counted(runs, turns):
    calls: list[str] = []
    plain, one, two = (scripted_side(name, [5, 6], calls) for name in "pab")
    (first, second) = bench.compare(writer("x").loaded_target, plain, {"a": one, "b": two}, PROMPTS, runs)
    assert "".join(calls) == "pab" + turns
    assert list(first) == ["a", "b"]
    assert first["a"].plain is first["b"].plain
    assert [r.prompt.text for r in (first["a"], second["b"])] == ["one", "two"]
    assert len(first["a"].plain) == len(first["b"].dflash) == runs
    assert first["a"].difference is None


def test_both_sides_of_a_prompt_answer_with_the_threads_that_were_chosen_before_it():
    calls: list[str] = []

    class Threads:
        @contextmanager
        def in_use(self):
            calls.append("(")
            yield
            calls.append(")")

    sides = scripted_side("p", [5, 6], calls), scripted_side("d", [5, 6], calls)
    compared(writer("x").loaded_target, *sides, runs=2, threads=Threads())
    assert "".join(calls) == "(pd" + "pddp)" + "(dppd)"


def test_a_pass_before_the_first_token_is_time_of_the_whole_request_alone(monkeypatch):
    """mlx_lm computes its second token before it hands over the first."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(runs, "time", SimpleNamespace(perf_counter=lambda: clock.now))

    def side(before_each: list[float]):
        def answer(prompt):
            for token, seconds in enumerate(before_each):
                clock.now += seconds
                yield bench.Step([token], "x", (0, 0) if token else None)

        return answer

    plain, dflash = (bench.time_side(side(times), [1]) for times in ([4.0, 1.0, 1.0], [3.0, 2.0, 1.0]))
    assert (plain.seconds, dflash.seconds, plain.request_seconds, dflash.request_seconds) == (2.0, 3.0, 6.0, 6.0)
    result = bench.PromptResult(PROMPTS[0], [plain], [dflash], None)
    assert (result.ratios, result.request_ratios) == ([pytest.approx(2 / 3)], [1.0])
    total = Report({}, [result], greedy=True).total()
    assert (total["ratio"]["median"], total["request_ratio"]["median"]) == (pytest.approx(2 / 3), 1.0)


def test_all_sides_sample_with_the_seed_of_the_run():
    def side(prompt):
        yield bench.Step([mx.random.randint(0, 10**6, (1,)).item()], "x")

    (found,) = compared(writer("x").loaded_target, side, side, PROMPTS[:1], runs=2, greedy=False, seed=3)
    plain, dflash = ([run.tokens for run in own] for own in (found.plain, found.dflash))
    assert plain == dflash != plain[::-1]


def test_a_difference_is_found_with_position_tokens_and_margin():
    decoder = writer("hello")
    text = decoder.tokenizer.encode("hello")
    wrong = [*text[:2], (text[2] + 1) % 200, *text[3:]]
    sides = scripted_side("p", text, []), scripted_side("d", wrong, [])
    (found,) = compared(decoder.loaded_target, *sides, PROMPTS[:1])
    assert (found.difference.position, found.difference.plain, found.difference.dflash) == (2, text[2], wrong[2])
    # Past its script the target wants its last token, the stop token, with logit 100, and all others at 0.
    assert found.difference.margin == pytest.approx(100)


def broken(prompt):
    raise RuntimeError("out of memory\nin a kernel")


GOOD, SILENT = scripted_side("g", [1, 2], []), scripted_side("s", [], [])


@pytest.mark.parametrize(
    ("sides", "message"),
    [
        ((broken, GOOD), f"^{PLAIN} failed on prompt 1: out of memory in a kernel$"),
        ((GOOD, broken), f"^{DFLASH} failed on prompt 1: out of memory in a kernel$"),
        ((SILENT, GOOD), "^plain mlx_lm wrote nothing for prompt 1"),
    ],
)
def test_a_failing_side_is_an_error_that_names_side_and_prompt(sides, message):
    with pytest.raises(DFlashError, match=message):
        compared(writer("x").loaded_target, *sides)


@pytest.mark.parametrize("max_tokens", [1, 2, 17, 60])
def test_the_real_sides_write_the_same_tokens_and_text(max_tokens):
    prompt = [65, 66]
    decoder = writer("def f(x):\n    return x + 1 — ünïcode 🙂", prompt, p=0.7)
    plain = bench.time_side(bench.plain_side(decoder.loaded_target, max_tokens), prompt)
    shown: list[str] = []
    dflash = bench.time_side(bench.dflash_side(decoder, max_tokens), prompt, shown.append)
    assert plain.tokens == dflash.tokens
    assert plain.text == dflash.text == "".join(shown)
    assert plain.committed == plain.drafted == plain.accepted == []
    assert sum(dflash.committed) + 1 == len(dflash.tokens) <= max_tokens
    whole = [a + 1 for a in dflash.accepted]
    assert dflash.committed[:-1] == whole[:-1]  # a stop token may cut the last block
    assert all(a <= d for a, d in zip(dflash.accepted, dflash.drafted, strict=True))


def test_a_prompt_on_which_a_side_fails_leaves_the_others():
    def fails_on_the_first(prompt):
        return (broken if prompt == PROMPTS[0].tokens else GOOD)(prompt)

    errors: list[DFlashError] = []
    (kept,) = compared(writer("x").loaded_target, GOOD, fails_on_the_first, on_failure=errors.append)
    assert kept.prompt is PROMPTS[1]
    assert [str(error) for error in errors] == ["DFlash failed on prompt 1: out of memory in a kernel"]


def test_answers_are_no_longer_than_the_room_that_is_left():
    decoder = writer("many more words than these", [65, 66], policy="full")
    for side in (bench.plain_side(decoder.loaded_target, 50, 8), bench.dflash_side(decoder, 50, longest=8)):
        assert len(bench.time_side(side, [65, 66]).tokens) == 6


def test_both_sides_take_samplers_and_logits_processors():
    decoder = writer("wwww", [65, 66], policy="full")
    letter = decoder.tokenizer.encode("w")[0]

    def without(tokens, logits):
        return mx.where(mx.arange(logits.shape[-1]) == letter, -mx.inf, logits)

    plain = bench.plain_side(decoder.loaded_target, 4, logits_processors=[without])
    dflash = bench.dflash_side(decoder, 4, logits_processors=[without])
    answers = [bench.time_side(side, [65, 66]).tokens for side in (plain, dflash)]
    assert answers[0] == answers[1]
    assert letter not in answers[0]
    sampled = bench.plain_side(decoder.loaded_target, 4, sampler=make_sampler(1.0, top_k=1))
    assert bench.time_side(sampled, [65, 66]).tokens == [letter] * 4
