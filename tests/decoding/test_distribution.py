"""Texts are distributed as the target's own, token by token and together, under every option and rule.

The target and the drafter are tables: row ``t`` holds the logits after token ``t``. So the probability of each text
of three tokens is known, by a plain NumPy reading of what mlx-lm's options mean. Drafts are chains or trees.
"""

import itertools
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.statistics import chi_square, chi_square_limit

from dflash import DecodeOptions, Proposal, Verified
from dflash.core.trees import rows_before
from dflash.decoding.sampling import process_logits
from dflash.decoding.speculative import SpeculativeSampling, drawn, speculative_sampling
from dflash.decoding.verify import first_mismatch, sample_target, token_ids
from dflash.drafters.tree import TreeDrafter

V, PROMPT, LENGTH, DRAFTS = 4, [2, 0, 2], 3, 2
TARGET = np.random.default_rng(29).normal(size=(V, V))
DRAFTER = TARGET + 0.6 * np.random.default_rng(30).normal(size=(V, V))


@dataclass(frozen=True, eq=False)
class Asked:
    """Options of decoding, how many texts are drawn, how many candidates the drafter has, how many drafts a tree."""

    options: dict[str, Any]
    draws: int = 300
    candidates: int | None = None
    nodes: int | None = None
    temp: float = 0.9

    @property
    def checked(self) -> DecodeOptions:
        return DecodeOptions(temp=self.temp, **self.options)


def distribution(logits: np.ndarray, temp: float, options: dict[str, Any]) -> np.ndarray:
    """The probability of each token, by the meaning of mlx-lm's filters, in its order."""
    p = np.exp(logits - logits.max())
    p /= p.sum()
    kept = np.ones(V, bool)
    if top_p := options.get("top_p"):
        kept &= np.array([p[p > own].sum() < top_p for own in p])  # what is more probable is not enough
    if min_p := options.get("min_p"):
        kept &= p >= min_p * p.max()
    if top_k := options.get("top_k"):
        kept &= np.argsort(np.argsort(-p)) < top_k
    hot = np.where(kept, p ** (1 / temp), 0.0)
    return hot / hot.sum()


def processed(tokens: list[int], logits: np.ndarray, options: dict[str, Any]) -> np.ndarray:
    """Logits after ``tokens``, by the meaning of mlx-lm's processors, in its order."""
    logits = logits.copy()
    for token, bias in options.get("logit_bias", {}).items():
        logits[token] += bias
    last = {
        name: tokens[-options.get(f"{name}_context_size", 20) :] for name in ("repetition", "presence", "frequency")
    }
    for token in set(last["repetition"]) if options.get("repetition_penalty") else ():
        penalty = options["repetition_penalty"]
        logits[token] *= penalty if logits[token] < 0 else 1 / penalty
    for token in set(last["presence"]):
        logits[token] -= options.get("presence_penalty", 0.0)
    for token in last["frequency"]:
        logits[token] -= options.get("frequency_penalty", 0.0)
    return logits


def probabilities(asked: Asked) -> dict[tuple[int, ...], float]:
    """Of every text of three tokens, by the chain rule."""
    found = {}
    for text in itertools.product(range(V), repeat=LENGTH):
        p, tokens = 1.0, list(PROMPT)
        for token in text:
            p *= distribution(processed(tokens, TARGET[tokens[-1]], asked.options), asked.temp, asked.options)[token]
            tokens.append(token)
        found[text] = p
    return found


def proposal_after(anchor: int, asked: Asked) -> Proposal:
    """The drafter's best tokens, each position by itself, with the logits of all tokens or of some candidates."""
    rows = mx.array(DRAFTER[[anchor, (anchor + 1) % V]].astype(np.float32))
    proposal = Proposal(mx.argmax(rows, axis=-1)[None].astype(mx.int64), rows[None])
    if asked.candidates is None:
        return proposal
    ids = mx.argsort(-rows, axis=-1)[:, : asked.candidates]
    return replace(proposal, logits=mx.take_along_axis(rows, ids, axis=-1)[None], candidates=ids[None])


