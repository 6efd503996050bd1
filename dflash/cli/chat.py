"""``dflash chat``: a conversation in the terminal. Both caches keep it, so that each turn reads only what is new."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, Any

import typer

from ..core.errors import DFlashError, GenerationError, did_you_mean
from ..models import ModelOptions
from ..options import DecodeOptions
from . import loading, options, terminal
from .decode import generation
from .requests import PromptFormat

if TYPE_CHECKING:
    from ..decoding.stream import DFlashResponse
    from ..decoding.trace import Trace
    from ..generate import DFlashSpeculativeDecoder

app = typer.Typer()


@app.command()
@options.grouped(
    models=options.group(ModelOptions),
    form=options.group(PromptFormat, "system", "chat_template_config"),
    decoding=options.group(DecodeOptions, without=("prompt_cache", "profile")),
)
def chat(models: ModelOptions, form: PromptFormat, decoding: DecodeOptions) -> None:
    """Talk with the target; it remembers the conversation.

    One line is one message, from the terminal or a pipe. Ctrl-C ends an answer, Ctrl-D the chat.

    /stats tokens, acceptance and speed of the last answer and of the whole chat

    /plain decode without the drafter, until /plain comes again

    /drafts colour accepted and rejected drafts, until /drafts comes again

    /reset forget the conversation

    /help show these commands

    Examples:

    dflash chat

    dflash chat --target smollm2 --system "Answer in French." --temp 0.7

    dflash chat < questions.txt
    """
    decoder = loading.load_decoder(models)
    if decoder.tokenizer is None or not decoder.tokenizer.has_chat_template:
        raise GenerationError("The target's tokenizer has no chat template; use dflash generate --raw.")
    if sys.stdin.isatty():
        with suppress(ImportError):
            import readline  # noqa: F401  # arrow keys and earlier lines in `input`
        tell("One line is one message. /help shows the commands, Ctrl-D ends.")
    with loading.trace_file(decoding, models) as file:
        talk = Chat(decoder, form, decoding, file)
        for line in lines():
            try:
                talk.take(line)
            except DFlashError as error:
                tell(f"error: {error}")


def lines() -> Iterator[str]:
    """What is typed or piped, line by line, to its end; Ctrl-C in a terminal only drops a line."""
    typed = sys.stdin.isatty()
    while True:
        try:
            yield input("> " if typed else "")
        except EOFError:
            if typed:
                tell("")
            return
        except KeyboardInterrupt:
            if not typed:
                raise
            tell("\nCtrl-D ends the chat.")
        except UnicodeDecodeError as error:
            raise DFlashError(f"Standard input is not UTF-8 text: {error}.") from error


def tell(text: str) -> None:
    """Print what is no answer."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def between_blocks() -> Iterator[threading.Event]:
    """Let Ctrl-C set an event, since the caches would not outlast an interrupt of a block; a second one interrupts."""
    asked = threading.Event()

    def stop(_number: int, _frame: FrameType | None) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


class Chat:
    """The conversation so far, the caches that hold it, and how the next answer is decoded."""

    def __init__(
        self, decoder: "DFlashSpeculativeDecoder", form: PromptFormat, decoding: DecodeOptions, trace: "Trace | None"
    ):
        self._decoder, self._form, self._decoding, self._trace = decoder, form, decoding, trace
        self._plain = self._drafts = False
        self._messages: list[dict[str, str]] = []
        self._answers: list[dict[str, Any]] = []
        self._cache = decoder.make_prompt_cache(**decoding.cache_options)
        if decoding.tree is not None:  # at once, or each message would fail
            decoder.loaded_target.check_trees(self._cache.target_cache)
        self.commands: dict[str, Callable[[], None]] = {
            "/stats": self.stats,
            "/plain": self.plain,
            "/drafts": self.drafts,
            "/reset": self.reset,
            "/help": self.help,
        }

    def take(self, line: str) -> None:
        """Answer a message, or obey a command. Raises ``DFlashError`` for what cannot be answered."""
        name = line.rstrip()
        if not name.startswith("/"):
            if name:
                self.answer(line.strip())
        elif name in self.commands:
            self.commands[name]()
        else:
            fix = did_you_mean(name, self.commands)
            raise DFlashError(f"Unknown command {name!r}; {fix} A message that begins with / needs a space before it.")

    def answer(self, text: str) -> None:
        """Show the answer as it comes; what there is of it at Ctrl-C counts as the answer."""
        from ..decoding.trace import together
        from .blocks import ColouredText

        messages = [*self._messages, {"role": "user", "content": text}]
        tokens = self._form.tokens(messages, self._decoder.loaded_target)
        coloured = ColouredText(rejected=True) if self._drafts else None
        decoding = replace(self._decoding, prompt_cache=self._cache, trace=together(self._trace, coloured))
        decoding = replace(decoding, policy=0) if self._plain else decoding
        responses: list[DFlashResponse] = []
        steps = self._decoder.stream_generate(tokens, **decoding.asked())
        # A prompt cache notices what a second Ctrl-C interrupted, and is read anew.
        with suppress(KeyboardInterrupt), between_blocks() as stopped, closing(steps):  # type: ignore[type-var]
            for response in steps:
                responses.append(response)
                if coloured is None:
                    terminal.show(response.text)
                if stopped.is_set():
                    break
        print(flush=True)
        if responses:
            result = generation(len(tokens), responses)
            self._answers.append(result | {"cached": self._cache.reused})
            self._messages = [*messages, {"role": "assistant", "content": result["text"]}]

    def stats(self) -> None:
        """Tell tokens, acceptance and speed."""
        if not self._answers:
            tell("No answer yet.")
            return
        for name, answers in (("last answer", self._answers[-1:]), ("whole chat", self._answers)):
            tell(f"{name + ':':<12} {summary(answers)}")

    def plain(self) -> None:
        """Decode without the drafter, or with it again."""
        self._plain = not self._plain
        tell("Without the drafter from here on." if self._plain else "With the drafter again.")

    def drafts(self) -> None:
        """Show drafts in colours, or no longer."""
        self._drafts = not self._drafts
        tell("Drafts are shown in colours." if self._drafts else "Drafts are no longer shown.")

    def reset(self) -> None:
        """Forget the conversation."""
        self._messages, self._answers = [], []
        self._cache = self._decoder.make_prompt_cache(**self._decoding.cache_options)

    def help(self) -> None:
        """Tell what the commands do."""
        for name, command in self.commands.items():
            tell(f"{name:<8} {(command.__doc__ or '').strip()}")
        tell("Ctrl-C ends an answer, Ctrl-D the chat. A line that begins with a space is never a command.")


def summary(answers: list[dict[str, Any]]) -> str:
    """One line on answers: their tokens, speed and acceptance, their prompts and what of these was cached."""
    total = {name: sum(a[name] for a in answers) for name in ("generation_tokens", "prompt_tokens", "cached")}
    timed = [(a["generation_tokens"] - 1, a["generation_tps"]) for a in answers if a["generation_tps"]]
    committed = [tokens for a in answers for tokens in a["committed"]]
    told = [f"{total['generation_tokens']} tokens"]
    if committed and timed:  # first tokens belong to no block and have no speed
        seconds = sum(count / tps for count, tps in timed)
        told.append(f"{sum(count for count, _ in timed) / seconds:.1f} tokens/s")
        told.append(f"acceptance length {sum(committed) / len(committed):.2f}")
    return ", ".join(told) + f"; prompts of {total['prompt_tokens']} tokens, {total['cached']} cached"
