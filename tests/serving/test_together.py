"""Several requests at once: they join one batch, each gets the text that it has alone, and none disturbs another."""

from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import openai
import pytest
from support.models import TEXT_VOCAB, ScriptedDrafter, plain_greedy, qwen3_model, save_target

from dflash import DFlashSpeculativeDecoder
from dflash.adapters.conformance import small_models as small
from dflash.bundled import REAL
from dflash.errors import DFlashError
from dflash.models import ModelOptions
from dflash.options import DecodeOptions
from dflash.policies.base import BlockRecord, Policy
from dflash.serving.models import by_name
from dflash.serving.options import ServeOptions
from dflash.serving.server import started
from dflash.target.load import PAIR
from dflash.target.ring import RowsCache

from . import load
from .conftest import QUESTIONS, Gate, answered, both, endless, until
from .words import Knowing, ids, words

KINDS = [
    {},
    {"stop": ["."]},
    {"logit_bias": {"30": -100}},
    {"max_tokens": 3},
    {"extra_body": {"repetition_penalty": 1.3}},
    {"temperature": 0.9, "extra_body": {"top_k": 1}},
    {"temperature": 0, "seed": 3},
    {"presence_penalty": 0.5},
]


@pytest.fixture
def gate():
    gate = Gate(3)
    yield gate
    gate.open.release(10_000)


@pytest.fixture
def gated(here, model, gate):
    return here(lambda: words(model, policy=gate)), gate


@both
def test_eight_requests_of_all_kinds_get_the_texts_that_they_have_alone(server, decoder):
    """Beside one that does not end, so that none is alone."""

    def ask(number: int, stream: bool) -> tuple[str, int, bool]:
        question, options = QUESTIONS[number % 5], {"max_tokens": 16} | KINDS[number]
        if stream:
            *chunks, last = server.chat(question, stream=True, stream_options={"include_usage": True}, **options)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        else:
            last = server.chat(question, **options)
            text = last.choices[0].message.content or ""
        drafts = last.metrics["speculative_decoding"]
        details = last.usage.completion_tokens_details
        assert details.accepted_prediction_tokens == drafts["num_accepted_draft_tokens"]
        return text, last.usage.completion_tokens, drafts["num_draft_tokens"] > 0

    alone = [ask(number, False) for number in range(8)]
    assert alone[0][0] == decoder.generate(QUESTIONS[0], 16)
    until(lambda: server.metric("vllm:num_requests_running") == 0)  # it falls after an answer
    with server.open({"prompt": "def part(", "max_tokens": 500, "stream": True} | endless(decoder)):
        until(lambda: server.metric("vllm:num_requests_running") == 1)
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(ask, range(8), [False, True] * 4)) == alone
        until(lambda: server.metric("vllm:num_requests_running") == 1)


class Counting(Policy):
    """Counts the drafts in the passes of the target."""

    passed = 0

    def observe(self, block: BlockRecord) -> None:
        self.passed += block.verified * block.rows


@pytest.mark.parametrize("clients", [1, 4])
def test_accepted_and_rejected_drafts_are_those_that_the_target_verified(here, model, clients):
    policy, told = Counting(), 0
    running = here(lambda: words(model, policy=policy))
    with ThreadPoolExecutor(clients) as pool:
        prompts = ["1 2 3", "4 5", "6", "7 8 9"]
        for answer in pool.map(lambda prompt: running.complete(prompt, max_tokens=40), prompts):
            details = answer.usage.completion_tokens_details
            told += details.accepted_prediction_tokens + details.rejected_prediction_tokens
    running.generator.between_requests(lambda: None)
    joining = 15 * (len(prompts) - 1) * (clients > 1)  # a block that a row joins also reads drafts after its prompt
    assert told == running.metric("vllm:spec_decode_num_draft_tokens_total") > 100
    assert told <= policy.passed <= told + joining


@pytest.mark.parametrize("options", [{"kv_bits": 8}, {"max_kv_size": 64}])
def test_what_a_batch_cannot_do_is_decoded_one_after_another(here, decoder, caplog, options):
    caplog.set_level("INFO")
    running = here(lambda: DFlashSpeculativeDecoder.from_pretrained(**options))
    assert f"one after another: {next(iter(options))}" in caplog.text
    with ThreadPoolExecutor(5) as pool:
        texts = list(pool.map(lambda question: running.text(question, max_tokens=16), QUESTIONS))
    assert texts == [decoder.generate(question, 16, **options) for question in QUESTIONS]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_bits": 8, "max_kv_size": 40}, "either bounded or quantised"),
        ({"kv_bits": 8, "kv_group_size": 128}, "kv_group_size 128 does not divide"),
        ({"tree": 4, "max_kv_size": 40}, "trees need KVCache"),
        ({"max_tokens": 0}, "max_tokens must be a whole number of at least 1"),
        ({"chat_template_config": {"tokenize": False}}, "'tokenize' is no switch"),
    ],
)
def test_defaults_with_which_every_request_would_fail_are_an_error_at_start(options, message):
    serving = ServeOptions(port=0, chat_template_config=options.pop("chat_template_config", None))
    decoding = DecodeOptions(**{"max_tokens": 60} | options)
    with pytest.raises(DFlashError, match=message), started(ModelOptions(), decoding, serving):
        pass


