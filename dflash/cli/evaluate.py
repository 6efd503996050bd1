"""``dflash eval``: how good a drafter is, by decoding a file of prompts.

Knows options, files and what to print. Must not know how anything is measured. Mounted by ``cli``.
"""

import json
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import DFlashError
from . import loading, options, terminal
from .requests import Form, Requests, that_fit

if TYPE_CHECKING:
    from ..training.evaluate import Acceptance

app = typer.Typer()

MAX_TOKENS = 256


@app.command("eval")
def evaluate(
    drafter: Annotated[
        str | None,
        typer.Argument(metavar="[PATH|HUB]", help="Default: the bundled one.", callback=options.not_empty),
    ] = None,
    target: options.Target = None,
    prompts: options.Prompts = None,
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
    """Score a drafter on a file of prompts by decoding: acceptance length, and acceptance by position.

    Ctrl-C ends it with the score of the prompts that were answered.

    Examples:

    dflash eval
    dflash eval runs/mine/drafter --target Qwen/Qwen3-4B --prompts mine.jsonl --json
    dflash eval DRAFTER --target T --prompts q.jsonl --template "{question}" --limit 50
    """
    asked = dict(locals())
    from ..bench import HELDOUT
    from ..environment import environment
    from ..trace import TraceFile

    form = Form(chat, options.json_object(chat_template_config, "--chat-template-config"), system)
    penalties = options.penalties(repetition_penalty, presence_penalty, frequency_penalty, logit_bias)
    processors = tuple(logits_processor or ())
    sampling = options.Sampling(temp, top_p, min_p, top_k, sampler, processors, penalties, verify, None, tree)
    requests = Requests.read(prompts or HELDOUT, template=template, limit=limit)
    decoder = loading.load_decoder(target, drafter, None, trust_remote_code, draft_bits, draft_window)
    loaded = decoder.loaded_target
    fitting, left_out = that_fit(requests, requests.encode(loaded, form), loaded.max_length, max_tokens)
    loading.set_seed(seed)
    terminal.show_progress()
    with ExitStack() as stack:
        names = {"target": loading.path_or_bundled(target), "drafter": loading.path_or_bundled(drafter)}
        watching = {} if trace is None else {"trace": stack.enter_context(TraceFile(trace, **names))}
        parts, interrupted = _parts(decoder, [p.tokens for p in fitting], max_tokens, sampling, watching)
    settings = {name: value for name, value in asked.items() if name != "as_json"} | {
        "target": loading.path_or_bundled(target),
        "drafter": loading.path_or_bundled(drafter),
        "prompts": requests.identity(),
        "trace": trace and str(trace),
    }
    about = {"settings": settings, "environment": environment(), "complete": not (interrupted or left_out)}
    _show(parts, decoder.draft_model.block_size, about | {"left_out": left_out}, as_json)
    if interrupted:
        print(f"Stopped after {len(parts)} of {len(fitting)} prompts.", file=sys.stderr)
        raise typer.Exit(130)


def _parts(
    decoder: Any, prompts: list[list[int]], max_tokens: int, sampling: options.Sampling, watching: dict[str, Any]
) -> tuple[list["Acceptance"], bool]:
    """Counts of each prompt that was answered, and whether Ctrl-C came before the last."""
    from ..progress import progress
    from ..training.evaluate import measure_each

    asked = sampling.for_dflash() | watching
    each = measure_each(decoder.loaded_target, decoder.draft_model, prompts, max_tokens, sampling.temp, **asked)
    parts: list[Acceptance] = []
    try:
        for part in progress(each, "eval", len(prompts)):
            parts.append(part)
    except KeyboardInterrupt:
        if not parts:
            raise
        return parts, True
    return parts, False


def _show(parts: list["Acceptance"], block_size: int, about: dict[str, Any], as_json: bool) -> None:
    from ..training.evaluate import total

    results = {"prompts": len(parts)} | total(parts, block_size).results()
    if not results["blocks"]:
        raise DFlashError("No answer was long enough for a block, so there is no acceptance to measure.")
    if as_json:
        each = [{"acceptance_length": p.length, "blocks": p.blocks, "generated_tokens": p.committed} for p in parts]
        print(json.dumps(results | {"by_prompt": each} | about))
        return
    print(f"acceptance length {results['acceptance_length']:.3f} tokens per target pass")
    print(f"{results['prompts']} prompts, {results['blocks']} blocks, {results['generated_tokens']} tokens")
    print("position   blocks accepted up to it")
    for position, rate in enumerate(results["acceptance_by_position"], 1):
        print(f"{position:8}   {rate:.3f}")
