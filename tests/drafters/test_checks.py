"""What is no drafter, and what a drafter may not propose, is one clear error."""

from types import SimpleNamespace

import mlx.core as mx
import pytest
from support.errors import refused
from support.models import ScriptedDrafter, random_drafter, target

from dflash import DFlashSpeculativeDecoder, Drafter, Proposal
from dflash.core.errors import GenerationError, IncompatibleModelsError
from dflash.drafters.ngram import NgramDrafter

VOCAB = 32


def test_what_is_no_drafter_is_told_what_it_lacks():
    assert all(isinstance(drafter, Drafter) for drafter in (NgramDrafter(), random_drafter(0)))
    with pytest.raises(IncompatibleModelsError) as error:
        DFlashSpeculativeDecoder(target("llama", 2).model, SimpleNamespace(block_size=4, propose=None))
    refused(error, "SimpleNamespace is no Drafter", "target_layer_ids, bind, make_cache, extend_context")
    with pytest.raises(IncompatibleModelsError) as error:
        DFlashSpeculativeDecoder(target("llama", 2).model, "runs/one/drafter")
    refused(error, "load_drafter('runs/one/drafter')")


class ProposingDrafter(ScriptedDrafter):
    """Proposes whatever it is given."""

    def __init__(self, proposal: object):
        super().__init__([], VOCAB)
        self.proposal = proposal

    def propose(self, anchor, length, cache):
        return self.proposal


BAD_PROPOSALS = {
    "id of the vocabulary's size": (
        Proposal(mx.array([[1, VOCAB]])),
        "proposed the token id 32; this target",
    ),
    "id far outside": (Proposal(mx.array([[9_999_999, 1]])), "proposed the token id 9999999"),
    "id beyond 32 bits": (Proposal(mx.array([[2**40 + 3]], mx.int64)), "proposed the token id 1099511627779"),
    "negative id": (Proposal(mx.array([[1, -1]])), "proposed the token id -1"),
    "fractions": (
        Proposal(mx.array([[1.0, 2.0]])),
        "shape (1, 2) mlx.core.float32; expected an mx.array of int",
    ),
    "one axis": (Proposal(mx.array([1, 2])), "of shape (2,) mlx.core.int32; expected"),
    "two rows": (Proposal(mx.array([[1], [2]])), "of shape (2, 1)"),
    "more than asked for": (Proposal(mx.zeros((1, 8), mx.int32)), "of shape (1, 8) mlx.core.int32; expected"),
    "a list in the proposal": (Proposal([[1, 2]]), "tokens that are list"),
    "an array": (mx.array([[1, 2]]), "returned an array of shape (1, 2) mlx.core.int32; expected a dflash.Proposal"),
    "nothing": (None, "returned NoneType; expected a dflash.Proposal"),
}


@pytest.mark.parametrize("name", BAD_PROPOSALS)
def test_what_a_drafter_may_not_propose_is_one_clear_error(name):
    """Ids beyond the embedding's rows used to end the process."""
    proposal, words = BAD_PROPOSALS[name]
    decoder = DFlashSpeculativeDecoder(target("qwen3", 3), ProposingDrafter(proposal), block_size=8, policy="full")
    with pytest.raises(GenerationError) as error:
        decoder.spec_generate([3, 1, 4], 20)
    refused(error, "ProposingDrafter", words)
