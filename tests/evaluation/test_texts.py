"""The target's texts are its own, however they were written, and kept ones are used only whole and for their target."""

import json
import os

import mlx.core as mx
import pytest
from support.models import llama_model, plain_greedy, qwen3_model, wrapped_tokenizer

from dflash import LoadedTargetModel
from dflash.adapters.registry import ADAPTERS
from dflash.core.errors import GenerationError
from dflash.evaluation import texts
from dflash.evaluation.texts import Texts, delete_texts, kept_texts

PROMPTS = [[3, 1, 2, 0, 1], [1, 1], [0], [2, 3, 3, 1, 0, 2, 1, 1, 3]]


def target(seed: int = 1) -> LoadedTargetModel:
    return LoadedTargetModel(qwen3_model(seed, 32), wrapped_tokenizer())


def answers(of: Texts, count: int = 12, prompts=PROMPTS) -> list[list[int]]:
    return [text.answer for text in of.all(prompts, count)]


@pytest.fixture
def written(monkeypatch) -> list[list[int]]:
    """The prompts that the target had to answer."""
    asked, write = [], texts.write

    def recorded(target, prompts, *others):
        asked.extend(prompts)
        return write(target, prompts, *others)

    monkeypatch.setattr(texts, "write", recorded)
    return asked


def test_texts_are_written_once_and_a_longer_one_serves_for_shorter(tmp_path, written):
    loaded = target()
    expected = [plain_greedy(loaded.model, prompt, 12)[0] for prompt in PROMPTS]
    assert answers(Texts(loaded, [], tmp_path)) == expected
    assert answers(Texts(loaded, [], tmp_path)) == expected
    assert answers(Texts(loaded, [], tmp_path), 5) == [answer[:5] for answer in expected]
    assert written == PROMPTS
    answers(Texts(loaded, [], tmp_path), 13, PROMPTS[:1])
    assert written == [*PROMPTS, PROMPTS[0]]
    stop = expected[0][4]
    cut = [answer[: answer.index(stop) + 1] if stop in answer else answer for answer in expected]
    found = Texts(loaded, [stop], tmp_path).all(PROMPTS, 12)
    assert [text.answer for text in found] == cut
    assert [text.ended for text in found] == [stop in answer for answer in cut]
    assert answers(Texts(loaded, [stop], tmp_path), 99, PROMPTS[:1]) == cut[:1], "it ended before"
    assert len(written) == 2 * len(PROMPTS) + 1


@pytest.mark.parametrize(
    "other",
    [lambda: rounded(3), lambda: LoadedTargetModel(llama_model(1)), lambda: rounded(1, mx.float32)],
    ids=["weights", "architecture", "precision"],
)
def test_another_targets_texts_are_not_used(tmp_path, written, other):
    ours = Texts(rounded(1), [], tmp_path)
    answers(ours)
    theirs = Texts(other(), [], tmp_path)
    answers(theirs)
    assert len(written) == 2 * len(PROMPTS)
    for file in ours.folder.iterdir():  # not even in their place
        (theirs.folder / file.name).write_bytes(file.read_bytes())
    answers(theirs)
    assert len(written) == 3 * len(PROMPTS)


def test_texts_and_features_by_an_adapter_of_a_plug_in_are_not_used_once_it_has_changed(tmp_path, monkeypatch):
    target, folders = rounded(1), []
    for sources in ({}, {"qwen3": "before"}, {"qwen3": "now"}, {"llama": "now"}):
        monkeypatch.setattr(ADAPTERS, "source", sources.get)
        folders.append(Texts(target, [], tmp_path).folder)
    assert folders[0] == folders[3]
    assert len(set(folders)) == 3


def rounded(seed: int, stored: mx.Dtype = mx.bfloat16) -> LoadedTargetModel:
    """A target of weights that half precision holds."""
    loaded = target(seed)
    loaded.model.set_dtype(mx.bfloat16)
    loaded.model.set_dtype(stored)
    return loaded


