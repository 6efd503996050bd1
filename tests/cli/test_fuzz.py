"""Command lines and calls made at random from the options' own records: never a traceback, a hang, or half a file.

Each case is made from its number alone, so that one that fails can be made again.
"""

import json
import logging
import random
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import mlx.core as mx
import pytest
from support.cli import COMMAND, command_names, invoke

import dflash
from dflash import DecodeOptions, DFlashSpeculativeDecoder
from dflash.cli.adapt import NOT_BETTER
from dflash.core.errors import DFlashError
from dflash.evaluation import trace_plots as _imported_whole  # noqa: F401  # Ctrl-C within an import would leave half
from dflash.models import ModelOptions

SECONDS = 20.0
"""After these a command gets Ctrl-C, which is a right end of one that was asked for much."""

PAIR = "--target {place}/target --drafter {place}/drafter"
COMMANDS = {
    "generate": f"Hi {PAIR} --max-tokens 4",
    "demo": f"Hi {PAIR}",
    "chat": f"{PAIR} --max-tokens 4",
    "serve": f"{PAIR} --max-tokens 4 --port 0",
    "cache-prompt": f"Hi {PAIR} --prompt-cache-file {{out}}/c.safetensors",
    "bench": f"{PAIR} --prompts {{place}}/prompts.jsonl --limit 1 --max-tokens 4",
    "doctor": "",
    "eval": "{place}/drafter --target {place}/target --prompts {place}/prompts.jsonl --limit 1 --max-tokens 4",
    "texts": "--folder {place}/texts",
    "prompts": "--target {place}/target --count 1 --output {out}/made.jsonl --max-tokens 4 --round-size 1",
    "prepare": "{place}/prompts.jsonl {out}/made --target {place}/target --max-tokens 4",
    "data show": "{place}/made",
    "data split": "{place}/made",
    "data join": "{place}/made --output {out}/joined",
    "data export": "{place}/made {out}/rows.jsonl",
    "recipe": "--target {place}/target --data {place}/data --run {out}/run",
    "fit": "--target {place}/target --output {out}/fitted --dry-run",
    "adapt": "{place}/record --target {place}/target --drafter {place}/finished/drafter --output {out}/new --steps 1 "
    "--set data.max_length=40 --set data.batch_tokens=128 --set data.max_blocks_per_batch=16 --set data.anchors=8",
    "cache-features": "{place}/recipe.yaml --set data.cached_features={out}/features",
    "train": "{place}/recipe.yaml --set run.folder={out}/run --set run.steps=2",
    "export": "{place}/finished {out}/exported",
    "ablate": "{place}/study.yaml --dry-run",
    "compare": "{place}/finished --no-decode",
    "report": "{place}/trace.jsonl -o {out}/page.html",
    "quantize": "{place}/drafter {out}/packed --group-size 32",
    "import": "{place}/model.gguf {out}/imported",
    "adapters list": "",
    "adapters check": "{place}/target --rounds 1",
}
NUMBERS = ["0", "1", "2", "3", "-1", "64", "0.5", "1e308", "nan", "inf", "99999999999999999999", "x", ""]
TEXTS = ["", " ", "hi", "a=b", "{}", '{"a": 1}', '{"7": -100}', "[", "naïve 😀", "caf\udce9", "{x}", "-", "all"]
NAMES = "bundled ngram ngram+ngram mtp adaptive full first_mismatch speculative_sampling x:y=1".split()
FILES = ["target", "drafter", "prompts.jsonl", "data", "finished", "recipe.yaml", "study.yaml", "trace.jsonl", "none"]


# --- command lines ------------------------------------------------------------------------------------------


def parameters(command: str) -> list[Any]:
    """Options and arguments of a command, as typer has them."""
    found = COMMAND
    for name in command.split():
        found = found.commands[name]
    return [parameter for parameter in found.params if parameter.name not in ("help", "trust_remote_code")]


def value_of(parameter: Any, place: Path, out: Path, dice: random.Random) -> str:
    """One of a kind that the option takes, or one of another kind."""
    kind, told = parameter.type_descriptor.annotation, str(parameter.metavar or "")
    choices = [str(choice) for choice in get_args(kind)]
    paths = [str(place / name) for name in FILES]
    paths += [str(out / "new.jsonl"), str(out / "deep" / "x.safetensors"), str(out)]
    pools = [NUMBERS if kind in (int, float) else TEXTS, choices or NAMES]
    if kind is Path or any(word in told for word in ("PATH", "FILE", "FOLDER", "HUB", ".")):
        pools += [paths] * 3
    return dice.choice(dice.choice([*pools, NUMBERS + TEXTS + NAMES]))


def command_line(number: int, place: Path, out: Path) -> list[str]:
    """A command that works, some of its words replaced, and up to three options more."""
    dice = random.Random(number)
    name = dice.choice(list(COMMANDS))
    words = [word.format(place=place, out=out) for word in COMMANDS[name].split()]
    known = parameters(name)
    if words and dice.random() < 0.2:
        words[dice.randrange(len(words))] = dice.choice(NUMBERS + TEXTS)
    for parameter in dice.sample(known, min(len(known), dice.randrange(4))):
        if parameter.param_type_name == "argument":
            continue
        words.append(dice.choice([*parameter.opts, *parameter.secondary_opts]))
        if not parameter.is_flag:
            words.append(value_of(parameter, place, out, dice))
    return [*name.split(), *words]


