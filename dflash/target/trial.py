"""A few short passes that check whether an adapter names the right parts of its model and rewinds leave no trace.

What the adapter says is compared with what the model itself does in one pass. :mod:`dflash.adapters.conformance` adds
checks that decode.

Shapes: B batch, L length, E hidden size, V vocabulary.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..adapters.calls import Call, Pass, embedding_factors, factor, streams
from ..core.progress import progress
from ..core.trees import rows_before
from .compare import Mismatch, assert_close, assert_same_caches, rounding_limit, windows
from .rows import as_rows

if TYPE_CHECKING:
    from .model import LoadedTargetModel

LENGTH = 24  # tokens of the checks that use one pass
BLOCK = 16  # most tokens in a verified block
SHORTEST_LIMIT = 64  # tokens; a model made for fewer could not hold a prompt and a block
LIMITS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "model_max_length")


@dataclass
class Trial:
    """A target, what to try on it, and what its first passes showed.

    Args:
        target: The target; its weights are only read.
        rounds: Blocks of random length and acceptance that are verified and rewound.
        seed: Seed for tokens, block lengths and acceptances.
        cache_options: As in :meth:`~dflash.LoadedTargetModel.make_cache`.
        wrap: Whether a long prompt first fills windows that the rounds alone would not.
        show: Whether the rounds show their progress.
    """

    target: "LoadedTargetModel"
    rounds: int = 6
    seed: int = 0
    cache_options: dict[str, Any] = field(default_factory=dict)
    wrap: bool = False
    show: bool = False

    def tokens(self, length: int, seed: int) -> mx.array:
        """Random token ids ``[1, length]``."""
        return mx.random.randint(0, self.target.vocab_size, (1, length), key=mx.random.key(seed))

    @cached_property
    def one(self) -> Pass:
        """The model's own pass over random tokens."""
        try:
            return Pass(self.target.model, self.tokens(LENGTH, self.seed))
        except Exception as error:  # mlx-lm's own code, or another package's
            raise Mismatch(f"the model's own pass raises {type(error).__name__}: {error}") from error

    @cached_property
    def other(self) -> Pass:
        """The model's own pass over other tokens, as many."""
        return Pass(self.target.model, self.tokens(LENGTH, self.seed + 1))

    @cached_property
    def adapted(self) -> tuple[mx.array, list[mx.array]]:
        """The adapter's pass over the same tokens: final hidden states ``[B, L, E]``, and each layer's features."""
        target = self.target
        hidden, features = target.forward_hidden(self.one.tokens, target.make_cache(), range(target.num_layers))
        return hidden, list(mx.split(features, target.num_layers, axis=-1))


# --- what the adapter says of the model -----------------------------------------------------------------


def _caches(trial: Trial) -> None:
    trial.target.make_cache(**trial.cache_options)


def _parts(trial: Trial) -> None:
    """Every property can be read, and its numbers agree with the table, the head and the config."""
    adapter = trial.target.adapter
    values = {}
    for name in ("backbone", "layers", "layers_owner", "embedding", "hidden_size", "vocab_size", "max_length"):
        try:
            values[name] = getattr(adapter, name)
        except Exception as error:  # the adapter's own code
            raise Mismatch(f"the adapter has no {name}: {type(error).__name__}: {error}") from error
    if not values["layers"]:
        raise Mismatch("layers is empty; expected the decoder layers in order")
    table, said = getattr(values["embedding"], "weight", None), values["vocab_size"]
    if table is not None and said != table.shape[0]:
        raise Mismatch(f"vocab_size is {said}, the embedding table has {table.shape[0]} rows")
    if table is None and said != (width := trial.one.logits.shape[-1]):
        raise Mismatch(f"vocab_size is {said}, the model's logits are {width} wide")
    _check_max_length(values["max_length"], getattr(trial.target.model, "args", None))
    _check_stop_tokens(trial)
    _check_chat_tokens(trial)


def _check_max_length(length: Any, config: Any) -> None:
    if length is None:
        return
    given = next((n for name in LIMITS if isinstance(n := getattr(config, name, None), int)), SHORTEST_LIMIT)
    if type(length) is not int or length < min(given, SHORTEST_LIMIT):
        raise Mismatch(f"max_length is {length!r}; expected a count of at least {SHORTEST_LIMIT} tokens, or None")
    if length < given:
        raise Mismatch(f"max_length is {length}, the model's config allows {given} tokens")


