"""The packagings in which DFlash drafters are published, read into one form: z-lab's.

These are DeepSpec, SpecForge and SGLang, vLLM's speculators, and multimodal wrappers. Keys that contradict each other
are read as in transformers 5. One rule decides about an unknown key: if it can change what the drafter computes, it is
refused by name (:mod:`.unsupported`); anything else is ignored, with a debug line, or a warning if its name is that of
a part.
"""

import difflib
import logging
import re
from collections.abc import Collection, Mapping
from typing import Any

from ...core.errors import CheckpointError
from .unsupported import DOMINO_SIZES, is_neutral, refuse_architecture, refuse_key

logger = logging.getLogger(__name__)

FULL, SLIDING = "full_attention", "sliding_attention"
DEFAULT_THETA = 10_000.0  # of a config without rope_theta; transformers' own default

Values = dict[str, Any]

_WRAPPED = ("text_config", "transformer_layer_config")  # multimodal wrappers; vLLM's speculators
_ANCHOR_DRAFTS = ("Qwen3DSparkModel", "DSparkDraftModel", "Lfm2DSparkDraftModel")
"""Architectures in which the anchor's own position predicts the first draft."""
_WHOLE = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
    "mask_token_id", "head_dim", "num_target_layers", "block_size", "max_position_embeddings", "sliding_window",
    "draft_vocab_size",
)  # fmt: skip
# Notes of trainers and loaders inside `dflash_config`; any other unknown key there is refused.
_NOTES = re.compile(
    r"_.*|num_anchors|max_anchors|anchors.*|loss.*|.*_loss.*|train.*|gamma.*|lr|learning_rate|version|.*_version|name|"
    r"description|notes?|comments?|dtype|torch_dtype|model_type|architectures?|target_model.*|verifier.*|"
    r"markov_head_type|confidence_head_with_markov|has_lm_head|num_draft_layers|swa_window_size"
)
_PARTS = re.compile(r"(?!norm_topk_prob)(.*_)?(norms?|bias|gated?|scaled?|residual|sinks?|fusion)(_.*)?")
"""Switches that may change what a drafter computes, though no tensor shows it. The exception is one of experts."""


def signs(config: Mapping[str, Any]) -> Values:
    """The flattened keys of a ``config.json``, from which drafter kinds recognise their files.

    ``architectures`` and ``algorithms`` (of vLLM's speculators, in lower case) are always lists, possibly empty.
    """
    values, _ = _unwrapped(config)
    return values | {"architectures": as_names(values.get("architectures")), "algorithms": _algorithms(config)}


def published_values(config: Mapping[str, Any], known: Collection[str]) -> Values:
    """The values of a ``config.json`` of any packaging, under the names in ``known``; nulls are left out.

    Raises ``CheckpointError`` for unsupported keys, for misspelt ones (naming the nearest known one), and for unknown
    ones inside ``dflash_config``.
    """
    values, inner = _unwrapped(config)
    speculators, algorithms = _speculators(config), _algorithms(config)
    architectures = as_names(values.get("architectures"))
    refuse_architecture(architectures, algorithms)
    if values.get("hidden_act") and "hidden_activation" not in inner:
        values.pop("hidden_activation", None)  # Gemma's own spelling, left over from the target
    if values.get("projector_type") in ("dflash", "dspark"):
        for name in DOMINO_SIZES:
            values.pop(name, None)
            inner.pop(name, None)
    shifted = values.pop("draft_shift", None) is True
    if "gru_hidden_dim" in known:
        _domino(values, algorithms)
    for name, value in values.items():
        if name not in known:
            refuse_key(name, value)

    values = {name: _whole(name, value) for name, value in values.items()}
    _taps(values)
    _anchor(values, architectures, speculators, algorithms)
    _causality(values, config, inner)
    if shifted:
        _shift(values)
    _width(values)
    _rope(values)
    _layers(values)
    if isinstance(values.get("final_logit_softcapping"), int | float) and values["final_logit_softcapping"] <= 0:
        values["final_logit_softcapping"] = None  # switched off, as published
    if values.get("num_key_value_heads") is None:
        values["num_key_value_heads"] = values.get("num_attention_heads")

    left = {name: value for name, value in inner.items() if name in values and name not in known}
    _refuse_unknown_inside(left, known)
    _ignore(values, known)
    return {name: value for name, value in values.items() if name in known and value is not None}


