"""One decoder and several threads: an answer is right or refused, and never another text."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import mlx.core as mx
import pytest
from support.models import ScriptedDrafter, plain_greedy, target, wrapped_tokenizer, writer

from dflash import DFlashSpeculativeDecoder, LoadedTargetModel
from dflash.core.errors import GenerationError

PROMPT = [3, 1, 4]


class Slow(ScriptedDrafter):
    """Proposes when it is told to ``go``, and says when it is asked."""

    def __init__(self, text, vocab):
        super().__init__(text, vocab)
        self.asked_once, self.go = Event(), Event()

    def propose(self, *args):
        self.asked_once.set()
        assert self.go.wait(60)
        return super().propose(*args)


def slow_decoder() -> tuple[DFlashSpeculativeDecoder, list[int]]:
    loaded = target("llama", 2)
    text = PROMPT + plain_greedy(loaded.model, PROMPT, 20)[0]
    return DFlashSpeculativeDecoder(loaded, Slow(text, 32), policy="full"), text


BEGINS = {
    "a request": lambda decoder, _: decoder.spec_generate(PROMPT, 20),
    "a request with a tree": lambda decoder, _: decoder.spec_generate(PROMPT, 20, tree=4),
    "a prompt cache": lambda decoder, _: decoder.cache_prompt(PROMPT, decoder.make_prompt_cache()),
    "a batch": lambda _, loaded: DFlashSpeculativeDecoder(
        loaded, ScriptedDrafter([], 32), wrapped_tokenizer()
    ).batch_generate([PROMPT]),
    "another decoder": lambda _, loaded: DFlashSpeculativeDecoder(loaded, ScriptedDrafter([], 32)).spec_generate([1]),
}


@pytest.mark.parametrize("name", BEGINS)
def test_what_begins_while_another_thread_computes_is_refused_and_disturbs_nothing(name):
    decoder, text = slow_decoder()
    with ThreadPoolExecutor(1) as other:
        answer = other.submit(lambda: decoder.spec_generate(PROMPT, 20).tolist())
        assert decoder.draft_model.asked_once.wait(60)
        with pytest.raises(GenerationError, match=r"Another thread is computing with this target; decode in one"):
            BEGINS[name](decoder, decoder.loaded_target)
        decoder.draft_model.go.set()
        assert answer.result() == [text]
    assert decoder.spec_generate(PROMPT, 20).tolist() == [text]


def evaluated_writer(text: str) -> DFlashSpeculativeDecoder:
    decoder = writer(text, p=0.5)
    mx.eval(decoder.target_model.parameters())  # a lazy array belongs to the thread that made it
    return decoder


def test_answers_that_have_begun_go_on_in_turns():
    text = "one text, written in blocks of several tokens"
    decoder, shown = evaluated_writer(text), ["", ""]
    answers = [decoder.generate([65, 66], stream=True) for _ in range(2)]
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as two:
        for turn in range(200):
            shown[turn % 2] += (one, two)[turn % 2].submit(next, answers[turn % 2], "").result()
    assert shown == [text, text]


def test_many_threads_at_once_write_the_text_or_are_refused():
    text = "one text"
    decoder = evaluated_writer(text)

    def answer(_: int) -> str:
        try:
            return decoder.generate([65, 66])
        except GenerationError as error:
            return "refused" if "Another thread" in str(error) else str(error)

    with ThreadPoolExecutor(4) as threads:
        answers = set(threads.map(answer, range(60)))
    assert text in answers
    assert answers <= {text, "refused"}
    assert decoder.generate([65, 66]) == text


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_decoder_cannot_be_copied(how):
    decoder = DFlashSpeculativeDecoder(LoadedTargetModel(target("llama", 2).model), ScriptedDrafter([], 32))
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        how(decoder)
