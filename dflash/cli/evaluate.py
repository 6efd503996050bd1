"""``dflash eval``: how good a drafter is, by decoding a file of prompts or standard suites.

Knows options, files and what to print. Must not know how anything is measured. Mounted by ``cli``.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core.errors import DFlashError
from . import loading, options, terminal
from .requests import Form, Requests, that_fit

if TYPE_CHECKING:
    from ..evaluation import BenchPrompt
    from ..evaluation.acceptance import Acceptance

app = typer.Typer()

MAX_TOKENS = 256
Suites = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME[=FILE.jsonl]",
        help="gsm8k, math500, humaneval, mbpp or mt-bench, from the hub or a file of its rows; repeatable. Or: all.",
        callback=options.not_empty,
    ),
]


@app.command("eval")
def evaluate(
    drafter: Annotated[
        str | None,
        typer.Argument(metavar="[PATH|HUB]", help="Default: the bundled one.", callback=options.not_empty),
    ] = None,
    target: options.Target = None,
    prompts: options.Prompts = None,
    suite: Suites = None,
    template: options.Template = None,
    limit: options.Limit = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate for a prompt.")] = MAX_TOKENS,
    temp: options.Temp = 0.0,
    top_p: options.TopP = 0.0,
    min_p: options.MinP = 0.0,
    top_k: options.TopK = 0,
    logit_bias: options.LogitBias = None,
    repetition_penalty: options.RepetitionPenalty = 0.0,
    presence_penalty: options.PresencePenalty = 0.0,
    frequency_penalty: options.FrequencyPenalty = 0.0,
    seed: options.RunSeed = 0,
    chat: options.Chat = True,
    system: options.System = None,
    chat_template_config: options.TemplateConfig = None,
    verify: options.Verify = None,
    tree: options.TreeNodes = None,
    sampler: options.SamplerName = None,
    logits_processor: options.ProcessorNames = None,
    draft_bits: options.DraftBits = None,
    draft_window: options.DraftWindow = None,
    trust_remote_code: options.TrustRemoteCode = False,
    trace: options.TraceTo = None,
    as_json: options.AsJson = False,
) -> None:
    """Score a drafter on prompts by decoding: acceptance length, and acceptance by position.

    Suites, and prompts whose lines have a "kind", get a row each. Ctrl-C ends it
    with the score of the prompts that were answered.

    Examples:

    dflash eval
    dflash eval runs/mine/drafter --target Qwen/Qwen3-4B --prompts mine.jsonl --json
    dflash eval DRAFTER --target T --suite gsm8k --suite mt-bench=FILE.jsonl --limit 80
    """
    asked = {name: value for name, value in locals().items() if name != "as_json"}
    from ..decoding.trace import TraceFile
    from ..evaluation.acceptance import measure_turns

    form = Form(chat, options.json_object(chat_template_config, "--chat-template-config"), system)
    penalties = options.penalties(repetition_penalty, presence_penalty, frequency_penalty, logit_bias)
    processors = tuple(logits_processor or ())
    sampling = options.Sampling(temp, top_p, min_p, top_k, sampler, processors, penalties, verify, None, tree)
    requests = _requests(prompts, suite, template, limit)
    decoder = loading.load_decoder(target, drafter, None, trust_remote_code, draft_bits, draft_window)
    loaded = decoder.loaded_target
    fitting, left_out = that_fit(requests, requests.encode(loaded, form), loaded.max_length, max_tokens)
    names = {"target": loading.path_or_bundled(target), "drafter": loading.path_or_bundled(drafter)}
    loading.set_seed(seed)
    terminal.show_progress()
    with ExitStack() as stack:
        watching = {} if trace is None else {"trace": stack.enter_context(TraceFile(trace, **names))}
        encode = form.in_messages(loaded)
        each = measure_turns(decoder, fitting, encode, max_tokens, temp, **sampling.for_dflash(), **watching)
        parts, interrupted = _parts(each, fitting, decoder.draft_model.block_size)
    settings = asked | names | {"prompts": requests.identity(), "trace": trace and str(trace)}
    about = {"settings": settings, "complete": not (interrupted or left_out), "left_out": left_out}
    _show(parts, [prompt.kind for prompt in fitting[: len(parts)]], decoder.draft_model.block_size, about, as_json)
    if interrupted:
        print(f"Stopped after {len(parts)} of {len(fitting)} prompts.", file=sys.stderr)
        raise typer.Exit(130)


def _requests(prompts: str | None, suites: list[str] | None, template: str | None, limit: int | None) -> Requests:
    from ..evaluation import HELDOUT

    if not suites:
        return Requests.read(prompts or HELDOUT, template=template, limit=limit)
    if prompts is not None or template is not None:
        option = "--prompts" if prompts is not None else "--template"
        raise DFlashError(f"--suite brings prompts and template of its own; leave {option} out.")
    return Requests.of_suites(suites, limit)


def _parts(
    each: "Iterator[tuple[int, Acceptance]]", prompts: "list[BenchPrompt]", block_size: int
) -> tuple[list["Acceptance"], bool]:
    """Counts of each prompt that was answered, all its turns together, and whether Ctrl-C came before the last."""
    from ..core.progress import progress
    from ..evaluation.acceptance import total

    answers = sum(1 + (len(p.conversation.later) if p.conversation else 0) for p in prompts)
    parts: list[Acceptance] = []
    try:
        for number, counts in progress(each, "eval", answers):
            parts[number:] = [total([*parts[number:], counts], block_size)]
    except KeyboardInterrupt:
        if not parts:
            raise
        return parts, True
    return parts, False


def _show(
    parts: list["Acceptance"], kinds: list[str | None], block_size: int, about: dict[str, Any], as_json: bool
) -> None:
    from ..core.environment import environment
    from ..evaluation.acceptance import acceptance_results, render_acceptance

    results = acceptance_results(parts, kinds, block_size)
    if not results["blocks"]:
        raise DFlashError("No answer was long enough for a block, so there is no acceptance to measure.")
    if not as_json:
        terminal.print_rich(render_acceptance(results))
        return
    each = [
        {"acceptance_length": p.length, "blocks": p.blocks, "generated_tokens": p.committed, "kind": kind}
        for p, kind in zip(parts, kinds, strict=True)
    ]
    print(json.dumps(results | {"by_prompt": each, "environment": environment()} | about))