def _unwrapped(config: Mapping[str, Any]) -> tuple[Values, Values]:
    """All values on one level, and those of ``dflash_config``, which take precedence over all others.

    The top level takes precedence over wrapped configs: trainers write the drafter's own sizes there.
    """
    values = {name: value for name, value in config.items() if name not in (*_WRAPPED, "dflash_config")}
    for name in _WRAPPED:
        for key, value in _object(config, name).items():
            if values.get(key) is None:
                values[key] = value
    inner = dict(_object(values | dict(config), "dflash_config"))
    values.pop("dflash_config", None)
    for key, value in inner.items():
        if value is not None or key == "final_logit_softcapping" or key not in values:
            values[key] = value
    return values, inner


def _taps(values: Values) -> None:
    """Layer ids: vLLM numbers the inputs of decoder layers, z-lab their outputs (one less)."""
    for name in ("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids"):
        ids = values.pop(name, None)
        if ids is None or values.get("target_layer_ids"):
            continue
        if not isinstance(ids, list | tuple) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise CheckpointError(f"config.json: {name} must be a list of layer numbers, got {ids!r}.")
        if 0 in ids:
            raise CheckpointError(
                f"config.json: {name} {ids} reads layer 0, the embeddings; expected outputs of decoder layers."
            )
        values["target_layer_ids"] = [i - 1 for i in ids]


def _anchor(values: Values, architectures: list[str], speculators: Mapping[str, Any], algorithms: list[str]) -> None:
    """Whether the anchor's position predicts the first draft: stated, or known from the packaging."""
    if {"dspark", "dflash", "dflash2", "domino"} & set(algorithms):  # vLLM's speculators
        values.setdefault("block_size", 8)
        methods = speculators.get("proposal_methods")
        first = methods[0] if isinstance(methods, list) and methods else None
        drafts, width = first.get("speculative_tokens") if isinstance(first, dict) else None, values["block_size"]
        if isinstance(drafts, int) and isinstance(width, int):
            values["sample_from_anchor"] = drafts >= width
        elif values.get("sample_from_anchor") is None:
            values["sample_from_anchor"] = False  # the key came with the other choice
    elif values.get("sample_from_anchor") is None:
        dspark = any(name in _ANCHOR_DRAFTS for name in architectures) or values.get("projector_type") == "dspark"
        if not dspark and (values.get("markov_rank") or values.get("enable_confidence_head")):
            raise CheckpointError(
                f"config.json: DSpark's heads with the architecture {', '.join(architectures) or 'unnamed'} leave open "
                "where the first draft is read; set sample_from_anchor to true (at the anchor, as DeepSpec) or false."
            )
        values["sample_from_anchor"] = dspark


def _domino(values: Values, algorithms: list[str]) -> None:
    """Domino's own names: the anchor predicts the first draft by ``shift_label``; speculators' size of the head."""
    shift, size = values.pop("shift_label", None), values.pop("logits_correction_emb_dim", None)
    values.setdefault("emb_dim", size)
    if values.get("sample_from_anchor") is None:
        values["sample_from_anchor"] = bool(algorithms) if shift is None else shift


def _causality(values: Values, config: Mapping[str, Any], inner: Values) -> None:
    """``is_causal`` of the top level, then the names of other packagings; one value for all layers."""
    spellings = ("causal", "causal_head", "dflash_query_causal")
    found = [config.get("is_causal"), inner.get("is_causal"), values.get("is_causal")]
    # `causal_head: false` means nothing: JetSpec writes it when layer types decide.
    found += [values.get(name) if name == "causal" else values.get(name) or None for name in spellings]
    if values.pop("sliding_window_non_causal", None) is True:
        found.append(False)
    for name in spellings:
        values.pop(name, None)
    values["is_causal"] = next((value for value in found if value is not None), None)


def _shift(values: Values) -> None:
    """JetSpec's ``draft_shift``: the anchor drafts and the last position does not. In a causal block no other position
    sees the last one, so the block is one position shorter."""
    if values["is_causal"] is not True or not isinstance(values.get("block_size"), int):
        raise CheckpointError(
            "config.json: draft_shift true is supported in causal blocks of a given block_size only; it means drafts "
            "read one position earlier in the block, as in JetSpec."
        )
    values["sample_from_anchor"], values["block_size"] = True, values["block_size"] - 1


def _width(values: Values) -> None:
    """The drafter has the target's width, since it borrows embedding and head. A full vocabulary is not reduced."""
    width = values.pop("target_hidden_size", None)
    if width is not None and width != values.get("hidden_size"):
        raise CheckpointError(
            f"config.json: target_hidden_size {width} is not supported with hidden_size {values.get('hidden_size')}; "
            "it means a drafter of another width than its target."
        )
    if values.get("draft_vocab_size") == values.get("vocab_size"):
        values.pop("draft_vocab_size", None)