def _check_stop_tokens(trial: Trial) -> None:
    tokenizer = trial.target.tokenizer or SimpleNamespace(eos_token_ids={0}, eos_token_id=0, eos_token="")
    try:
        stops = trial.target.adapter.stop_tokens(tokenizer)
    except AttributeError:
        if trial.target.tokenizer is not None:
            raise
        return  # it needs a real tokenizer
    if not isinstance(stops, frozenset | set) or not all(isinstance(token, int) for token in stops):
        raise Mismatch(f"stop_tokens() returns a {type(stops).__name__}; expected a frozenset of token ids")


def _check_chat_tokens(trial: Trial) -> None:
    tokenizer = trial.target.tokenizer
    if tokenizer is None or not tokenizer.has_chat_template:
        return
    tokens = trial.target.adapter.chat_tokens(tokenizer, [{"role": "user", "content": "Hello"}])
    if not isinstance(tokens, list) or not all(isinstance(t, int) and t < trial.target.vocab_size for t in tokens):
        raise Mismatch(f"chat_tokens() returns {str(tokens)[:40]!r}; expected a list of token ids below vocab_size")


def _embeddings(trial: Trial) -> None:
    """embed() returns rows of the table that the model looks tokens up in, and embedding_scale is the model's."""
    target, one = trial.target, trial.one
    ours = target.embed(one.tokens)
    shape = (*one.tokens.shape, target.hidden_size)
    if ours.shape != shape:
        raise Mismatch(f"embed() returns shape {ours.shape}, expected {shape}: one row of hidden_size a token")
    if tables := _looked_up(trial, shape):
        factors = [factor(table, ours) for table in tables]
        if not any(f is not None and abs(f - 1) < 1e-2 for f in factors):
            scaled = next((f for f in factors if f), None)
            raise Mismatch(
                "embed() does not return the rows of the table that the model looks tokens up in"
                if scaled is None
                else f"embed() returns the table's rows times {scaled:.4g}; "
                "return the rows themselves and give the factor as embedding_scale"
            )
    found = embedding_factors(target.embed, target.adapter.layers, one, trial.other)
    scale = target.adapter.embedding_scale
    if found and not any(abs(f - scale) <= 1e-2 * abs(f) for f in found):
        raise Mismatch(
            f"embedding_scale is {scale:.4g}, but the model multiplies embed() by {found[0]:.4g} before its first layer"
        )


def _looked_up(trial: Trial, shape: tuple[int, ...]) -> list[mx.array]:
    """What modules called with token ids had returned before the first layer ran, ``[B, L, E]`` each."""
    first = trial.one.first_call(trial.target.adapter.layers)
    if first is None:
        return []
    before = trial.one.calls[: trial.one.calls.index(first)]
    returned = [c for c in before if c.tokens is not None and c not in first.callers]
    return [c.output for c in returned if isinstance(c.output, mx.array) and c.output.shape == shape]


def _layers(trial: Trial) -> None:
    """The adapter's layers are all of the model's, in the order in which it calls them."""
    layers, model_pass = trial.target.adapter.layers, trial.one
    order = {id(call.module): i for i, call in reversed(list(enumerate(model_pass.calls)))}
    for i, layer in enumerate(layers):
        if id(layer) not in order:
            raise Mismatch(f"layer {i} of the adapter is not called by the model")
        if any(layer is other for other in layers[:i]):
            raise Mismatch(f"layers holds one module twice, the second time as layer {i}")
        if i and order[id(layer)] < order[id(layers[i - 1])]:
            raise Mismatch(
                f"the model calls layer {i} of the adapter before layer {i - 1}; list them in the model's order"
            )
    for call in model_pass.calls:
        if _is_missing_layer(call, trial):
            names = {id(module): name for name, module in trial.target.model.named_modules()}
            raise Mismatch(
                f"layers leaves out {names.get(id(call.module), type(call.module).__name__)}, "
                "which the model calls between its embedding and its head like the listed ones"
            )


