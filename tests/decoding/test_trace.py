"""What a trace says is what happened, it changes nothing, and a profile adds up."""

import json

import mlx.core as mx
import numpy as np
import pytest
from support.errors import refused
from support.models import TEXT_VOCAB, byte_tokenizer, random_drafter, target, wrapped_tokenizer, writer

from dflash import DFlashSpeculativeDecoder, LoadedTargetModel, Policy, Proposal, TraceFile
from dflash.core.errors import DataError, DFlashError, GenerationError
from dflash.decoding import inspection
from dflash.decoding.block import Block, Decoding
from dflash.decoding.inspection import TOP, inspect, inspected_record
from dflash.decoding.profile import Profile
from dflash.decoding.trace import read_records, shown_pieces

PROMPT = [65, 66, 67]


class Pausing(Policy):
    """Two blocks of three drafts, then three plain steps, and so on; says why."""

    def __init__(self):
        self.blocks = self.left = 0

    def sleep(self):
        return self.left

    def verify_length(self, drafts):
        return min(3, drafts.count)

    def observe(self, block):
        self.left -= block.asleep
        self.blocks += not block.asleep
        if not block.asleep and self.blocks % 2 == 0:
            self.left = 3

    def why(self):
        return {"blocks": float(self.blocks)}


def random_decoder(**options) -> DFlashSpeculativeDecoder:
    loaded = LoadedTargetModel(target("qwen3", 1, TEXT_VOCAB).model, wrapped_tokenizer())
    return DFlashSpeculativeDecoder(loaded, random_drafter(3, TEXT_VOCAB), **({"policy": "full"} | options))


def traced(decoder: DFlashSpeculativeDecoder, **options):
    records: list[dict] = []
    asked = {"policy": "full"} | options
    responses = list(decoder.stream_generate(PROMPT, trace=records.append, **asked))
    return records[0], records[1:], responses


# --- what it says -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "seed": 3}, {"profile": True}, {"policy": "adaptive"}])
def test_the_text_is_the_same_under_a_trace_and_a_profile(options):
    asked = {"max_tokens": 40} | options
    plain = list(random_decoder().stream_generate(PROMPT, **(asked | {"profile": False})))
    _, blocks, responses = traced(random_decoder(), **asked)
    assert [t for r in responses for t in r.tokens] == [t for r in plain for t in r.tokens]
    text = "".join(r.text for r in plain)
    assert text == "".join(b["text"] for b in blocks) == "".join(p for b in blocks for p in b["pieces"])


def test_blocks_tell_what_was_drafted_committed_and_why():
    request, blocks, responses = traced(random_decoder(), max_tokens=30, policy=Pausing())
    assert request["prompt_tokens"] == PROMPT
    assert request["prompt"] == "".join(byte_tokenizer().decode([t]) for t in PROMPT)
    assert request["options"] == {"max_tokens": 30, "policy": "Pausing"}
    position = len(PROMPT)
    for number, (block, response) in enumerate(zip(blocks, responses, strict=True)):
        assert (block["number"], block["position"]) == (number, position)
        assert block["tokens"] == response.tokens
        assert block["drafts"][: block["verified"]] == response.drafted
        assert block["tokens"][: block["accepted"]] == block["drafts"][: block["accepted"]]
        if block["drafts"]:  # a greedy target's likeliest token is what it commits, and the drafter's what it drafts
            assert [row[0] for row in block["target_top"]["tokens"]][: len(block["tokens"])] == block["tokens"]
            assert [row[0] for row in block["draft_top"]["tokens"]] == block["drafts"]
        position += len(block["tokens"])
    assert [b["asleep"] for b in blocks[:7]] == [False, False, False, True, True, True, False]
    assert [(len(b["drafts"]), b["verified"]) for b in blocks[:4]] == [(0, 0), (7, 3), (7, 3), (0, 0)]
    assert [b["why"] for b in blocks[:4]] == [{}, {"blocks": 1.0}, {"blocks": 2.0}, {"blocks": 2.0}]
    assert blocks[-1]["finish_reason"] == responses[-1].finish_reason == "length"


