"""Export a run as a drafter in the published format, with a model card, and upload it to the hub if asked."""

import logging
from pathlib import Path
from typing import Any

import mlx.core as mx
import yaml

from dflash import DFlashConfig, save_drafter
from dflash.core.errors import CheckpointError, DFlashError, TrainingError, one_line
from dflash.core.files import atomic_write, is_hub_name, read_arrays, read_json, write_arrays
from dflash.drafters.checkpoints.tensors import reduced_vocabulary, vocabulary_tables
from dflash.drafters.kinds import drafter_class, kind_in
from dflash.target.load import BUNDLED

from .drafters.init import SHAPE
from .loop.run_folder import BEST, read_results, read_weights
from .runs import recorded_recipe

logger = logging.getLogger(__name__)

EXPORTED = ("model.safetensors", "config.json", "README.md")
"""The files of a finished drafter."""

VOCABULARY = "vocabulary.safetensors"
"""In the run folder of a drafter with a reduced vocabulary: the tables ``d2t`` and ``t2d``."""

_FOLDERS = ("folder", "cached_features")

CARD = """---
library_name: mlx
{base}tags:
- mlx
- dflash
- speculative-decoding
---

# A DFlash drafter for {title}

A block-diffusion drafter of {layers} layers that fills blocks of {block_size} tokens, for lossless speculative
decoding with DFlash for MLX (the Python package `dflash-research`). It works only with the target that
it was trained for.

```
dflash generate "What is 17 * 23?" --target {target} --drafter {drafter}
```
{where}
## Measured acceptance

{measured}

## Recipe

Trained with `dflash train` on this recipe:

```yaml
{recipe}```
"""


def export(
    run: Path, folder: Path, best: bool = True, *, target_name: str | None = None, name: str | None = None
) -> None:
    """Write the drafter of the run folder ``run`` to ``folder``: weights in bfloat16, config, model card.

    ``best`` takes the checkpoint with the best held-out acceptance, otherwise the last. ``target_name`` is the target's
    name on the card, by default the hub name that it was loaded by; ``name`` is the drafter's own hub name, if any.
    Raises ``CheckpointError`` if ``run`` is not a run folder or lacks the checkpoint, or ``folder`` holds anything
    but a drafter, and ``OSError`` if writing fails.
    """
    require_only_a_drafter(folder)
    recipe, values = recorded_recipe(run), read_json(run / "config.json")
    if best and not (run / BEST).exists():
        raise CheckpointError(
            f"{run / BEST} is missing: no evaluation of this run has measured an acceptance yet. "
            "Export the last weights with --last (in Python, best=False)."
        )
    kind = drafter_class(kind_in(values))
    model, weights = kind(kind.config_class.from_dict(values)), read_weights(run, best)
    if model.config.draft_vocab_size is not None:
        model.reduce_vocabulary(_read_vocabulary(run, model.config), own_head="lm_head.weight" in weights)
    try:
        model.load_weights(list(weights.items()))
    except ValueError as error:  # MLX names what is missing or left over
        raise CheckpointError(f"The weights of {run} do not fit its config.json: {one_line(error)}") from error
    mx.eval(model.parameters())
    save_drafter(model, folder)
    results = read_results(run / BEST) if best else None
    text = card(recipe, model.config, results, target_name, name)
    atomic_write(folder / "README.md", lambda file: file.write_text(text, encoding="utf-8"))


def write_vocabulary(run: Path, token_ids: mx.array, vocab_size: int) -> None:
    """Record in the run folder ``run`` which of the target's tokens the drafter knows.

    Raises ``TrainingError`` if other tokens are recorded there.
    """
    path, tables = run / VOCABULARY, vocabulary_tables(token_ids, vocab_size)
    if path.exists() and not mx.array_equal(read_arrays(path)[0]["d2t"], tables["d2t"]).item():
        raise TrainingError(f"{run} belongs to a run whose drafter knows other tokens; set another run.folder.")
    write_arrays(path, tables)


def _read_vocabulary(run: Path, config: DFlashConfig) -> mx.array:
    path = run / VOCABULARY
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: it says which tokens the drafter knows. Copy it from the run.")
    ids = reduced_vocabulary(read_arrays(path)[0], config.draft_vocab_size, config.vocab_size, path)
    assert ids is not None
    return ids