@both
def test_a_conversation_goes_on_from_alone_to_a_batch_and_back(server, decoder):
    """The caches of both models come along: only what is new is read, and drafts are right as with cold caches."""
    messages = [{"role": "system", "content": "Answer this: " + "x y " * 20}]
    for number, (turn, together) in enumerate(zip(QUESTIONS, (False, False, True, True, False), strict=True)):
        messages.append({"role": "user", "content": turn})
        until(lambda: server.metric("vllm:num_requests_running") == 0)  # it falls after an answer
        if together:
            asked = {"prompt": f"def part{number}(values):\n", "max_tokens": 400, "stream": True}
            beside = server.open(asked | endless(decoder))
            until(lambda: server.metric("vllm:num_requests_running") == 1)
        answer = server.chat(messages, max_tokens=16)
        if together:
            until(lambda: server.metric("vllm:num_requests_running") == 1)  # it was beside the other to its end
            beside.close()
        cold = list(decoder.stream_generate(messages, 16, policy="full"))
        assert answer.choices[0].message.content == "".join(step.text for step in cold)
        cached, read = answer.usage.prompt_tokens_details.cached_tokens, answer.usage.prompt_tokens
        assert number == 0 or read - cached < 60 < cached
        accepted = answer.usage.completion_tokens_details.accepted_prediction_tokens
        right = sum(step.accepted for step in cold)
        assert accepted >= right - 1 if together else accepted == right  # a batch's blocks begin with the first token
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})


@pytest.mark.parametrize("kind", ["llama", "qwen3_5", "falcon_h1"], ids=["sliding", "recurrent", "both"])
def test_conversations_with_caches_that_cannot_go_back(here, kind):
    """Each turn is read from where its last one ended, alone and beside others, and so is a branch of it.

    The drafter knows all of it: no draft is wrong.
    """
    mx.random.seed(0)
    model = small.build(kind, seed=5)
    mx.eval(model.parameters())
    running = here(lambda: words(model, Knowing([], 64), policy=3), prompt_caches=100)

    def ask(text: str):
        return running.complete(text, max_tokens=12)

    def check(text: str, answer, known: bool) -> str:
        assert ids(answer.choices[0].text) == plain_greedy(model, ids(text), 12)[0]
        left = answer.usage.prompt_tokens - answer.usage.prompt_tokens_details.cached_tokens
        assert left <= 4 or not known
        assert answer.usage.completion_tokens_details.rejected_prediction_tokens == 0
        return f"{text} {answer.choices[0].text}"

    first = check("3 1 5", ask("3 1 5"), False)
    texts = ["3 1 4", "1 5 9 2 6 5 3", "7", first]
    with ThreadPoolExecutor(4) as pool:
        for turn in (" ", " 9 2 6"):
            texts = [text + turn for text in texts]
            answers = list(pool.map(ask, texts))
            known = [turn.strip() or text == texts[3] for text in texts]
            texts = [check(*each) for each in zip(texts, answers, known, strict=True)]
    for again in (first + " 8 8", texts[0] + " 1"):
        check(again, ask(again), True)


THINKING = (
    "{% for m in messages %}{{ '1' if m.role == 'user' else '2' }} {{ m.content.split('</think>')[-1] }} {% endfor %}"
    "{% if add_generation_prompt %}2 <think>{% endif %}"
)


@pytest.mark.parametrize(("kind", "together"), [("llama", False), ("qwen3_5", True)])
def test_a_template_that_drops_thoughts_reads_no_turn_again(here, kind, together):
    """Windows and recurrent states cannot go back to where the thought began, so they are kept there."""
    mx.random.seed(0)
    model = small.build(kind, seed=5)
    mx.eval(model.parameters())
    running = here(lambda: words(model, Knowing([], 64), THINKING, policy=3))
    if together:
        beside = running.open({"prompt": "5", "max_tokens": 6000, "stream": True})
        until(lambda: running.metric("vllm:generation_tokens_total") > 0)
    messages: list[dict] = []
    kept = 0
    for content in (" ".join(["9 8 7"] * 10), "6 6 6", "4 3"):
        messages.append({"role": "user", "content": content})
        answer = running.chat(messages, max_tokens=20)
        prompt, cached = answer.usage.prompt_tokens, answer.usage.prompt_tokens_details.cached_tokens
        assert cached == kept
        details, kept = answer.usage.completion_tokens_details, prompt - 1
        assert details.rejected_prediction_tokens == 0 < details.accepted_prediction_tokens
        messages.append({"role": "assistant", "content": f"30 31 </think> {content}"})
    if together:
        until(lambda: running.metric("vllm:num_requests_running") == 1)  # the other one still runs
        beside.close()