def test_every_token_that_a_trace_names_has_a_text_once():
    _, blocks, _ = traced(random_decoder(), max_tokens=30)
    texts: dict[str, str] = {}
    for block in blocks:
        assert not texts.keys() & block["texts"].keys()
        texts |= block["texts"]
        rows = [*block.get("draft_top", {}).get("tokens", []), *block.get("target_top", {}).get("tokens", [])]
        for token in {*block["tokens"], *block["drafts"], *(t for row in rows for t in row)}:
            assert texts[str(token)] == byte_tokenizer().decode([token])


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("on_cpu", [True, False])
def test_probabilities_are_those_of_the_logits(monkeypatch, on_cpu, sparse):
    """On the host and on the device, in half precision too, over the vocabulary or over a few candidates."""
    monkeypatch.setattr(inspection, "on_cpu", lambda: on_cpu)
    rng = np.random.default_rng(0)
    vocab, drafts, verified = 40, 5, 3
    logits = rng.normal(size=(drafts, vocab)) * 3
    kept = np.stack([rng.permutation(vocab)[:6] for _ in range(drafts)]) if sparse else np.tile(range(vocab), (5, 1))
    scores = np.take_along_axis(logits, kept, axis=-1)
    tokens = kept[np.arange(drafts), scores.argmax(-1)]
    target_logits = mx.array(rng.normal(size=(verified + 1, vocab)) * 3).astype(mx.bfloat16)
    proposal = Proposal(
        mx.array(tokens[None]), mx.array(scores[None].astype(np.float32)), mx.array(kept[None]) if sparse else None
    )
    inspected = inspect(proposal, target_logits)
    block = Block(tokens[:verified].tolist(), [0], 0, drafts, inspected=inspected, order=list(range(drafts)))
    record = inspected_record(block)

    def check(name: str, scores: np.ndarray, kept: np.ndarray, own: np.ndarray) -> None:
        chances = np.exp(scores - scores.max(-1, keepdims=True))
        chances /= chances.sum(-1, keepdims=True)
        best = np.argsort(-chances, axis=-1, kind="stable")[:, :TOP]
        np.testing.assert_allclose(
            record[f"{name}_top"]["probabilities"], np.take_along_axis(chances, best, -1), atol=2e-5
        )
        assert record[f"{name}_top"]["tokens"] == np.take_along_axis(kept, best, -1).tolist()
        wanted = [c[k == t].sum() for c, k, t in zip(chances, kept, own, strict=False)]
        np.testing.assert_allclose(record[f"{name}_probability"], wanted, atol=2e-5)

    assert record["drafts"] == tokens.tolist()
    check("draft", scores, kept, tokens)
    everything = np.tile(np.arange(vocab), (verified + 1, 1))
    check("target", np.array(target_logits.astype(mx.float32)), everything, tokens[:verified])


@pytest.mark.parametrize("stop", ["six", " th", "seven ei", "née", None])
def test_shown_pieces_join_to_the_answer_that_a_stop_string_cut(stop):
    """A character of several tokens comes with its last one."""
    text = "one two three café 🙂 née four five six seven eight nine"
    _, blocks, responses = traced(writer(text, PROMPT, p=0.6), stop_strings=[stop] if stop else None)
    shown = [piece for pieces in shown_pieces(blocks) for piece in pieces]
    answer = "".join(r.text for r in responses)
    assert "".join(text for text, _, _ in shown) == answer == (text.split(stop)[0] if stop else text)
    assert all(text in blocks[number]["pieces"][token] for text, number, token in shown)
    assert "\ufffd" not in answer


def test_a_drafter_without_logits_is_traced_without_its_probabilities():
    _, blocks, _ = traced(writer("one two three", PROMPT))
    assert all("draft_top" not in block for block in blocks)
    assert "target_top" in blocks[1]


def test_nothing_is_inspected_where_nobody_watches(monkeypatch):
    def fail(*_):
        raise AssertionError("inspected")

    monkeypatch.setattr("dflash.generate.inspect", fail)
    list(random_decoder().stream_generate(PROMPT, max_tokens=10, profile=True))
    with pytest.raises(AssertionError):
        traced(random_decoder(), max_tokens=10)


def test_a_trace_of_another_kind_is_refused():
    with pytest.raises(GenerationError) as error:
        random_decoder().stream_generate(PROMPT, trace=[])
    refused(error, "trace", "list", "records.append")
    with pytest.raises(GenerationError) as error:
        random_decoder().spec_generate(PROMPT, trace=print)
    refused(error, "stream_generate")


# --- files ------------------------------------------------------------------------------------------------


def test_a_file_holds_what_a_list_gets_a_line_a_record(tmp_path):
    """As it goes: what was answered is in it, even if the request never ends."""
    path, lengths = tmp_path / "new" / "trace.jsonl", []
    file = TraceFile(path, drafter="mine")
    for _ in random_decoder().stream_generate(PROMPT, max_tokens=20, trace=file):
        lengths.append(len(path.read_text().splitlines()))
    assert lengths == list(range(2, len(lengths) + 2))
    file.close()
    with pytest.raises(DFlashError, match="is closed; make another"):
        list(random_decoder().stream_generate(PROMPT, max_tokens=3, trace=file))
    request, *blocks = read_records(path)
    _, same, _ = traced(random_decoder(), max_tokens=20)
    timeless = [{k: v for k, v in b.items() if k not in ("seconds", "time")} for b in same]
    assert [{k: v for k, v in b.items() if k not in ("seconds", "time")} for b in blocks] == timeless
    assert (request["drafter"], request["target"]) == ("mine", "qwen3")


