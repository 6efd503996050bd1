"""Features of texts are read once: what is kept is used exactly, and only whole and for its target and layers."""

import mlx.core as mx
import pytest
from support.kinds import VOCAB, random_drafter
from support.models import qwen3_model, wrapped_tokenizer

from dflash import DFlashSpeculativeDecoder, LoadedTargetModel
from dflash.evaluation import features as features_module
from dflash.evaluation.features import Features, read
from dflash.evaluation.replay import replay
from dflash.evaluation.texts import Text, Texts, delete_texts, kept_texts

PROMPTS = [[3, 1, 2, 0, 1], [1, 1], [0], [2, 3, 3, 1, 0, 2, 1, 1, 3]]
LAYERS = (0, 1, 3)


def loaded(seed: int = 1, dtype: mx.Dtype = mx.float32) -> LoadedTargetModel:
    target = LoadedTargetModel(qwen3_model(seed, VOCAB), wrapped_tokenizer())
    target.model.set_dtype(dtype)
    return target


@pytest.fixture
def passes(monkeypatch) -> list[list[int]]:
    """The texts that the target had to read."""
    done, found = [], features_module.read
    monkeypatch.setattr(features_module, "read", lambda *args: done.append(args[1]) or found(*args))
    return done


def texts_of(target: LoadedTargetModel, folder, **options) -> tuple[Texts, list[Text]]:
    kept = Texts(target, [], folder, **options)
    return kept, kept.all(PROMPTS, 20)


def files(kept: Texts) -> set:
    return set(kept.folder.glob("*.safetensors"))


def test_features_that_are_held_are_not_read_again(tmp_path, passes):
    target = loaded()
    decoder = DFlashSpeculativeDecoder(target, random_drafter("dflash", 3))
    _, texts = texts_of(target, tmp_path)
    one = read(target, texts[0].tokens[:-1], LAYERS).nbytes
    expected = list(replay([decoder], texts))
    for held in (Features(most_bytes=one), Features()) * 2:
        assert list(replay([decoder], texts, features=held)) == expected
    rest = [text.tokens[:-1] for text in texts]
    assert passes == [*rest, *rest, *rest, *rest[1:]], "only the first has room in the small one"
    assert mx.array_equal(held.of(target, texts[0], (2,)), read(target, rest[0], (2,))).item(), "of other layers"


def test_another_call_finds_the_exact_features_beside_the_texts(tmp_path, passes):
    target = loaded(dtype=mx.bfloat16)
    kept, texts = texts_of(target, tmp_path)
    first = [Features(kept).of(target, text, LAYERS) for text in texts]
    assert len(passes) == len(texts)
    again, _ = texts_of(target, tmp_path)
    for text, own in zip(texts, first, strict=True):
        found = Features(again).of(target, text, LAYERS)
        assert found.dtype == own.dtype == mx.bfloat16
        assert mx.array_equal(found, own)
    assert len(passes) == len(texts)
    for text, layers in ((texts[0], (1, 0, 3)), (Text(texts[0].prompt, texts[0].answer[:9], 9, False), LAYERS)):
        Features(again).of(target, text, layers)
        Features(again).of(target, texts[0], LAYERS)  # which stay where they are
    assert len(passes) == len(texts) + 2, "other layers, and a shorter text"
    (listed,) = kept_texts(tmp_path)
    assert listed.texts == len(texts)
    assert len(files(kept)) == len(texts) + 2
    assert listed.features_nbytes == sum(file.stat().st_size for file in files(kept)) > listed.nbytes
    delete_texts(tmp_path)
    assert not tmp_path.exists()


def flipped(data: bytes) -> bytes:
    return data[:-7] + bytes([data[-7] ^ 1]) + data[-6:]


DAMAGE = {
    "cut": lambda data: data[:-5],
    "one bit": flipped,
    "another dtype": lambda data: data.replace(b'"F16"', b'"I16"', 1),
    "no checksum": lambda data: data.replace(b'"sha256"', b'"sha255"', 1),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_features_are_read_again(tmp_path, passes, damage, caplog):
    target = loaded(dtype=mx.float16)
    kept, (text, *_) = texts_of(target, tmp_path)
    expected = Features(kept).of(target, text, LAYERS)
    (file,) = files(kept)
    whole = file.read_bytes()
    file.write_bytes(DAMAGE[damage](whole))
    assert file.read_bytes() != whole
    for _ in range(2):
        assert mx.array_equal(Features(kept).of(target, text, LAYERS), expected)
    assert len(passes) == 2
    assert caplog.text.count(f"{file} is damaged") == 1


def test_features_of_another_target_are_not_used(tmp_path, passes):
    (ours, texts), (theirs, _) = (texts_of(loaded(seed), tmp_path) for seed in (1, 2))
    for kept in (ours, theirs):
        Features(kept).of(kept.target, texts[0], LAYERS)
    assert len(passes) == 2
    (mine,), (other,) = files(ours), files(theirs)
    assert mine.name == other.name
    other.write_bytes(mine.read_bytes())  # not even in their place
    found = Features(theirs).of(theirs.target, texts[0], LAYERS)
    assert mx.array_equal(found, read(theirs.target, texts[0].tokens[:-1], LAYERS))
    assert len(passes) == 3


def test_features_make_room_before_texts_and_those_of_one_call_take_half(tmp_path, passes, caplog):
    target = loaded()
    _, texts = texts_of(target, tmp_path)
    sizes = [read(target, text.tokens[:-1], LAYERS).nbytes for text in texts]
    passes.clear()
    most = 2 * (sizes[0] + sizes[1]) + 100
    for _ in range(2):
        small, _ = texts_of(target, tmp_path, most_bytes=most)
        for text in texts:
            Features(small).of(target, text, LAYERS)
    assert len(files(small)) == 2
    assert len(passes) == 4 + 2, "the last two, each time"
    assert caplog.text.count("are not kept: each call reads them") == 2, "once a call"
    less, _ = texts_of(target, tmp_path, most_bytes=1000)
    less.all([[2, 2]], 5)  # which has the folder bounded
    assert not files(less)
    assert kept_texts(tmp_path)[0].texts == len(texts) + 1
