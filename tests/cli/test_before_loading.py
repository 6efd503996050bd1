"""Before a target loads: what needs no model is refused (later would be minutes later), and its own code is trusted."""

from dataclasses import fields
from itertools import chain

import pytest
from click.testing import Result
from support.cli import COMMAND, assert_one_error, invoke

from dflash.cli.options import flag_of
from dflash.options import DecodeOptions

LATIN1 = b"caf\xe9".decode("utf-8", "surrogateescape")  # as Python hands over such an argument
NO_TARGET = "./none"

ARGUMENTS = {
    "generate": "Hi",
    "demo": "",
    "chat": "",
    "serve": "",
    "cache-prompt": "Hi --prompt-cache-file {new}.safetensors",
    "bench": "--prompts {prompts}",
    "doctor": "",
    "eval": "--prompts {prompts}",
    "prompts": "--count 2 --output {new}",
    "prepare": "{prompts} {new}",
    "fit": "--output {new}",
    "recipe": "",
    "adapters check": "",
}
"""Commands that load a target, and what they need beside it."""
INSTEAD = {("eval", "--suite"): "", ("prepare", "--output"): "{prompts}"}
BAD_VALUES = {
    "": "--admin-key --allowed-origin --also --api-key --extra-eos-token --served-model-name --stop",
    "-1": "--heldout-at-least --max-tokens --prompt-cache-bytes --quantized-kv-start --repetition-penalty --stop-token "
    "--temp --top-k",
    "0": "--batch-size --count --decode-concurrency --draft-window --frequency-context-size --limit --max-body-bytes "
    "--max-queue --min-tokens-to-keep --patience --prefill-step-size --presence-context-size --prompt-caches "
    "--record-bytes --repetition-context-size --round-size --rounds --runs --shard-size --tree",
    "0.6": "--xtc-threshold",
    "1": "--block-size --max-length --max-seq-length",
    "1.5": "--top-p",
    "2": "--min-p --xtc-probability",
    "4": "--max-kv-size",
    "5": "--kv-bits",
    "48 --kv-bits 8": "--kv-group-size",
    "7": "--draft-bits",
    "101": "--heldout-percent",
    "65536": "--port",
    str(2**64): "--seed",
    "nan": "--frequency-penalty --presence-penalty",
    "0.1,0.2": "--acceptance",
    "1,x": "--batch",
    "[1]": "--logit-bias",
    "{{": "--chat-template-config",
    "{{question}}": "--template",
    LATIN1: "--begin --prefill-response --system",
    "nope": "--logits-processor --policy --sampler --suite --verify",
    "nope=1": "--set",
    "no/such/drafter": "--drafter",
    "nowhere": "--adapter-path --data --redact",
    "nowhere.jsonl": "--prompts",
    "nowhere/a.jsonl": "--trace",
    "nowhere/a.safetensors": "--prompt-cache-file",
    "nowhere/a.svg": "--plot",
    "{prompts}/x": "--output --record --run --texts",
}
BAD = {option: value for value, options in BAD_VALUES.items() for option in options.split()}
ANYTHING = {
    "--target": "the first to load",
    "--host": "no name of a machine is known to be wrong",
    "--prompt": "the other name of the argument",
    "--verbose": "as in mlx_lm, all but False is True",
    "--split": "of a hub dataset",
    "--subset": "of a hub dataset",
}
SAYS = {
    "--adapter-path": ["nowhere/adapter_config.json"],
    "--block-size": ["--block-size must be at least 2, the anchor and one draft; got 1"],
    "--chat-template-config": ["--chat-template-config is not valid JSON"],
    "--data": ["nowhere holds no dataset"],
    "--draft-bits": ["draft_bits must be 2, 3, 4, 5, 6 or 8, got 7"],
    "--drafter": ["no/such/drafter"],
    "--kv-bits": ["kv_bits must be 2, 3, 4, 6 or 8"],
    "--limit": ["limit must be at least 1, got 0"],
    "--logits-processor": ["Unknown logits processor 'nope'"],
    "--policy": ["Unknown policy 'nope'"],
    "--presence-penalty": ["presence_penalty must be a finite number, got nan"],
    "--prompts": ["nowhere.jsonl"],
    "--record": ["prompts.jsonl/x: Not a directory"],
    "--sampler": ["Unknown sampler 'nope'"],
    "--seed": [f"--seed must be a whole number from 0 to {2**64 - 1}, got {2**64}"],
    "--set": ["'nope'"],
    "--stop": ["--stop must not be empty"],
    "--suite": ["'nope'"],
    "--template": ["has no 'question' for the template"],
    "--verify": ["Unknown verification rule 'nope'"],
}
"""What an error says; of other options it is the name, on the command line or in Python."""