def out_of_reach(cache, row):
    raise RuntimeError("the cache is out of reach")


@pytest.mark.parametrize(("stream", "fault"), [(True, False), (False, False), (False, True)])
def test_a_client_that_leaves_a_batch_leaves_the_others_there(gated, model, monkeypatch, stream, fault):
    """Or they go on one after another, if its caches cannot be taken out."""
    running, gate = gated
    if fault:
        monkeypatch.setattr(RowsCache, "extract", out_of_reach)
    first = running.open({"prompt": "1 2 3", "max_tokens": 30})
    until(lambda: gate.steps == 1)
    leaves = running.open({"prompt": "4 5 6", "max_tokens": 500, "stream": stream})
    stays = running.open({"prompt": "7 8 9 10", "max_tokens": 30})
    until(lambda: running.metric("vllm:num_requests_waiting") == 2)
    gate.open.release(4)  # blocks of all three
    until(lambda: gate.steps == 5)
    assert running.metric("vllm:num_requests_running") == 3
    leaves.close()
    gate.open.release(1)
    until(lambda: running.metric("vllm:num_requests_running") == 2)
    gate.open.release(10_000)
    for connection, prompt in ((first, [1, 2, 3]), (stays, [7, 8, 9, 10])):
        assert ids(answered(connection)["choices"][0]["text"]) == plain_greedy(model, prompt, 30)[0]
    assert b'finished_reason="abort"} 1.0' in running.send("GET", "/metrics")[1]
    again = running.complete("4 5 6", max_tokens=30)
    assert ids(again.choices[0].text) == plain_greedy(model, [4, 5, 6], 30)[0]


def test_a_client_that_leaves_before_its_row_begins_is_let_go(here, gate):
    """More rows than are read at once: the last ones wait in the batch. Some layers keep a state."""
    model = small.build("qwen3_5", seed=3)
    running = here(lambda: words(model, policy=gate))
    first = running.open({"prompt": "1 2 3", "max_tokens": 30})
    until(lambda: gate.steps == 1)
    leave = [running.open({"prompt": f"4 5 {number}", "max_tokens": 30}) for number in range(20)]
    until(lambda: running.metric("vllm:num_requests_waiting") == 20)
    gate.open.release(1)
    until(lambda: running.metric("vllm:num_requests_running") == 21)
    for connection in leave:
        connection.close()
    gate.open.release(10_000)
    assert ids(answered(first)["choices"][0]["text"]) == plain_greedy(model, [1, 2, 3], 30)[0]
    assert running.send("GET", "/health")[0] == 200


class FailsLater(ScriptedDrafter):
    """A drafter that takes no more than the prompt of texts that begin with 13."""

    def extend_context(self, features, cache, tokens):
        if cache.tokens[:1] == [13]:
            raise RuntimeError("the drafter is out of order")
        super().extend_context(features, cache, tokens)


@pytest.mark.parametrize("together", [False, True])
def test_a_drafter_that_fails_when_a_client_leaves_fails_no_other(here, model, together):
    drafter = FailsLater(list(range(64)), 64, 0.5)
    running = here(lambda: words(model, drafter, policy=0))
    leaves = running.open({"prompt": "13 4", "max_tokens": 6000, "stream": True})
    until(lambda: running.metric("vllm:generation_tokens_total") > 0)
    prompts = ["1 2 3", "4 5"] * 2

    def ask(prompt: str) -> list[int]:
        return ids(running.complete(prompt, max_tokens=20).choices[0].text)

    with ThreadPoolExecutor(4) as pool:
        answers = pool.map(ask, prompts * together)
        leaves.close()
        for prompt, answer in zip(prompts, answers, strict=False):
            assert answer == plain_greedy(model, ids(prompt), 20)[0]
    until(lambda: running.metric("vllm:num_requests_running") == 0)
    assert ask("1 2 3") == plain_greedy(model, [1, 2, 3], 20)[0]