def _rope(values: Values) -> None:
    """One recipe of rotary positions, or one for each layer type.

    As in transformers 5: a non-empty ``rope_scaling`` replaces ``rope_parameters``, and both take precedence over the
    top level's ``rope_theta``; but the top level's ``original_max_position_embeddings`` takes precedence over theirs.
    """
    scaling, parameters = _object(values, "rope_scaling"), _object(values, "rope_parameters")
    recipe = dict(scaling or parameters)
    values.pop("rope_scaling", None)
    values.pop("rope_parameters", None)
    if (style := values.pop("is_neox_style", None)) is not None:
        values["rope_is_neox_style"] = style
    theta = values.get("rope_theta")
    theta = DEFAULT_THETA if theta is None else theta
    original = values.pop("original_max_position_embeddings", None)
    by_type = {kind: recipe[kind] for kind in (FULL, SLIDING) if kind in recipe}
    if by_type:
        for kind, one in by_type.items():
            if not isinstance(one, dict):
                raise CheckpointError(
                    f"config.json: the rope_parameters of {kind} must be an object, got {one!r}; layers without rotary "
                    "positions are not supported."
                )
        values["rope_theta"] = theta
        values["rope_parameters"] = {kind: {"rope_theta": theta} | _given(one) for kind, one in by_type.items()}
        return
    recipe = _given(recipe)
    values["rope_theta"] = recipe.pop("rope_theta", theta)
    if original is not None and recipe:
        recipe["original_max_position_embeddings"] = original
    if recipe.get("rope_type", recipe.get("type", "default")) not in ("default", "mrope"):
        values["rope_scaling"] = recipe


def _layers(values: Values) -> None:
    """``layer_types``; if they are missing and a window is used, from ``max_window_layers`` as in transformers."""
    window, layers = values.get("sliding_window"), values.get("num_hidden_layers")
    used, first = values.pop("use_sliding_window", None), values.pop("max_window_layers", None)
    if not values.get("layer_types") and used and window and isinstance(layers, int):
        first = 28 if first is None else first  # transformers' default for Qwen3
        values["layer_types"] = [SLIDING if i >= first else FULL for i in range(layers)]
    types = values.get("layer_types")
    if isinstance(types, list) and isinstance(layers, int) and types == types[:1] * len(types):
        values["layer_types"] = types[:layers]  # possibly a copy of the target's longer list


def _refuse_unknown_inside(left: Values, known: Collection[str]) -> None:
    """Of ``dflash_config``, what is ``left`` after everything that is known was read."""
    for name, value in left.items():
        note = _NOTES.fullmatch(name) or (name == "mask_token" and isinstance(value, str))
        if not (note or is_neutral(name, value)):
            raise CheckpointError(f"dflash_config: unknown key {name!r}{_nearest(name, known) or '.'}")


def _ignore(values: Values, known: Collection[str]) -> None:
    """Log the keys that mean nothing to a drafter; refuse those that look misspelt."""
    ignored = sorted(name for name in values if name not in known)
    for name in ignored:
        if hint := _nearest(name, known, cutoff=0.9):
            raise CheckpointError(f"config.json: unknown key {name!r}{hint}")
    switches = [name for name in ignored if values[name] is True and _PARTS.fullmatch(name)]
    if switches:
        logger.warning(
            "config.json: %s true is not known here: if it is a part of the drafter, fewer drafts are accepted.",
            ", ".join(switches),
        )
    if ignored:
        logger.debug("config.json: ignored, since a drafter does not read them: %s.", ", ".join(ignored))


def _nearest(name: str, known: Collection[str], cutoff: float = 0.6) -> str:
    near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=cutoff)
    return f"; did you mean {near[0]!r}?" if near else ""


def _object(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = values.get(name)
    if value is not None and not isinstance(value, dict):
        raise CheckpointError(f"config.json: {name} must be an object, got {value!r}.")
    return value or {}


def _given(recipe: Mapping[str, Any]) -> Values:
    return {name: value for name, value in recipe.items() if value is not None}


def _speculators(config: Mapping[str, Any]) -> Mapping[str, Any]:
    section = config.get("speculators_config")
    return section if isinstance(section, dict) else {}


def _algorithms(config: Mapping[str, Any]) -> list[str]:
    named = config.get("speculators_model_type"), _speculators(config).get("algorithm")
    return [str(name).lower() for name in named if name]


def as_names(value: Any) -> list[str]:
    """The names in a list, or the one that stands in its place."""
    names = [value] if isinstance(value, str) else value
    return [str(name) for name in names] if isinstance(names, list) else []


def _whole(name: str, value: Any) -> Any:
    """``value`` as an int, if it is a whole number that was written with a decimal point."""
    if name.endswith("layer_ids") and isinstance(value, list):
        return [_whole("block_size", one) for one in value]
    return int(value) if name in _WHOLE and isinstance(value, float) and value.is_integer() else value
