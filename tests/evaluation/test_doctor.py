"""What ``dflash doctor --drafter`` says about every kind of drafter."""

import dataclasses

from support.cli import assert_one_error, invoke
from support.models import random_drafter

from dflash import load_drafter, save_drafter
from dflash.drafters.autoregressive import AutoregressiveDrafter
from dflash.drafters.dflash2 import DFlash2Config, DFlash2DraftModel
from dflash.drafters.kinds import drafters
from dflash.evaluation.doctor import MEANINGS, drafter_report


def test_doctor_shows_kind_weights_and_the_meaning_of_every_key(tmp_path):
    shared = vars(random_drafter(1).config) | {"is_causal": False}
    own = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 4, "selector_top_k": 6}
    save_drafter(DFlash2DraftModel(DFlash2Config(**shared, **own)), tmp_path)
    result = invoke("doctor", "--drafter", tmp_path)
    assert result.exit_code == 0, result.output
    lines = {line.split()[0]: " ".join(line.split()[1:]) for line in result.stdout.splitlines() if line.strip()}
    assert lines["kind"].startswith("dflash2: A DFlash 2 drafter.")
    assert lines["drafts"] == "up to 7 tokens a block"
    assert lines["reads"] == "the outputs of the target's layers 0, 1, 3"
    assert lines["weights"].startswith("36 tensors, ")
    assert lines["selector_top_k"] == f"6: {MEANINGS['selector_top_k']}"
    assert lines["is_causal"].startswith("false: ")
    assert lines["layer_types"].startswith("2 x full_attention: ")
    assert set(lines) >= {field.name for field in dataclasses.fields(DFlash2Config)}


def test_every_kind_is_described_in_plain_words_and_every_key_of_a_published_one_has_a_meaning():
    published = (drafters.get(kind) for kind in ("dflash", "dflash2", "dspark", "domino"))
    assert {field.name for kind in published for field in dataclasses.fields(kind.config_class)} <= MEANINGS.keys()
    kinds = [AutoregressiveDrafter, *drafters.all().values()]
    for kind in (*kinds, *(type(load_drafter(name)) for name in ("ngram", "mtp", "ngram+mtp"))):
        description = kind.__doc__.partition("\n")[0]
        assert ":class:" not in description
        assert description.endswith(".")


def test_a_drafter_without_weights_is_described_and_one_that_is_not_there_is_one_line():
    report = drafter_report(load_drafter("ngram"), "ngram")
    assert report["reads"] == "the tokens alone"
    assert report["kind"].startswith("ngram: ")
    assert_one_error(invoke("doctor", "--drafter", "no/such/folder"), "no/such/folder")
