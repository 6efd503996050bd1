"""What needs no model to be refused is refused before one loads: minutes, with a large target."""

from dataclasses import fields

import pytest
from support.cli import COMMAND, invoke

from dflash.cli.options import flag_of
from dflash.options import DecodeOptions

LATIN1 = b"caf\xe9".decode("utf-8", "surrogateescape")  # as Python hands over such an argument
NO_TARGET = "no such target"

COMMANDS = {
    "generate": ["generate", "Hi", "--target", NO_TARGET],
    "demo": ["demo", "--target", NO_TARGET],
    "chat": ["chat", "--target", NO_TARGET],
    "serve": ["serve", "--target", NO_TARGET],
    "cache-prompt": ["cache-prompt", "Hi", "--prompt-cache-file", "{new}.safetensors", "--target", NO_TARGET],
    "bench": ["bench", "--prompts", "{prompts}", "--target", NO_TARGET],
    "doctor": ["doctor", "--target", NO_TARGET],
    "eval": ["eval", "--prompts", "{prompts}", "--target", NO_TARGET],
    "prompts": ["prompts", "--count", "2", "--output", "{new}", "--target", NO_TARGET],
    "prepare": ["prepare", "{prompts}", "{new}", "--target", NO_TARGET],
    "fit": ["fit", "--output", "{new}", "--target", NO_TARGET],
    "recipe": ["recipe", "--target", NO_TARGET],
    "adapters check": ["adapters", "check", NO_TARGET],
}
BAD = {
    "--acceptance": ["--acceptance", "0.1,0.2"],
    "--adapter-path": ["--adapter-path", "nowhere"],
    "--batch-size": ["--batch-size", "0"],
    "--admin-key": ["--admin-key", ""],
    "--allowed-origin": ["--allowed-origin", ""],
    "--also": ["--also", ""],
    "--api-key": ["--api-key", ""],
    "--batch": ["--batch", "1,x"],
    "--begin": ["--begin", LATIN1],
    "--block-size": ["--block-size", "1"],
    "--chat-template-config": ["--chat-template-config", "{{"],
    "--count": ["--count", "0"],
    "--data": ["--data", "nowhere"],
    "--decode-concurrency": ["--decode-concurrency", "0"],
    "--draft-bits": ["--draft-bits", "7"],
    "--draft-window": ["--draft-window", "0"],
    "--drafter": ["--drafter", "no/such/drafter"],
    "--extra-eos-token": ["--extra-eos-token", ""],
    "--frequency-context-size": ["--frequency-context-size", "0"],
    "--frequency-penalty": ["--frequency-penalty", "nan"],
    "--heldout-at-least": ["--heldout-at-least", "-1"],
    "--heldout-percent": ["--heldout-percent", "101"],
    "--kv-bits": ["--kv-bits", "5"],
    "--kv-group-size": ["--kv-bits", "8", "--kv-group-size", "48"],
    "--limit": ["--limit", "0"],
    "--logit-bias": ["--logit-bias", "[1]"],
    "--logits-processor": ["--logits-processor", "nope"],
    "--max-body-bytes": ["--max-body-bytes", "0"],
    "--max-kv-size": ["--max-kv-size", "4"],
    "--max-length": ["--max-length", "1"],
    "--max-queue": ["--max-queue", "0"],
    "--max-seq-length": ["--max-seq-length", "1"],
    "--max-tokens": ["--max-tokens", "-1"],
    "--min-p": ["--min-p", "2"],
    "--min-tokens-to-keep": ["--min-tokens-to-keep", "0"],
    "--output": ["--output", "{prompts}/x"],
    "--patience": ["--patience", "0"],
    "--plot": ["--plot", "nowhere/a.svg"],
    "--policy": ["--policy", "nope"],
    "--port": ["--port", "65536"],
    "--prefill-response": ["--prefill-response", LATIN1],
    "--prefill-step-size": ["--prefill-step-size", "0"],
    "--presence-context-size": ["--presence-context-size", "0"],
    "--presence-penalty": ["--presence-penalty", "inf"],
    "--prompt-cache-bytes": ["--prompt-cache-bytes", "-1"],
    "--prompt-cache-file": ["--prompt-cache-file", "nowhere/a.safetensors"],
    "--prompt-caches": ["--prompt-caches", "0"],
    "--prompts": ["--prompts", "nowhere.jsonl"],
    "--quantized-kv-start": ["--quantized-kv-start", "-1"],
    "--record": ["--record", "{prompts}/x"],
    "--record-bytes": ["--record-bytes", "0"],
    "--redact": ["--redact", "nowhere"],
    "--repetition-context-size": ["--repetition-context-size", "0"],
    "--repetition-penalty": ["--repetition-penalty", "-1"],
    "--round-size": ["--round-size", "0"],
    "--rounds": ["--rounds", "0"],
    "--run": ["--run", "{prompts}/x"],
    "--runs": ["--runs", "0"],
    "--sampler": ["--sampler", "nope"],
    "--seed": ["--seed", "-1"],
    "--served-model-name": ["--served-model-name", ""],
    "--set": ["--set", "nope=1"],
    "--shard-size": ["--shard-size", "0"],
    "--stop": ["--stop", ""],
    "--stop-token": ["--stop-token", "-1"],
    "--suite": ["--suite", "nope"],
    "--system": ["--system", LATIN1],
    "--temp": ["--temp", "-1"],
    "--template": ["--template", "{{no_such_key}}"],
    "--texts": ["--texts", "{prompts}/x"],
    "--top-k": ["--top-k", "-1"],
    "--top-p": ["--top-p", "1.5"],
    "--trace": ["--trace", "nowhere/a.jsonl"],
    "--tree": ["--tree", "0"],
    "--verify": ["--verify", "nope"],
    "--xtc-probability": ["--xtc-probability", "2"],
    "--xtc-threshold": ["--xtc-threshold", "0.6"],
}
ANYTHING = {
    "--target": "the first to load",
    "--host": "no name of a machine is known to be wrong",
    "--prompt": "the other name of the argument",
    "--verbose": "as in mlx_lm, all but False is True",
    "--split": "of a hub dataset",
    "--subset": "of a hub dataset",
}
NAMES = {
    "--adapter-path": "nowhere/adapter_config.json",
    "--data": "nowhere holds no dataset",
    "--drafter": "no/such/drafter",
    "--logits-processor": "Unknown logits processor",
    "--prompts": "nowhere.jsonl",
    "--record": "prompts.jsonl/x: Not a directory",
    "--set": "'nope'",
    "--suite": "'nope'",
    "--verify": "Unknown verification rule",
}
"""What an error calls the option, where it is neither that nor the name in Python."""


