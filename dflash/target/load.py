"""From a folder, a hub name or ``bundled`` to a :class:`~dflash.LoadedTargetModel`."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_adapters, load_model

from ..adapters import registered_adapters
from ..core.backend import to_compute_dtype, wait_for_this_thread
from ..core.errors import CheckpointError, GenerationError, one_line
from ..core.files import flat, read_json, resolve_checkpoint
from .config_values import refuse_impossible, suspect
from .model import LoadedTargetModel

logger = logging.getLogger(__name__)

# transformers reads the model's config along with a tokenizer, and warns of architectures that it does not know. mlx-lm
# runs the architecture, and says itself if it cannot.
logging.getLogger("transformers.configuration_utils").addFilter(
    lambda record: not record.getMessage().startswith("You are using a model of type")
)

PAIR = Path(__file__).parents[1] / "pair"
"""The bundled models: ``PAIR / "target"`` and ``PAIR / "drafter"``."""

BUNDLED = "bundled"
"""The name of the bundled target on the command line and in traces."""

TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken*", "merges.txt")
"""Patterns of the files that a tokenizer is read from."""


def load_target(
    path_or_hub_name: str | Path, trust_remote_code: bool = False, adapter_path: str | Path | None = None
) -> LoadedTargetModel:
    """Load an mlx-lm model directory, a hub name (``org/name``; only this uses the network), or ``"bundled"``.

    Args:
        path_or_hub_name: The checkpoint. Without tokenizer files it is loaded for token ids only. (A folder named
            ``bundled`` is ``./bundled``.)
        trust_remote_code: Run the Python code that a checkpoint brings with it (``model_file`` in its config).
        adapter_path: A folder of LoRA, DoRA or full adapters, as ``mlx_lm.lora`` writes it.

    Raises ``CheckpointError`` for missing or damaged files and NaN weights, and ``IncompatibleModelsError`` for an
    architecture without an adapter.
    """
    wait_for_this_thread()
    if adapter_path is not None:
        read_json(Path(adapter_path) / "adapter_config.json")  # a wrong folder shows before minutes of loading
    registered_adapters()  # a package may bring the architecture itself along with its adapter
    path = PAIR / "target" if path_or_hub_name == BUNDLED else resolve_checkpoint(path_or_hub_name)
    config = read_json(path / "config.json")  # its errors name the file
    try:
        refuse_impossible(config)
        model, tokenizer = _load(path, trust_remote_code, adapter_path)
        model(mx.zeros((1, 1), mx.int32), cache=make_prompt_cache(model))  # built, never evaluated
    except Exception as error:  # of mlx-lm, transformers and the checkpoint's own code
        adapted = "" if adapter_path is None else f" with the adapters in {adapter_path}"
        raise CheckpointError(
            f"Cannot load the target at {path}{adapted}: {_reason(error, {} if adapted else config)}"
        ) from error
    if tokenizer is None:
        logger.warning("%s has no tokenizer files, such as tokenizer.json: only token ids can be decoded.", path)
    to_compute_dtype(model)
    mx.eval(model.parameters())  # lazy arrays could only be computed in this thread
    _check_weights(model, path)
    loaded = LoadedTargetModel(model, tokenizer, folder=path)
    tokens = loaded.vocab_size if tokenizer is None else len(tokenizer.get_vocab())
    if not 0.8 * loaded.vocab_size <= tokens <= 1.2 * loaded.vocab_size:  # tables are padded, and tokens added
        message = "The tokenizer in %s has %d tokens, the model %d: is it another model's?"
        logger.warning(message, path, tokens, loaded.vocab_size)
    return loaded


def load_target_model(path_or_model: str | Path | nn.Module, tokenizer: Any = None) -> LoadedTargetModel:
    """A :class:`~dflash.LoadedTargetModel` from a folder, a hub name, or a model that mlx-lm has loaded."""
    if isinstance(path_or_model, nn.Module):
        return LoadedTargetModel(path_or_model, tokenizer)
    return load_target(path_or_model)


def add_stop_tokens(target: LoadedTargetModel, tokens: Sequence[str]) -> None:
    """Let ``tokens``, texts or ids of the vocabulary, end an answer too; plain mlx-lm then stops at them as well.

    Raises ``GenerationError`` for a token that the target's tokenizer has not.
    """
    known = set(target.tokenizer.get_vocab()) if tokens and target.tokenizer is not None else set()
    for token in tokens:
        is_id = target.tokenizer is not None and token.isdecimal() and int(token) < target.vocab_size
        if not is_id and token not in known:
            raise GenerationError(f"extra_eos_token {token!r} is no token of this target's tokenizer.")
        target.tokenizer.add_eos_token(token)


def _load(path: Path, trust_remote_code: bool, adapter_path: str | Path | None) -> tuple[nn.Module, Any]:
    adapters = None if adapter_path is None else str(adapter_path)
    if not any(True for pattern in TOKENIZER_FILES for _ in path.glob(pattern)):
        model = load_model(path, trust_remote_code=trust_remote_code)[0]
        return (model if adapters is None else load_adapters(model, adapters).eval()), None
    options = {"trust_remote_code": trust_remote_code}
    model, tokenizer, *_ = mlx_lm.load(str(path), options, None, adapters, trust_remote_code=trust_remote_code)
    return model, tokenizer


def _reason(error: Exception, config: dict[str, Any]) -> str:
    from ..drafters.kinds import is_drafter  # drafters import this module

    if is_drafter(config):
        return "it is a drafter, not a target; give it as the drafter, with the target that it was trained for."
    reason = f"{error} is missing" if isinstance(error, KeyError) else one_line(error)
    if "trust_remote_code" not in reason:
        odd = None if isinstance(error, CheckpointError | OSError) else suspect(config)
        return reason if odd is None else f"{odd} ({reason})"
    return (
        "it brings Python code of its own, which runs only if you trust it: "
        "--trust-remote-code on the command line, trust_remote_code=True in Python."
    )


def _check_weights(model: nn.Module, path: Path) -> None:
    """Refuse NaN: the target would repeat token 0 forever, and every draft would be right."""
    weights = ((name, w) for name, w in flat(model.parameters()).items() if mx.issubdtype(w.dtype, mx.floating))
    largest = {name: mx.max(w) for name, w in weights if w.size}  # NaN if any number is
    mx.eval(largest)
    broken = next((name for name, number in largest.items() if number.item() != number.item()), None)
    if broken is not None:
        raise CheckpointError(f"The target at {path} holds NaN in {broken}; download or convert it again.")