def require_only_a_drafter(folder: Path) -> None:
    """Raise ``CheckpointError`` if ``folder`` holds files that are not a drafter's."""
    others = sorted(path.name for path in folder.glob("[!.]*") if path.name not in EXPORTED)
    if others:
        raise CheckpointError(
            f"{folder} holds other files, such as {others[0]!r}; choose a new folder, or remove them."
        )


def card(
    recipe: dict[str, Any],
    config: DFlashConfig,
    results: dict[str, Any] | None,
    target_name: str | None = None,
    name: str | None = None,
) -> str:
    """The model card; ``results`` are from the evaluation of the exported weights, if there was one.

    The recipe on the card states the drafter's full shape, including what the recipe left to the target. Local folders
    appear by name only, and as ``TARGET`` and ``DRAFTER`` in the command. Names are as in :func:`export`.
    """
    target = target_name or _shown(recipe["target"])
    on_hub, bundled = is_hub_name(target), target == BUNDLED
    title = "the bundled target" if bundled else target if on_hub or target_name else f"the target in `{target}`"
    drafter = recipe["drafter"] | {key: getattr(config, key) for key in (*SHAPE, "elastic_blocks")}
    drafter |= {"target_layer_ids": list(config.target_layer_ids), "vocabulary": config.draft_vocab_size}
    if drafter["mask_token"] is None:
        drafter["mask_token"] = config.mask_token_id
    if drafter.get("from") is not None:
        drafter["from"] = _shown(drafter["from"])
    data, run = ({k: Path(v).name if k in _FOLDERS and v else v for k, v in recipe[p].items()} for p in ("data", "run"))
    recipe = recipe | {"target": target, "data": data, "run": run, "drafter": drafter}
    folders = [] if on_hub or bundled else ["TARGET is the target's folder"]
    folders += [] if name else ["DRAFTER is this folder"]
    return CARD.format(
        title=title,
        base=f"base_model: {target}\n" if on_hub else "",
        target=target if on_hub or bundled else "TARGET",
        drafter=name or "DRAFTER",
        where=f"\n{', '.join(folders)}.\n" if folders else "",
        layers=config.num_hidden_layers,
        block_size=config.block_size,
        measured=_measured(recipe["run"], results),
        recipe=yaml.safe_dump(recipe, sort_keys=False),
    )


def _shown(name: str) -> str:
    local = Path(name).exists() or not is_hub_name(name)
    return Path(name).resolve().name if local else name


def _measured(run: dict[str, Any], results: dict[str, Any] | None) -> str:
    if results is None:
        return "The exported weights were not evaluated; `dflash eval` measures them."
    decoded = results.get("prompts", f"up to {run['evaluate_prompts']}")  # not recorded by older runs
    rows = [f"| {i} | {rate:.3f} |" for i, rate in enumerate(results["acceptance_by_position"], 1)]
    return "\n".join(
        [
            f"Acceptance length {results['acceptance_length']:.2f} tokens per target pass: greedy decoding of "
            f"{decoded} held-out prompt{'' if decoded == 1 else 's'}, up to {run['evaluate_tokens']} tokens each "
            f"({results['blocks']} blocks), at step {results['step']}, before rounding to bfloat16.",
            "",
            "| drafted position | blocks accepted up to it |",
            "|---|---|",
            *rows,
        ]
    )


def push(folder: Path, repository: str) -> str:
    """Upload a drafter's folder to the hub as ``repository`` (``org/name``); returns its address.

    Raises ``DFlashError`` in one line if the hub refuses.
    """
    from huggingface_hub import HfApi

    if not (folder / "config.json").exists():
        raise CheckpointError(f"{folder} holds no drafter: config.json is missing.")
    try:
        api = HfApi()
        address = api.create_repo(repository, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=str(folder), allow_patterns=list(EXPORTED))
    except Exception as error:  # the hub client raises many unrelated kinds
        raise DFlashError(f"Cannot upload to {repository!r} on the hub: {one_line(error)}") from error
    return str(address)