@contextmanager
def ctrl_c_after(seconds: float) -> Iterator[None]:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def check_command_line(number: int, place: Path, out: Path) -> None:
    own = Path(shutil.copytree(place, out / "in"))  # that may be written to
    for file in (own / "recipe.yaml", own / "study.yaml"):
        file.write_text(file.read_text().replace(str(place), str(own)))
    place = own
    line = command_line(number, place, out)
    with ctrl_c_after(SECONDS):
        result = invoke(*line, stdin="Hi\n")
    told = f"case {number}: dflash {line}\n{result.exception!r}\n{result.output[-1500:]}"
    assert isinstance(result.exception, SystemExit | None), told
    assert result.exit_code in (0, 1, 2, NOT_BETTER, 130), told
    assert "Traceback" not in result.output, told
    if result.exit_code == 1:
        assert "error: " in result.stderr, told
    for path in out.rglob("*"):
        assert result.exit_code == 130 or not (path.name.startswith(".") and path.stat().st_size), (told, path)
        if path.suffix == ".safetensors" and path.is_file():
            mx.eval(mx.load(str(path)))
        elif path.suffix == ".json":
            json.loads(path.read_text())


def check_command_lines(numbers: range, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("http.server.ThreadingHTTPServer.serve_forever", lambda server: None)  # it has started: enough
    monkeypatch.setattr("dflash.evaluation.demo.MAX_TOKENS", 8)
    handlers = logging.root.handlers[:]
    for number in numbers:
        out = tmp_path / str(number)
        out.mkdir()
        check_command_line(number, place, out)
        logging.root.handlers[:] = handlers


def test_every_command_is_among_them():
    assert {" ".join(name) for name in command_names()} == {*COMMANDS, "adapters bench"}  # which takes minutes


def test_some_command_lines_end_in_an_answer_or_one_error(place, tmp_path, monkeypatch):
    check_command_lines(range(30), place, tmp_path, monkeypatch)


@pytest.mark.slow
def test_two_thousand_command_lines_do(place, tmp_path, monkeypatch):
    check_command_lines(range(30, 2030), place, tmp_path, monkeypatch)


# --- calls ----------------------------------------------------------------------------------------------------

ANYTHING = [
    *(None, 0, 1, 2, 4, 64, -1, 10**30, 0.0, 0.5, 1.5, float("nan"), float("inf"), True, "", " ", "x", "hi", b"x"),
    *([], [0], [1, 2], ["x"], [[1]], [None], (), {}, {1: 1.0}, {1: "x"}, {"a": 1}, {-1: 0.5}, object(), Path("none")),
    *("ngram", "full", "adaptive", "first_mismatch", "speculative_sampling", mx.array([1, 2]), mx.array(0.5)),
]
PROMPTS = [
    *("hi", "hi", "hi", [65, 66], mx.array([[65, 66]])),
    [{"role": "user", "content": "hi"}],
    [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
    [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None}, {"role": "user"}],
    [{"role": 3, "content": "hi"}],
    "long " * 100,
]
ROOM = 96  # tokens


def call(number: int, place: Path, out: Path, decoder: DFlashSpeculativeDecoder) -> Any:
    """One of the public calls, with up to three options of any value."""
    dice = random.Random(number)

    def some(record: type, *more: str) -> dict[str, Any]:
        names = [field.name for field in fields(record) if field.name != "trust_remote_code"] + list(more)
        return {name: dice.choice(ANYTHING) for name in dice.sample(names, dice.randrange(1, 4))}

    prompt = dice.choice([*PROMPTS, dice.choice(ANYTHING)])
    options = some(DecodeOptions, "chat", "system", "chat_template_config", "prefill_response", "temperature", "stop")
    if isinstance(options.get("trace"), str | Path):
        options["trace"] = out / "trace.jsonl"
    match dice.randrange(9):
        case 0 | 1 | 2:
            return decoder.generate(prompt, **options)
        case 3:
            return decoder.spec_generate(prompt, **options)
        case 4:
            return list(decoder.stream_generate(prompt, **options))
        case 5:
            cache = decoder.make_prompt_cache()
            decoder.cache_prompt(prompt, cache, dice.choice(ANYTHING))
            return decoder.generate(prompt, **(options | {"prompt_cache": cache}))
        case 6:
            given = {"target": str(place / "target"), "drafter": "ngram"} | some(ModelOptions, "max_seq_length")
            return DFlashSpeculativeDecoder.from_pretrained(**given).generate("hi", max_tokens=4)
        case 7:
            prompts = dice.choice([[prompt, "hi", prompt], prompt])
            return list(decoder.stream_batch(prompts, dice.choice([1, 2, *ANYTHING]), **options))
        case _:
            return dflash.load_drafter(dice.choice([place / "drafter", "ngram"]), *dice.choices(ANYTHING, k=2))


def check_calls(numbers: range, place: Path, out: Path) -> None:
    pair = place / "target", place / "drafter"
    decoder = DFlashSpeculativeDecoder.from_pretrained(*pair, max_seq_length=ROOM)
    expected = decoder.generate("hi", max_tokens=20)
    for number in numbers:
        try:
            call(number, place, out, decoder)
        except (DFlashError, OSError) as error:
            if "\n" in str(error):
                pytest.fail(f"call {number}: more than a line: {error}")
        except Exception as error:  # what must not come
            raise AssertionError(f"call {number}: {type(error).__name__}: {error}") from error
    assert decoder.generate("hi", max_tokens=20) == expected


def test_some_calls_answer_or_raise_one_line(place, tmp_path):
    check_calls(range(80), place, tmp_path)


@pytest.mark.slow
def test_two_thousand_calls_do(place, tmp_path):
    check_calls(range(80, 2080), place, tmp_path)