def tree_after(anchor: int, asked: Asked) -> Proposal:
    """The best tree through the same block."""
    block = proposal_after(anchor, asked)
    return TreeDrafter(SimpleNamespace(propose=lambda *_: block), asked.nodes).propose(anchor, DRAFTS, None)


def logits_of_pass(proposal: Proposal, tokens: list[int], processors, table: mx.array) -> mx.array:
    """The target's logits after the anchor and after each draft, processed with the draft's own path before it."""
    inputs = mx.concatenate([mx.array(tokens, mx.int64), proposal.tokens[0]])
    if proposal.parents is None:
        return process_logits(processors, inputs, table[inputs[-1 - DRAFTS :]])
    before, anchor = list(range(len(tokens) - 1)), len(tokens) - 1
    texts = [inputs[mx.array([*before, *(anchor + row for row in rows)])] for rows in rows_before(proposal.parents)]
    return mx.concatenate([process_logits(processors, text, table[text[-1:]]) for text in texts])


@cache
def texts(rule, asked: Asked) -> Counter:
    """Texts of three tokens, written block by block by ``rule``."""
    mx.random.seed(5)
    options, table, counts = asked.checked, mx.array(TARGET.astype(np.float32)), Counter()
    sampler, processors = options.build_sampler(), options.build_processors()
    for _ in range(asked.draws):
        tokens = list(PROMPT)
        while len(tokens) < len(PROMPT) + LENGTH:
            proposal = tree_after(tokens[-1], asked) if asked.nodes else proposal_after(tokens[-1], asked)
            if hasattr(rule, "propose"):
                proposal = drawn(proposal, sampler)
            tokens += rule(proposal, logits_of_pass(proposal, tokens, processors, table), sampler).tokens
        counts[tuple(tokens[len(PROMPT) :][:LENGTH])] += 1
    return counts


def excess(rule, asked: Asked) -> float:
    """The statistic over its limit, above 1 for texts that do not come from the target's distribution."""
    counts, expected = texts(rule, asked), probabilities(asked)
    assert sum(expected.values()) == pytest.approx(1)
    if any(expected[text] == 0 for text in counts):
        return float("inf")
    statistic, freedom = chi_square(counts, expected, asked.draws)
    assert freedom >= 5, "too few texts are possible for this to be a test"
    return statistic / chi_square_limit(freedom)


CASES = {
    "temperature and bias": Asked({"logit_bias": {1: 0.8, 3: -0.5}}),
    "top_p and repetition": Asked({"top_p": 0.9, "repetition_penalty": 1.5, "repetition_context_size": 2}),
    "min_p and presence": Asked({"min_p": 0.1, "presence_penalty": 0.7, "presence_context_size": 3}),
    "top_k and frequency": Asked({"top_k": 3, "frequency_penalty": 0.5, "frequency_context_size": 4}),
}
SPARSE = Asked({"top_p": 0.97, "presence_penalty": 0.4}, candidates=2)
TREE = Asked({"top_p": 0.97, "presence_penalty": 0.4}, nodes=8)


@pytest.mark.parametrize(
    ("rule", "asked"),
    [
        *((rule, asked) for rule in (first_mismatch, speculative_sampling) for asked in CASES.values()),
        (speculative_sampling, SPARSE),
        (first_mismatch, TREE),
    ],
    ids=[*(f"{rule}, {case}" for rule in ("first mismatch", "speculative") for case in CASES), "candidates", "tree"],
)
def test_texts_are_distributed_as_the_targets_under_every_option_and_rule(rule, asked):
    assert excess(rule, asked) < 1