DAMAGE = {
    "cut": lambda data: data[:-5],
    "another token": lambda data: data.replace(b"[", b"[1", 1),
    "no object": lambda data: b"[1, 2]",
    "no text": lambda data: b"\xff\xfe",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_text_is_written_again(tmp_path, written, damage, caplog):
    kept = Texts(target(), [], tmp_path)
    expected = answers(kept)
    (file,) = [path for path in kept.folder.iterdir() if json.loads(path.read_text()).get("answer") == expected[2]]
    file.write_bytes(DAMAGE[damage](file.read_bytes()))
    assert answers(kept) == expected
    assert written == [*PROMPTS, PROMPTS[2]]
    assert f"{file} is damaged" in caplog.text
    assert answers(kept) == expected
    assert len(written) == len(PROMPTS) + 1


@pytest.mark.parametrize("how", ["not in batches", "wrongly in batches"])
def test_what_mlx_lm_cannot_batch_is_written_one_by_one(tmp_path, monkeypatch, how):
    loaded = target()
    expected = [plain_greedy(loaded.model, prompt, 12)[0] for prompt in PROMPTS]
    if how == "not in batches":
        monkeypatch.setattr(texts, "unbatched_layer", lambda model: (0, "Solitary"))
        monkeypatch.setattr(texts, "generate_responses", None)
    else:
        wrong = [expected[0][:5] + [7] * 7, [7] * 12, expected[2], [*expected[3][:11], 7]]
        monkeypatch.setattr(texts, "generate_responses", lambda *_: enumerate(wrong))
    assert answers(Texts(loaded, [], tmp_path)) == expected


@pytest.mark.parametrize(("room", "rows"), [(3, 3), (99, 32)])
def test_as_many_texts_are_written_at_a_time_as_memory_holds(tmp_path, monkeypatch, room, rows):
    generate, asked = texts.generate_responses, []
    monkeypatch.setattr(texts, "rows_that_fit", lambda model, tokens: asked.append(tokens) or room)
    monkeypatch.setattr(texts, "generate_responses", lambda *args: asked.append(args[4]) or generate(*args))
    answers(Texts(target(), [], tmp_path), 12)
    assert asked == [max(map(len, PROMPTS)) + 12, rows]


def test_a_damaged_target_writes_no_texts(tmp_path):
    loaded = target()
    loaded.model.model.embed_tokens.weight = mx.full((32, 32), mx.nan)
    with pytest.raises(GenerationError, match="logits are not a number"):
        answers(Texts(loaded, [], tmp_path))
    assert not kept_texts(tmp_path)


def test_the_texts_that_were_not_used_for_longest_make_room(tmp_path, written):
    loaded, files = target(), []

    def files_of(kept: Texts):
        return {file for file in kept.folder.glob("*.json") if file.name != texts.ABOUT}

    for age, prompt in enumerate(PROMPTS):
        answers(kept := Texts(loaded, [], tmp_path), 12, [prompt])
        (new,) = files_of(kept).difference(files)
        os.utime(new, (age, age))
        files.append(new)
    answers(kept, 12, PROMPTS[:1])  # the first is used again
    room = sum(file.stat().st_size for file in files)
    answers(Texts(loaded, [], tmp_path, most_bytes=room), 12, [[5, 5, 5]])
    left = files_of(kept)
    assert files[0] in left
    assert files[1] not in left
    assert len(left) in (3, 4), "as many as have room"
    assert sum(file.stat().st_size for file in left) <= room


def test_an_interrupted_call_keeps_what_it_wrote(tmp_path, written):
    kept = Texts(target(), [], tmp_path)
    for number, _ in kept.answers(PROMPTS, 12):  # noqa: B007
        break
    answers(kept)
    assert sorted(written) == sorted([*PROMPTS, *(p for i, p in enumerate(PROMPTS) if i != number)])


def test_the_folder_is_listed_and_deleted_but_for_other_files(tmp_path):
    assert kept_texts(tmp_path / "none") == []
    for seed, prompts in ((1, PROMPTS), (3, PROMPTS[:1])):
        answers(Texts(target(seed), [], tmp_path / "texts"), 12, prompts)
    found = kept_texts(tmp_path / "texts")
    assert [kept.texts for kept in found] == [1, 4]
    assert {kept.name for kept in found} == {"a model in memory"}
    assert found[1].nbytes == sum(f.stat().st_size for f in found[1].folder.iterdir() if f.name != texts.ABOUT)
    mine = tmp_path / "texts" / "mine" / texts.ABOUT
    mine.parent.mkdir()
    mine.write_text("{}")
    delete_texts(tmp_path / "texts")
    assert [*(tmp_path / "texts").rglob("*")] == [mine.parent, mine]
    mine.unlink()
    mine.parent.rmdir()
    for _ in range(2):
        delete_texts(tmp_path / "texts")
        assert not (tmp_path / "texts").exists()


def test_a_folder_that_cannot_be_written_to_costs_only_the_keeping(tmp_path, caplog):
    (tmp_path / "file").write_text("x")
    loaded = target()
    kept = Texts(loaded, [], tmp_path / "file" / "texts")
    assert answers(kept) == [plain_greedy(loaded.model, prompt, 12)[0] for prompt in PROMPTS]
    kept.keep_features(PROMPTS[0], [0], mx.ones((1, 5, 2)))
    assert caplog.text.count("The texts are not kept") == 1


def test_a_folder_that_may_only_be_read_serves_its_texts(tmp_path, written, monkeypatch):
    loaded = target()
    expected = answers(Texts(loaded, [], tmp_path))

    def forbidden(*_args, **_options):
        raise PermissionError

    for owner, name in ((os, "utime"), (texts, "atomic_write"), (texts.Path, "unlink")):
        monkeypatch.setattr(owner, name, forbidden)
    assert answers(Texts(loaded, [], tmp_path, most_bytes=0), 12, [*PROMPTS, [5]])[: len(PROMPTS)] == expected
    assert written == [*PROMPTS, [5]]