def test_a_path_is_replaced_and_closed(tmp_path):
    path = tmp_path / "trace.jsonl"
    for _ in range(2):
        list(random_decoder().stream_generate(PROMPT, max_tokens=5, trace=path))
    assert [record["record"] for record in read_records(path)].count("request") == 1


def test_a_second_writer_is_refused_until_the_first_has_closed_its_file(tmp_path):
    path = tmp_path / "trace.jsonl"
    with TraceFile(path) as first:
        answer = random_decoder().stream_generate(PROMPT, max_tokens=5, trace=first)
        next(answer)
        with pytest.raises(DFlashError, match=rf"is writing the trace {path}; name another"):
            next(random_decoder().stream_generate(PROMPT, max_tokens=5, trace=path))
        list(answer)
    assert [record["record"] for record in read_records(path)][:2] == ["request", "block"]
    TraceFile(path).close()


def test_a_disk_that_is_full_is_named_and_closing_says_no_more(tmp_path):
    with (
        pytest.raises(OSError, match=r"^Cannot write the trace /dev/full: No space left on device\.$"),
        TraceFile("/dev/full") as file,
    ):
        file({"record": "request"})


def test_a_trace_that_was_cut_is_read_to_its_last_whole_line(tmp_path):
    path = tmp_path / "trace.jsonl"
    list(random_decoder().stream_generate(PROMPT, max_tokens=20, trace=path))
    records = list(read_records(path))
    path.write_text(path.read_text()[:-40])
    assert list(read_records(path)) == records[:-1]


@pytest.mark.parametrize("text", ['{"a": 1}\n', "[]\n", "no\n", '{"record": "request", "format": 99}\n', '{"record'])
def test_other_files_are_refused_in_one_line(tmp_path, text):
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(DataError) as error:
        list(read_records(path))
    refused(error, "x.jsonl:1", "--trace")
    with pytest.raises(DataError) as error:
        list(read_records(tmp_path / "none.jsonl"))
    refused(error, "none.jsonl")


def test_a_file_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="Cannot write the trace"):
        TraceFile(tmp_path / "file" / "trace.jsonl")


# --- seconds ----------------------------------------------------------------------------------------------


def test_seconds_by_part_add_up_to_the_time_of_the_request():
    _, blocks, responses = traced(random_decoder(), max_tokens=30, policy=Pausing(), profile=True)
    assert set(blocks[0]["seconds"]) == {"prefill", "host"}
    assert set(blocks[1]["seconds"]) == {"draft", "verify", "rewind", "host"}
    assert set(blocks[3]["seconds"]) == {"plain", "host"}
    total = sum(seconds for b in blocks for seconds in b["seconds"].values())
    assert total == pytest.approx(blocks[-1]["time"], abs=1e-4)
    assert [r.profile for r in responses[:-1]] == [None] * (len(responses) - 1)
    profile = responses[-1].profile
    assert sum(profile.seconds.values()) == pytest.approx(total)
    assert profile.plain_steps == sum(b["asleep"] for b in blocks)
    drafted = [b for b in blocks[1:] if not b["asleep"]]
    assert profile.blocks == len(drafted)
    assert profile.lengths[3].accepted == sum(b["accepted"] for b in drafted if b["verified"] == 3)
    assert profile.lengths[3].expected()["blocks"] == np.mean(
        [b["why"]["blocks"] for b in drafted if b["verified"] == 3]
    )
    json.dumps(profile.to_dict())


def test_what_a_policy_expects_does_not_stand_for_what_was_measured():
    profile, seconds = Profile(), {"draft": 0.01, "verify": 0.02, "rewind": 0.0, "host": 0.5}
    block = {"record": "block", "number": 1, "asleep": False, "verified": 2, "accepted": 1, "tokens": [1, 2]}
    profile(block | {"seconds": seconds, "why": {"seconds": 9.0, "blocks": 7.0}})
    (length,) = profile.to_dict()["lengths"]
    assert (length["seconds"], length["blocks"]) == (pytest.approx(0.03), 1)
    assert length["why"] == {"seconds": 9.0, "blocks": 7.0}


@pytest.mark.parametrize("profile", [False, True])
def test_a_profile_waits_for_every_part_and_a_trace_does_not(monkeypatch, profile):
    made = []
    monkeypatch.setattr("dflash.generate.Decoding", lambda *a, **k: made.append(Decoding(*a, **k)) or made[-1])
    request, _, _ = traced(random_decoder(), max_tokens=12, profile=profile)
    assert [run.wait for run in made] == [request["parts_apart"]] == [profile]