def _is_missing_layer(call: Call, trial: Trial) -> bool:
    """Whether an unlisted module is called where layers are, and is of their kind.

    Of their kind is what is in one list with them, is of the same class, or is given a cache.
    """
    layers = trial.target.adapter.layers
    listed = {id(layer) for layer in layers}
    callers = {id(c.parent) for layer in layers for c in trial.one.calls_of(layer)}
    if id(call.module) in listed or call.parent is None or id(call.parent) not in callers or call.hidden is None:
        return False
    caches = {id(cache) for cache in trial.one.caches}
    lists = [v for module in trial.target.model.modules() for v in module.values() if isinstance(v, list)]
    return (
        type(call.module) in {type(layer) for layer in layers}
        or any(id(value) in caches for value in call.values)
        or any({id(call.module), id(layers[0])} <= {id(item) for item in siblings} for siblings in lists)
    )


# --- what the adapter computes --------------------------------------------------------------------------


def _features(trial: Trial) -> None:
    """feature() of each layer is one of the hidden states that the layer returned, also in the model's own pass."""
    target = trial.target
    _, features = trial.adapted
    shape = (*trial.one.tokens.shape, target.hidden_size)
    for i, layer in enumerate(target.adapter.layers):
        if features[i].shape != shape:
            raise Mismatch(f"features of a layer have shape {features[i].shape}, hidden_size is {target.hidden_size}")
        output = trial.one.calls_of(layer)[-1].output
        assert_close(f"layer {i}", features[i], target.adapter.feature(output))
        if not any(_close(features[i], stream) for stream in streams(output, shape)):
            raise Mismatch(f"feature() of layer {i} is none of the hidden states that the layer returned")


def _close(ours: mx.array, theirs: mx.array, limit: float | None = None) -> bool:
    try:
        assert_close("", ours, theirs, limit)
    except Mismatch:
        return False
    return True


def _head(trial: Trial) -> None:
    """The head of the final hidden states gives the model's logits, and leaves normalising to the backbone."""
    hidden, _ = trial.adapted
    shape = (*trial.one.tokens.shape, trial.target.hidden_size)
    if hidden.shape != shape:
        raise Mismatch(
            f"the backbone returns shape {hidden.shape}, expected {shape}: hidden states after the last norm, before "
            "the head; where no module of the model ends there, use a WholeModelAdapter or override run_backbone()"
        )
    logits = trial.target.head(hidden)
    assert_close("logits", logits, trial.one.logits)
    if _close(trial.target.head(8 * hidden), trial.target.head(hidden / 8), limit=1e-2):
        raise Mismatch(
            "head() gives the same logits for hidden states of any size, so it normalises them; "
            "the model's last norm belongs to the backbone's pass, because a drafter has a norm of its own"
        )


def _rewinds(trial: Trial) -> None:
    """Verify blocks, reject some of their tokens, and compare with a cache that is fed only the accepted ones."""
    target = trial.target
    chance = random.Random(trial.seed)
    rewound, fed = (target.make_cache(**trial.cache_options) for _ in range(2))
    window = max(windows(rewound), default=0)
    if trial.wrap and window > 4 * BLOCK:
        prompt = trial.tokens(2 * window + 1, trial.seed)
        for cache in (rewound, fed):
            for start in range(0, prompt.shape[1], window):
                target.forward_hidden(prompt[:, start : start + window], cache, ())
    for number in progress(range(trial.rounds), "blocks rewound", show=trial.show):
        block = chance.randint(1, BLOCK)
        kept = chance.randint(1, block)
        tokens = trial.tokens(block, chance.getrandbits(32))
        length = fed.offset
        logits, _ = target.forward_with_hidden_states(tokens, rewound, ())
        if rewound.offset != length + block:
            raise Mismatch(
                f"a pass of {block} tokens over {length} cached ones leaves {rewound.offset} in the cache; "
                "the adapter must pass its cache on to the backbone"
            )
        rewound.rewind(length + kept)
        expected, _ = target.forward_with_hidden_states(tokens[:, :kept], fed, ())
        where = f"after {fed.offset} tokens (round {number}, {kept} of {block} kept)"
        assert_close(f"logits {where}", logits[:, :kept], expected, rounding_limit(fed, expected.dtype))
        assert_same_caches(rewound, fed, where)


TREE = (-1, 0, 1, 2, -1, 4, 5, 4, 7, 1)
"""Parents of a tree whose rows are far from their depths: branches at the anchor and after it, up to four deep."""