class Choosy(SpeculativeSampling):
    """Verifies drafts up to the first row of which the drafter is unsure, as a policy may."""

    def sure(self, proposal: Proposal) -> mx.array:
        return proposal.acceptance_chances() > 0.34

    def __call__(self, proposal: Proposal, logits_LV: mx.array, sampler) -> Verified:
        count = [*self.sure(proposal).tolist(), False].index(False)
        return super().__call__(proposal.first(count), logits_LV[: count + 1], sampler)


def test_how_many_drawn_drafts_are_verified_may_depend_on_what_they_were_drawn_from():
    asked = CASES["temperature and bias"]
    proposals = [drawn(proposal_after(token, asked), asked.checked.build_sampler()) for token in range(V)]
    assert [Choosy().sure(proposal).tolist() for proposal in proposals][:2] == [[False, True], [True, False]]
    assert excess(Choosy(), asked) < 1


# --- these tests can fail ---------------------------------------------------------------------------------


class OwnInsteadOfRest(SpeculativeSampling):
    """After a rejection it draws from all of ``p``, which is the mistake that is made most."""

    def __call__(self, proposal: Proposal, logits_LV: mx.array, sampler) -> Verified:
        verified = super().__call__(proposal, logits_LV, sampler)
        return Verified([*verified.tokens[:-1], token_ids(sample_target(logits_LV, sampler))[verified.accepted]], 0)


class PrefersSome(Choosy):
    """Looks at the drafts themselves."""

    def sure(self, proposal: Proposal) -> mx.array:
        own_N1 = mx.take_along_axis(mx.exp(proposal.log_q[0]), proposal.tokens[0, :, None], axis=-1)
        return own_N1[:, 0] > 0.34


def greedily_first(proposal: Proposal, logits_LV: mx.array, sampler) -> Verified:
    """Accepts what the target finds most probable."""
    best, own = mx.argmax(logits_LV, axis=-1).tolist(), token_ids(sample_target(logits_LV, sampler))
    drafted = proposal.tokens[0].tolist()
    n = next((i for i, draft in enumerate(drafted) if draft != best[i]), len(drafted))
    return Verified([*drafted[:n], own[n]], n)


def drawn_for_each_sibling(tree: Proposal, logits_LV: mx.array, sampler) -> Verified:
    """Draws anew at each draft that follows the path, so that a draft's siblings have tries of their own."""
    node, path, tokens = -1, [], token_ids(tree.tokens[0])

    def own() -> int:
        return token_ids(sample_target(logits_LV[node + 1 : node + 2], sampler))[0]

    for draft, parent in enumerate(tree.parents):
        if parent == node and own() == tokens[draft]:
            node = draft
            path.append(draft)
    return Verified([*(tokens[draft] for draft in path), own()], len(path), path=path)


@pytest.mark.parametrize(
    ("rule", "asked"),
    [
        (OwnInsteadOfRest(), SPARSE),
        (PrefersSome(), CASES["temperature and bias"]),
        (greedily_first, CASES["temperature and bias"]),
        (drawn_for_each_sibling, TREE),
    ],
    ids=["own instead of rest", "prefers some", "greedily first", "drawn for each sibling"],
)
def test_a_wrong_rule_is_found_out(rule, asked):
    assert excess(rule, asked) > 1.2


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("temperature and bias", {"logit_bias": {}}),
        ("top_p and repetition", {"top_p": 0.6}),
        ("top_p and repetition", {"repetition_context_size": 1}),
        ("min_p and presence", {"min_p": 0.3}),
        ("min_p and presence", {"presence_context_size": 1}),
        ("top_k and frequency", {"top_k": 2}),
        ("top_k and frequency", {"frequency_penalty": 0.0}),
    ],
)
def test_an_option_that_is_not_obeyed_is_found_out(case, options):
    asked = CASES[case]
    counts, other = texts(first_mismatch, asked), probabilities(replace(asked, options=asked.options | options))
    statistic, freedom = chi_square(counts, other, asked.draws)
    assert any(other[text] == 0 for text in counts) or statistic > chi_square_limit(freedom)