def loads_a_target(name: str) -> list[str]:
    """The options with a value of a command that loads a target."""
    command = COMMAND
    for part in name.split():
        command = command.commands[part]
    shown = [p.opts[0] for p in command.params if not getattr(p, "is_flag", False)]
    return [option for option in shown if option.startswith("--") and option not in ("--help", *ANYTHING)]


CASES = [(name, option) for name in COMMANDS for option in loads_a_target(name)]


@pytest.mark.parametrize(("command", "option"), CASES)
def test_a_bad_value_is_refused_before_the_target_loads(command, option, prompts, tmp_path):
    """The target does not exist, and nothing says so: the value is what is wrong."""
    if option == "--suite":
        args = [COMMANDS[command][0], *COMMANDS[command][3:]]  # suites bring their prompts
    elif option == "--output" and command == "prepare":
        args = [*COMMANDS[command][:2], *COMMANDS[command][3:]]
    else:
        args = COMMANDS[command]
    result = invoke(*(text.format(prompts=prompts, new=tmp_path / "new") for text in [*args, *BAD[option]]))
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code in (1, 2)
    assert NO_TARGET not in result.output
    field = next((f for f in fields(DecodeOptions) if flag_of(f) == option), None)
    known = {option, option[2:], option[2:].replace("-", "_"), NAMES.get(option, option)}
    known |= set() if field is None else {field.name, field.metadata["called"] or field.name}
    assert any(name in result.output for name in known), result.output
    assert list(tmp_path.iterdir()) == [tmp_path / "prompts.jsonl"]  # nothing was begun
