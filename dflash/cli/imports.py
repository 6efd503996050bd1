"""``dflash import``: a GGUF file of llama.cpp as a target."""

from pathlib import Path
from typing import Annotated, Literal

import typer

app = typer.Typer()


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE.gguf", help="A model file of llama.cpp.")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new folder for the model.")],
    dtype: Annotated[
        Literal["float32", "float16", "bfloat16"] | None,
        typer.Option(help="Store plain weights of this type. Default: packed weights stay packed."),
    ] = None,
) -> None:
    """Make a target of a GGUF file: weights, config, tokenizer, chat template.

    For LLaMA and Qwen models (llama, qwen2, qwen3); needs the extra "gguf".
    Weights in Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K and Q5_K stay packed, those
    in llama.cpp's other quantizations become float16. On a CPU, where packed
    weights are slow, use --dtype float32.

    Examples:

    dflash import SmolLM2-135M-Instruct.Q4_1.gguf smollm2 --dtype float32

    dflash generate "Why is the sky blue?" --target smollm2 --drafter ngram
    """
    from ..target.import_gguf import import_gguf

    config = import_gguf(file, folder, dtype)
    how = f"{config['quantization']['bits']} bits" if "quantization" in config else dtype or "plain weights"
    print(
        f"{folder}: {config['model_type']}, {config['num_hidden_layers']} layers of width {config['hidden_size']}, "
        f"vocabulary of {config['vocab_size']} tokens, {how}."
    )