def tree_equals_its_paths(trial: Trial) -> None:
    """Each row of a pass over a tree is that of a pass over its path alone, and any path can be kept."""
    target = trial.target
    tree, paths = (target.make_cache(**trial.cache_options) for _ in range(2))
    prompt, tokens = trial.tokens(LENGTH, trial.seed), trial.tokens(len(TREE) + 1, trial.seed + 1)
    for cache in (tree, paths):
        target.forward_hidden(prompt, cache, ())
    for way in [rows for rows in rows_before(TREE) if rows[-1] - 1 not in TREE]:
        logits, _ = target.forward_with_hidden_states(tokens, tree, (), TREE)
        expected, _ = target.forward_with_hidden_states(tokens[:, mx.array(way)], paths, ())
        rows, limit = logits[:, mx.array(way)], rounding_limit(paths, expected.dtype)
        assert_close(f"logits of the path {way[1:]}", rows, expected, limit)
        tree.keep(way)
        assert_same_caches(tree, paths, f"of the path {way[1:]}")


TEXTS = (3, 7)
"""Tokens of the texts that become rows."""

ROUNDS = ((4, (1, 4)), (1, (1, 1)))
"""Tokens of each pass over the rows, and how many of them each row keeps.

The first shows that positions, masks and states are each row's own, and that a row which keeps fewer tokens than
another is left with its text's caches. The second, after it, shows that no row sees what was rejected: of these entries
a pass of one token overwrites only the first, and a model may compute a single token in another way than several.
"""


def rows_equal_texts(
    trial: Trial,
    texts: Sequence[int] = TEXTS,
    rounds: Iterable[tuple[int, Sequence[int]]] = ROUNDS,
) -> None:
    """Rows that keep different numbers of tokens have their texts' logits, and leave the batch with their caches."""
    target = trial.target
    alone = [target.make_cache() for _ in texts]
    for cache, length in zip(alone, texts, strict=True):
        target.forward_hidden(trial.tokens(length, trial.seed), cache, ())
    rows = [layer[0].merge(list(layer)) for layer in zip(*map(as_rows, alone), strict=True)]
    for number, (block, kept) in enumerate(rounds):
        tokens = trial.tokens(block * len(texts), trial.seed + number).reshape(len(texts), block)
        logits, _, rows_pass = target.forward_rows(tokens, rows, ())
        rows_pass.keep(kept)
        for row, (cache, count) in enumerate(zip(alone, kept, strict=True)):
            expected, _ = target.forward_with_hidden_states(tokens[row : row + 1, :count], cache, ())
            where = f"of row {row} (round {number}, {kept} of {block} kept)"
            assert_close(f"logits {where}", logits[row : row + 1, :count], expected)
            assert_same_caches([layer.extract(row) for layer in rows], cache, where)


TRIAL: dict[str, Callable[[Trial], None]] = {
    "every cache can be rewound": _caches,
    "the adapter's parts fit the model": _parts,
    "embed() and embedding_scale are the model's": _embeddings,
    "layers are the model's, in the order of their calls": _layers,
    "features are the layers' outputs": _features,
    "head(backbone(x)) equals model(x)": _head,
    "rejected tokens leave no trace": _rewinds,
}
"""Checks that take a few passes, in order; each raises what it finds. The others depend on the first."""


def first_difference(target: "LoadedTargetModel") -> str | None:
    """The first check that fails and its difference, or ``None``: whether to trust a guessed adapter."""
    trial = Trial(target)
    for name, check in TRIAL.items():
        if difference := run(check, trial):
            return f"{name}: {difference}"
    return None


def tree_difference(target: "LoadedTargetModel") -> str:
    """What a tree of drafts changes that it should not; empty if nothing."""
    return run(tree_equals_its_paths, Trial(target)).rstrip(".")


def rows_difference(target: "LoadedTargetModel") -> str:
    """What decoding several texts at once changes that it should not; empty if nothing."""
    return run(rows_equal_texts, Trial(target)).rstrip(".")


def run(check: Callable[[Any], None], trial: Any) -> str:
    """What ``check`` finds, in one line; empty if nothing. Any error of the model's own code is a finding."""
    try:
        check(trial)
    except Exception as error:
        text = " ".join(str(error).split())
        known = isinstance(error, Mismatch) or type(error).__module__.startswith("dflash")
        return text if known and text else f"{type(error).__name__}: {text}"
    return ""


def passes(rounds: int = 6) -> int:
    """Forward passes in the trial of a generic adapter: two for its scale, three whole ones, two per round."""
    return 2 + 3 + 2 * rounds
