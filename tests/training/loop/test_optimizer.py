"""Which parameters get which optimiser, and how learning rates run over the steps."""

import math

import mlx.core as mx
import pytest
from support.runs import recipe

import dflash
from dflash.core.files import flat
from dflash.core.settings import SettingsError
from dflash.training.drafters.init import new_drafter
from dflash.training.loop.optimizer import AdamWSettings, MuonSettings, Optimizer, is_inner_matrix


def rates(settings: AdamWSettings | MuonSettings, steps: int) -> list[dict[str, float]]:
    """The learning rates that ``steps`` updates really use."""
    parameters = {"w": mx.zeros((2, 2)), "b": mx.zeros((2,))}
    optimizer, used = Optimizer(parameters, settings, steps), []
    for _ in range(steps):
        optimizer.update(parameters, parameters)
        used.append(optimizer.learning_rates())
    return used


def test_adamw_warms_up_linearly_and_decays_as_a_cosine():
    used = [rate["learning_rate"] for rate in rates(AdamWSettings(learning_rate=0.5, warmup=0.1), 50)]
    expected = [0.5 * (i + 1) / 6 for i in range(5)]
    expected += [0.25 * (1 + math.cos(math.pi * i / 45)) for i in range(45)]
    assert used == pytest.approx(expected, rel=1e-5, abs=1e-7)


def test_muon_warms_up_stays_flat_and_decays_whatever_the_length():
    settings = MuonSettings(matrix_learning_rate=0.5, learning_rate=0.25, warmup_steps=4, decay_steps=5)
    for steps in (12, 20):
        used = rates(settings, steps)
        shape = [(i + 1) / 5 for i in range(4)] + [1.0] * (steps - 9) + [i / 6 for i in (5, 4, 3, 2, 1)]
        assert [rate["matrix_learning_rate"] for rate in used] == pytest.approx([0.5 * s for s in shape])
        assert [rate["learning_rate"] for rate in used] == pytest.approx([0.25 * s for s in shape])


def test_muon_settles_at_a_part_of_its_peak_after_the_fast_steps():
    settings = MuonSettings(learning_rate=1.0, warmup_steps=0, decay_steps=0, fast_steps=3, settled=0.25)
    assert [rate["learning_rate"] for rate in rates(settings, 6)] == [1.0, 1.0, 1.0, 0.25, 0.25, 0.25]


def test_slopes_that_meet_leave_no_flat_part_and_are_warned_of():
    settings = MuonSettings(learning_rate=1.0, warmup_steps=4, decay_steps=5)
    assert [rate["learning_rate"] for rate in rates(settings, 6)] == pytest.approx([0.2, 0.4, 0.6, 0.5, 2 / 6, 1 / 6])
    assert "more than the 6 steps of this run" in (settings.warning(6) or "")
    assert settings.warning(9) is None


def test_muon_takes_the_matrices_inside_a_drafter_and_adamw_the_rest(folder):
    drafter = new_drafter(recipe(folder, "x").drafter, dflash.load_target(folder / "target"))
    parameters = drafter.trainable_parameters()
    state = Optimizer(parameters, MuonSettings(), 10).state
    by_muon = {name.split(".", 2)[2].removesuffix(".v") for name in state if name.startswith("states.0.")}
    by_adamw = {name.split(".", 2)[2].removesuffix(".v") for name in state if name.startswith("states.1.")}
    matrices = {name for name, value in flat(parameters).items() if value.ndim == 2}
    assert by_muon - {"step", "learning_rate"} == matrices
    assert matrices >= {"fc.weight", "layers.0.self_attn.q_proj.weight", "layers.0.mlp.down_proj.weight"}
    assert "norm.weight" in by_adamw
    assert not by_adamw & matrices


@pytest.mark.parametrize(
    "table", ["embed_tokens", "lm_head", "markov_head.markov_w1", "confidence_head", "candidate_selector.codebook"]
)
def test_muon_leaves_tables_of_tokens_and_heads_to_adamw(table):
    assert is_inner_matrix("layers.0.mlp.up_proj.weight", mx.ones((3, 2)))
    assert not is_inner_matrix(f"{table}.weight", mx.ones((3, 2)))


def test_adamw_clips_the_gradient_and_corrects_its_bias():
    parameters, gradients = {"w": mx.zeros((4,))}, {"w": mx.full((4,), 50.0)}
    updated, norm = Optimizer(parameters, AdamWSettings(learning_rate=0.1, warmup=0.5), 2).update(parameters, gradients)
    assert norm.item() == pytest.approx(100)
    assert updated["w"].tolist() == pytest.approx([-0.05] * 4, rel=1e-4)  # the first step is one learning rate


def test_impossible_settings_name_the_limit():
    with pytest.raises(SettingsError, match=r"warmup must be at least 0 and below 1, got 1\.5"):
        AdamWSettings(warmup=1.5)
    with pytest.raises(SettingsError, match="settled must be above 0, got nan"):
        MuonSettings(settled=math.nan)
    with pytest.raises(TypeError):
        AdamWSettings("adamw", 1e-3)  # type: ignore[misc]