def loads_a_target(name: str) -> list[str]:
    """The options with a value of a command that loads a target."""
    command = COMMAND
    for part in name.split():
        command = command.commands[part]
    shown = [p.opts[0] for p in command.params if not getattr(p, "is_flag", False)]
    return [option for option in shown if option.startswith("--") and option not in ("--help", *ANYTHING)]


def names(option: str) -> list[str]:
    """What an error may call an option."""
    in_python = [(f.name, f.metadata["called"] or f.name) for f in fields(DecodeOptions) if flag_of(f) == option]
    return [option, option[2:], option[2:].replace("-", "_"), *chain(*in_python)]


CASES = [(name, option) for name in ARGUMENTS for option in loads_a_target(name)]


@pytest.fixture
def without_a_target(prompts, tmp_path):
    """A command whose target does not exist, with an option and its value."""

    def call(command: str, *option: str) -> Result:
        words = INSTEAD.get((command, *option[:1]), ARGUMENTS[command])
        target = [NO_TARGET] if command == "adapters check" else ["--target", NO_TARGET]
        given = [*command.split(), *words.split(), *target, *option]
        return invoke(*(word.format(prompts=prompts, new=tmp_path / "new") for word in given))

    return call


@pytest.mark.parametrize(("command", "option"), CASES)
def test_a_bad_value_is_refused_before_the_target_loads(command, option, without_a_target, tmp_path):
    """The target does not exist, and nothing says so: the value is what is wrong."""
    result = without_a_target(command, option, *BAD[option].split(" "))
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code in (1, 2)
    assert NO_TARGET not in result.output
    assert any(words in result.output for words in SAYS.get(option) or names(option)), result.output
    assert list(tmp_path.iterdir()) == [tmp_path / "prompts.jsonl"]  # nothing was begun


@pytest.mark.parametrize("command", ARGUMENTS)
def test_a_target_that_is_not_there_is_one_line(command, without_a_target):
    message = f"No checkpoint folder at '{NO_TARGET}'|'{NO_TARGET}' is neither a folder, nor a hub name"
    assert_one_error(without_a_target(command), message)


class Loaded(Exception):
    """Stands for the target."""


WITH_FILES = {
    "train": "{place}/recipe.yaml --set run.folder={new}",
    "cache-features": "{place}/recipe.yaml --set data.cached_features={new}",
    "ablate": "{place}/study.yaml",
    "ablate --dry-run": "{place}/study.yaml",
    "compare": "{place}/finished {place}/finished",
}
LOADED_BY = {"recipe": "training.new_recipe", "fit": "training.pipeline", "compare": "study.compare"}
LOADED_BY |= dict.fromkeys(("train", "cache-features"), "training.train")
LOADED_BY |= dict.fromkeys(("ablate", "ablate --dry-run"), "study.ablation")


@pytest.mark.parametrize("command", [*ARGUMENTS, *WITH_FILES])
def test_code_of_a_target_runs_only_where_the_command_line_trusts_it(
    command, without_a_target, place, monkeypatch, tmp_path
):
    trusted = []

    def load(path, trust_remote_code=False, adapter_path=None):
        trusted.append(trust_remote_code)
        raise Loaded

    monkeypatch.setattr(f"dflash.{LOADED_BY.get(command, 'target')}.load_target", load)
    for options in ([], ["--trust-remote-code"]):
        if command in WITH_FILES:
            words = WITH_FILES[command].format(place=place, new=tmp_path / "new").split()
            answer = invoke(*command.split(), *words, *options)
        else:
            answer = without_a_target(command, *options)
        assert isinstance(answer.exception, Loaded), answer.output
    assert trusted == [False, True]
