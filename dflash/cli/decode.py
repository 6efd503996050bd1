"""``dflash generate`` and ``dflash demo``: one request, answered.

Knows options, streams and what to print. Must not know how anything is computed. Mounted by ``cli``.
"""

import json
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core.errors import DFlashError
from . import loading, options, terminal
from .requests import Form, Requests

if TYPE_CHECKING:
    from ..decoding.stream import DFlashResponse
    from ..evaluation import PromptResult

app = typer.Typer()


@app.command()
def generate(
    prompt: Annotated[str, options.Prompt],
    target: options.Target = None,
    drafter: options.DrafterName = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Most tokens to generate. Default: 2048, or as many as there is room for.")
    ] = None,
    temp: options.Temp = 0.0,
    top_p: options.TopP = 0.0,
    min_p: options.MinP = 0.0,
    top_k: options.TopK = 0,
    logit_bias: options.LogitBias = None,
    repetition_penalty: options.RepetitionPenalty = 0.0,
    presence_penalty: options.PresencePenalty = 0.0,
    frequency_penalty: options.FrequencyPenalty = 0.0,
    seed: options.Seed = None,
    block_size: options.BlockSize = None,
    chat: options.Chat = True,
    system: options.System = None,
    chat_template_config: options.TemplateConfig = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="STR", help="End before this text; repeatable.", callback=options.stop_strings),
    ] = None,
    verify: options.Verify = None,
    policy: options.PolicyName = None,
    tree: options.TreeNodes = None,
    sampler: options.SamplerName = None,
    logits_processor: options.ProcessorNames = None,
    draft_bits: options.DraftBits = None,
    draft_window: options.DraftWindow = None,
    prompt_cache_file: options.PromptCacheFile = None,
    max_kv_size: options.MaxKvSize = None,
    kv_bits: options.KvBits = None,
    kv_group_size: options.KvGroupSize = 64,
    quantized_kv_start: options.QuantizedKvStart = 5000,
    trust_remote_code: options.TrustRemoteCode = False,
    show_blocks: Annotated[
        bool, typer.Option("--show-blocks", help="Colour the text: accepted drafts, the target's own tokens.")
    ] = False,
    show_rejected: Annotated[
        bool, typer.Option("--show-rejected", help="As --show-blocks, and show the drafts that were rejected.")
    ] = False,
    trace: options.TraceTo = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Show where the time went, and which verify lengths were chosen.")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Answer one request.

    The text goes to stdout as it comes, then a line on speed to stderr.

    Examples:

    dflash generate "Write a function that doubles each number and sums them."
    dflash generate - --raw --max-tokens 100 --stop "def " < start.py
    dflash generate "Hello" --target T --drafter D --temp 0.8 --seed 1 --json
    dflash generate "Hello" --system "Answer in French."
    dflash generate "Hello" --chat-template-config '{"enable_thinking": false}'
    dflash generate "Who is the thief?" --prompt-cache-file book.safetensors
    dflash generate "What is 7 * 8?" --show-rejected --profile --trace it.jsonl
    """
    from ..decoding.trace import TraceFile, together
    from .blocks import ColouredText, print_profile

    if as_json and (show_blocks or show_rejected):
        raise DFlashError("--show-blocks colours text, and --json prints none; leave one of them out.")
    text = terminal.prompt_text(prompt, keep_ends=not chat)
    form = Form(chat, options.json_object(chat_template_config, "--chat-template-config"), system)
    penalties = options.penalties(repetition_penalty, presence_penalty, frequency_penalty, logit_bias)
    processors = tuple(logits_processor or ())
    sampling = options.Sampling(temp, top_p, min_p, top_k, sampler, processors, penalties, verify, policy, tree)
    decoder = loading.load_decoder(target, drafter, block_size, trust_remote_code, draft_bits, draft_window)
    caching = options.caching(max_kv_size, kv_bits, kv_group_size, quantized_kv_start)
    if prompt_cache_file is None:
        tokens = form.tokens(text, decoder.loaded_target)
    else:
        caching["prompt_cache"] = cache = decoder.load_prompt_cache(prompt_cache_file)
        tokens = cache.tokens + form.continuation(text, decoder.loaded_target)
    loading.set_seed(seed)
    coloured = ColouredText(show_rejected) if show_blocks or show_rejected else None
    responses = []
    with ExitStack() as stack:
        names = {"target": loading.path_or_bundled(target), "drafter": loading.path_or_bundled(drafter)}
        file = None if trace is None else stack.enter_context(TraceFile(trace, **names))
        watching: dict[str, Any] = {"trace": together(file, coloured), "profile": profile}
        try:
            for response in decoder.stream_generate(
                tokens, max_tokens, temp, stop, **sampling.for_dflash(), **caching, **watching
            ):
                responses.append(response)
                if not as_json and coloured is None:
                    terminal.show(response.text)
        except BaseException as error:
            if not as_json and responses:
                print(flush=True)  # what is said next begins a line of its own
            if isinstance(error, KeyboardInterrupt):
                print(f"Stopped after {sum(len(r.tokens) for r in responses)} tokens.", file=sys.stderr)
            raise
    result = generation(len(tokens), responses)
    if as_json:
        print(json.dumps(result))
        return
    print(flush=True)
    print(speed_line(result), file=sys.stderr)
    if responses and responses[-1].profile is not None:
        print_profile(responses[-1].profile)


def generation(prompt_tokens: int, responses: list["DFlashResponse"]) -> dict[str, Any]:
    """What ``generate --json`` prints; no responses come of ``max_tokens`` 0."""
    blocks = responses[1:]  # the first token is the prompt's own pass
    last = responses[-1] if responses else None
    committed = [len(r.tokens) for r in blocks]
    return {
        "text": "".join(r.text for r in responses),
        "tokens": [token for r in responses for token in r.tokens],
        "prompt_tokens": prompt_tokens,
        "generation_tokens": last.generation_tokens if last else 0,
        "committed": committed,
        "drafted": [len(r.drafted) for r in blocks],
        "accepted": [r.accepted for r in blocks],
        "acceptance_length": sum(committed) / len(committed) if committed else None,
        "prompt_tps": last.prompt_tps if last else 0.0,
        "generation_tps": last.generation_tps if last else 0.0,
        "peak_memory": last.peak_memory if last else 0.0,
        "finish_reason": last.finish_reason if last else "length",
    } | ({"profile": last.profile.to_dict()} if last and last.profile else {})


def speed_line(result: dict[str, Any]) -> str:
    """One line on what was generated; a single token has no speed."""
    count, blocks = result["generation_tokens"], len(result["committed"])
    if not blocks:
        return f"{count} token{'' if count == 1 else 's'}, too few to time"
    return (
        f"{count} tokens, {result['generation_tps']:.1f} tokens/s, acceptance length "
        f"{result['acceptance_length']:.2f}, {blocks} block{'' if blocks == 1 else 's'}"
    )


@app.command()
def demo(
    prompt: Annotated[
        str | None,
        typer.Argument(
            help="A request of your own (its answer is not checked); - reads it from standard input.",
            callback=options.is_text,
        ),
    ] = None,
    target: options.Target = None,
    drafter: options.DrafterName = None,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Answer one request plainly, then with DFlash, and compare.

    The request is a heldout one of the bundled models; of a target of one's own
    no answer is checked.

    Examples:

    dflash demo
    dflash demo --target smollm2
    dflash demo "Write a function that keeps the even numbers and returns the largest."
    """
    from .. import evaluation as b
    from ..bundled import heldout_for
    from ..evaluation import demo as d

    text = None if prompt is None else terminal.prompt_text(prompt)
    decoder = loading.load_decoder(target, drafter, trust_remote_code=trust_remote_code)
    loaded = decoder.loaded_target
    if text is None:
        heldout = b.HELDOUT if target is None else heldout_for(loaded)
        requests = Requests.read(heldout).encode(loaded, Form())
    else:
        requests = [b.BenchPrompt(text, Form().tokens(text, loaded))]
    sides = d.demo_sides(decoder, requests)
    request = d.choose_request(sides, requests) if text is None else requests[0]
    print(f"Request: {request.text}")
    d.stream_once(sides, request, lambda name: print(f"\n\n--- {name}\n", flush=True), terminal.show)
    result = d.measure(sides, request)
    verdicts = b.judge([result], loading.score_answers)[0]
    _print_demo(result, verdicts)
    if decoder.threads.count is not None:
        print(f"{'threads':<13} {decoder.threads}")
    if result.difference is not None or not all(verdicts or ()):
        raise typer.Exit(1)


def _print_demo(result: "PromptResult", verdicts: tuple[bool, bool] | None) -> None:
    from .. import evaluation as b

    rates = {
        b.PLAIN: b.spread([r.tps for r in result.plain if r.tps]),
        b.DFLASH: b.spread([r.tps for r in result.dflash if r.tps]),
    }
    tau, ratio = b.acceptance_length(result.dflash), b.spread(result.ratios)
    print("\n\n---")
    for name, rate in rates.items():
        print(f"{name:<13} {rate['median']:7.1f} tokens/s" if rate else f"{name:<13} too short to time")
    if ratio and tau:
        print(f"{'ratio':<13} {ratio['median']:7.2f}   (median of {len(result.ratios)} runs in turns)")
        print(f"{'acceptance':<13} {tau:7.2f}   tokens per block, {len(result.dflash[0].tokens)} tokens")
    difference = result.difference
    print("tokens        " + ("identical" if difference is None else f"DIFFERENT at position {difference.position}"))
    if verdicts is not None:
        print("function      " + ("passes its check" if all(verdicts) else "FAILS its check"))
