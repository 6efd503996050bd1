"""Plans: which conversations are used, and with which draft of their response."""

import pytest
from support.conversations import NO_HELDOUT, TINY, prompts, texts, turns, with_template
from support.models import STOP, TEXT_VOCAB, byte_tokenizer, qwen3_model

from dflash import LoadedTargetModel
from dflash.core.errors import DataError
from dflash.training.data import responses
from dflash.training.data.chat import encode, encode_draft
from dflash.training.data.dataset import open_dataset
from dflash.training.data.plan import PrepareSettings, make_plan
from dflash.training.data.prepare import prepare


def test_the_given_response_is_the_draft_where_it_can_be_told(target):
    def draft(talk, by):
        return encode_draft(talk, by, True, {}, encode(talk.unanswered(), by, True, {}).tokens)

    assert byte_tokenizer().decode(draft(turns("q", "ab"), target)) == "ab" + STOP
    assert draft(turns("q"), target) is None
    shouting = with_template("{% for m in messages %}{{ m.content | upper }}{% endfor %}")
    assert draft(turns("q", "ab"), shouting) is None


@pytest.mark.parametrize("temp", [0.0, 1.0])
def test_only_greedy_responses_have_drafts(target, tmp_path, monkeypatch, temp):
    checked = []
    monkeypatch.setattr(responses, "accepted_prefixes", lambda target, prompts, drafts: checked.extend(drafts) or [])
    options = PrepareSettings(max_tokens=5, regenerate=True, temp=temp)
    prepare([turns("q", "a"), turns("r", "b")], target, options, tmp_path / "given", heldout=NO_HELDOUT)
    prepare([turns("q"), turns("r")], target, options, tmp_path / "bare", heldout=NO_HELDOUT)
    assert len(checked) == (2 if temp == 0 else 0)
    given, bare = (open_dataset(tmp_path / name, "train", target) for name in ("given", "bare"))
    assert texts(given) == texts(bare)


def test_repeated_prompts_stay_once_and_what_cannot_be_used_is_counted(target):
    talks = [
        *(turns("q", "a"), turns("q", "b"), turns("q"), turns("q", "a", "q", "c")),
        *(turns("x" * 99), turns("r", "y" * 99), turns("e", "")),
    ]
    plan = make_plan(talks, target, PrepareSettings(max_length=90))
    assert plan.dropped == {"duplicate": 2, "too_long": 2, "no_response": 1}
    assert plan.conversations == [talks[0], talks[3]]
    with pytest.raises(DataError, match=r"None of the 1 conversations can be used \(1 too long\); max_length is 90"):
        make_plan(talks[4:5], target, PrepareSettings(max_length=90))


def test_no_sequence_is_longer_than_asked_or_than_the_target_can_read(target, tmp_path):
    asked = PrepareSettings(max_length=60, max_tokens=300)
    prepare(prompts(4), target, asked, tmp_path / "asked", heldout=NO_HELDOUT)
    assert (open_dataset(tmp_path / "asked", "train", target).lengths == 60).all()
    short = LoadedTargetModel(qwen3_model(1, TEXT_VOCAB, **TINY, max_position_embeddings=50), target.tokenizer)
    prepare(prompts(4), short, PrepareSettings(), tmp_path / "able", heldout=NO_HELDOUT)
    assert (open_dataset(tmp_path / "able", "train", short).lengths == 50).all()