def test_what_cannot_be_decoded_beside_others_keeps_its_place(gated, model):
    """A seed and log-probabilities wait for the batch before them, and what comes after waits for them."""
    running, gate = gated
    asked = [
        {"prompt": "1 2 3"},
        {"prompt": "4 5"},
        {"prompt": "6", "temperature": 1.0, "seed": 5},
        {"prompt": "7 8", "logprobs": 1},
        {"prompt": "9 9"},
        {"prompt": "1 1"},
    ]

    def ask(number: int) -> str:
        return running.complete(**asked[number], max_tokens=8).choices[0].text

    def gauge(name: str) -> float:
        return running.metric(f"vllm:num_requests_{name}")

    with ThreadPoolExecutor(6) as pool:
        answers = []
        for number in range(6):
            answers.append(pool.submit(ask, number))
            until(lambda count=number: gauge("waiting") == count and gate.steps == 1)
        while gauge("waiting") > 3:  # the third has not begun
            begun = gate.steps
            gate.open.release(1)
            until(lambda begun=begun: gate.steps > begun)
        until(lambda: (gauge("running"), gauge("waiting")) == (1, 3))  # it leaves one before it counts in the other
        gate.open.release(10_000)
        texts = [answer.result() for answer in answers]
    for number in (0, 1, 3, 4, 5):
        assert ids(texts[number]) == plain_greedy(model, ids(asked[number]["prompt"]), 8)[0]
    assert running.complete(**asked[2], max_tokens=8).choices[0].text == texts[2]


def test_another_model_is_loaded_when_a_request_names_it(here, tmp_path):
    """It waits for what is decoded; a drafter that was named and does not fit is that request's error."""
    for name, seed in (("one", 1), ("two", 2), ("three", 3)):
        save_target(qwen3_model(seed, vocab=TEXT_VOCAB), tmp_path / name)
    also = (f"{tmp_path / 'two'},ngram", f"{tmp_path / 'three'},{REAL / 'smollm2-135m-instruct'}")
    running = here(models=ModelOptions(tmp_path / "one", "ngram"), also=also)
    texts = {}
    for name in ("one", "two"):
        decoder = DFlashSpeculativeDecoder.from_pretrained(tmp_path / name, "ngram")
        texts["bundled" if name == "one" else name] = decoder.generate("AB", 40, chat=False)

    def ask(name: str) -> str:
        chunks = running.client.completions.create(model=name, prompt="AB", max_tokens=40, stream=True)
        return "".join(chunk.choices[0].text for chunk in chunks)

    assert texts["bundled"] != texts["two"]
    names = ["bundled", "two", "two", "bundled", "two", "bundled"]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(ask, names)) == [texts[name] for name in names]
    with pytest.raises(openai.NotFoundError, match="made for a target with hidden_size 576"):
        ask("three")
    assert ask("two") == texts["two"]
    (tmp_path / "one").rename(tmp_path / "elsewhere")
    with pytest.raises(openai.NotFoundError, match="'bundled' cannot be loaded: No checkpoint folder"):
        ask("bundled")
    with pytest.raises(openai.NotFoundError, match="served: 'bundled' and 'two' and 'three'"):
        ask("four")
    about = {model.id: model for model in running.client.models.list()}
    assert list(about) == ["bundled", "two", "three"]
    assert [about[name].loaded for name in about] == [False, True, False]
    assert (about["two"].engine, about["two"].drafter) == ("speculative", "ngram")
    assert not hasattr(about["three"], "engine")


@pytest.mark.parametrize(
    ("also", "message"),
    [
        ("{folder}/bundled", "Two models are called 'bundled'"),
        (",ngram", "an empty name"),
        ("{folder}/nowhere", "No checkpoint folder"),
        ("{folder}", "config.json is missing"),
        (f"{PAIR / 'target'},{{folder}}/nowhere", "No checkpoint folder"),
    ],
)
def test_further_models_that_are_not_there_or_have_one_name_are_refused_at_start(here, tmp_path, also, message):
    with pytest.raises(DFlashError, match=message):
        here(also=(also.format(folder=tmp_path),))


def test_a_model_has_the_name_of_its_folder_wherever_the_server_starts(monkeypatch):
    monkeypatch.chdir(PAIR / "target")
    assert list(by_name(ModelOptions("."), DecodeOptions(), ServeOptions(also=("../drafter/",)))) == [
        "target",
        "drafter",
    ]


@pytest.mark.slow
def test_a_minute_of_mixed_load_loses_nothing_and_needs_no_more_memory():
    counts, wrong, memory = load.run(60)
    assert not wrong
    assert all(counts[kind] > 5 for kind in ("whole", "streamed", "leaves", "new", "nonsense"))
    assert max(memory[4:]) < 1.1 * max(memory[:4])
