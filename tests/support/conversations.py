"""What the tests of datasets share: conversations, a target of well under a millisecond, the command."""

import re
from pathlib import Path

import numpy as np
from support.models import STOP, TEXT_VOCAB, byte_tokenizer, qwen3_model
from typer.testing import CliRunner

from dflash import LoadedTargetModel, cli
from dflash.prompts import Conversation, conversation
from dflash.training.data.sequences import Sequences

TINY = {"layers": 1, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1}


def tiny_model(seed: int = 1):
    return qwen3_model(seed, TEXT_VOCAB, **TINY)


def with_template(template: str) -> LoadedTargetModel:
    tokenizer = byte_tokenizer().__class__(tokenizer_object=byte_tokenizer().backend_tokenizer, eos_token=STOP)
    tokenizer.chat_template = template
    return LoadedTargetModel(tiny_model(), tokenizer)


def turns(*contents: str) -> Conversation:
    roles = ("user", "assistant") * len(contents)
    return Conversation(tuple({"role": r, "content": c} for r, c in zip(roles, contents, strict=False)), "line 1")


def prompts(count: int) -> list[Conversation]:
    return [conversation({"prompt": f"Say {i}"}, f"line {i}") for i in range(count)]


def tree(folder: Path) -> dict[str, bytes]:
    """Every file but the lock."""
    files = (p for p in sorted(folder.rglob("*")) if p.is_file() and p.name != ".lock")
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


def texts(sequences: Sequences, wrote: bool = True) -> list[str]:
    """The responses (or all else), decoded, one string a sequence."""
    parts = np.split(np.arange(len(sequences.tokens)), np.cumsum(sequences.lengths)[:-1])
    return [byte_tokenizer().decode(sequences.tokens[p][sequences.loss_mask[p] == wrote]) for p in parts]


def write_lines(path: Path, *lines: str | bytes) -> Path:
    path.write_bytes(b"\n".join(x.encode() if isinstance(x, str) else x for x in lines))
    return path


def invoke(data: object, output: Path, target: Path, *options: str):
    args = ["prepare", data, "--output", output / "made", "--target", target, *options]
    return CliRunner().invoke(cli.app, [str(a) for a in args])


def assert_one_error(result, message: str) -> None:
    assert result.exit_code == 1, result.output
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert re.search(message, result.stderr), result.stderr
