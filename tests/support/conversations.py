"""What the tests of datasets share: conversations, a target of well under a millisecond, the command."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from click.testing import Result
from support.cli import invoke
from support.models import STOP, TEXT_VOCAB, byte_tokenizer, qwen3_model

from dflash import LoadedTargetModel
from dflash.prompts.conversations import Conversation, conversation
from dflash.training.data.dataset import FORMAT, VERSION, Example, write_manifest, write_shard
from dflash.training.data.sequences import Sequences
from dflash.training.data.split import HeldoutRule

TINY = {"layers": 1, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1}


NO_HELDOUT = HeldoutRule(0)


def tiny_model(seed: int = 1):
    return qwen3_model(seed, TEXT_VOCAB, **TINY)


def with_template(template: str) -> LoadedTargetModel:
    tokenizer = byte_tokenizer().__class__(tokenizer_object=byte_tokenizer().backend_tokenizer, eos_token=STOP)
    tokenizer.chat_template = template
    return LoadedTargetModel(tiny_model(), tokenizer)


class Stopping(LoadedTargetModel):
    """Every sixth token ends a response, so that random models end theirs."""

    def stop_token_ids(self):
        return frozenset(range(0, TEXT_VOCAB, 6))


def turns(*contents: str) -> Conversation:
    roles = ("user", "assistant") * len(contents)
    return Conversation(tuple({"role": r, "content": c} for r, c in zip(roles, contents, strict=False)), "line 1")


def prompts(count: int) -> list[Conversation]:
    return [conversation({"prompt": f"Say {i}"}, f"line {i}") for i in range(count)]


def tree(folder: Path) -> dict[str, bytes]:
    """Every file but the lock."""
    files = (p for p in sorted(folder.rglob("*")) if p.is_file() and p.name != ".lock")
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


def texts(sequences: Sequences, responses: bool = True) -> list[str]:
    """The responses (or all else), decoded, one string a sequence."""
    parts = np.split(np.arange(len(sequences.tokens)), np.cumsum(sequences.lengths)[:-1])
    return [byte_tokenizer().decode(sequences.tokens[p][sequences.loss_mask[p] == responses]) for p in parts]


def save_dataset(folder: Path, shards: Sequence[Sequences], heldout: int = 0, target: str = "", tokenizer: str = ""):
    """A finished dataset of these shards, whose last ``heldout`` sequences are held out; it has no text."""
    left = sum(map(len, shards))
    for number, sequences in enumerate(shards):
        examples = []
        for start, length in zip(sequences.starts, sequences.lengths, strict=True):
            part = slice(start, start + length)
            left -= 1
            digest = left if left < heldout else 2**63 + left
            examples.append(Example(sequences.tokens[part], sequences.loss_mask[part], digest, {}))
        write_shard(folder, number, examples)
    description = {"format": FORMAT, "version": VERSION, "target": target, "tokenizer": tokenizer}
    write_manifest(folder, description | {"shards": len(shards), "stop_tokens": []}, HeldoutRule(10, 0))


def write_lines(path: Path, *lines: str | bytes) -> Path:
    path.write_bytes(b"\n".join(x.encode() if isinstance(x, str) else x for x in lines))
    return path


def invoke_prepare(data: object, output: Path, target: Path, *options: str) -> Result:
    """``dflash prepare`` into ``output / "made"``."""
    return invoke("prepare", data, output / "made", "--target", target, *options)
