"""Many prompts at once: their options are checked before the first token, then one running batch answers them."""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlx_lm.generate import StopSequences

from .core.errors import GenerationError
from .core.option import named
from .core.values import require_count, short
from .decoding.admission import SpeculativeGenerator
from .decoding.batch import Tapped
from .decoding.sampling import LogitsProcessor, Sampler
from .decoding.stream import Answer, DFlashResponse, Step
from .decoding.text import TextStream
from .decoding.verify import first_mismatch
from .options import DecodeOptions
from .prompts.tokens import Prompt, prompt_tokens

if TYPE_CHECKING:
    from .generate import DFlashSpeculativeDecoder

BATCH_SIZE = 32  # mlx-lm's own
OF_PROMPTS = ("chat", "system", "chat_template_config", "prefill_response")
OF_ALL = ("policy", "prefill_step_size")
"""Options that hold for a whole batch."""
ALONE = ("tree", "max_kv_size", "kv_bits", "prompt_cache", "trace", "profile")
"""Options of requests that are decoded alone."""


@dataclass(frozen=True)
class Request:
    """One row: its prompt, and how it is sampled and ends."""

    prompt: list[int]
    max_tokens: int
    sampler: Sampler
    processors: Sequence[LogitsProcessor]
    stops: frozenset[int]
    text: TextStream


def stream_batch(
    decoder: "DFlashSpeculativeDecoder",
    prompts: Sequence[Prompt],
    batch_size: int,
    each: Sequence[Mapping[str, Any]] | None,
    options: Mapping[str, Any],
) -> Generator[tuple[int, DFlashResponse], None, None]:
    """See :meth:`DFlashSpeculativeDecoder.stream_batch`."""
    require_count("batch_size", batch_size, 1)
    if decoder.tokenizer is None:
        raise GenerationError("This decoder has no tokenizer; pass one, or token ids to spec_generate, one by one.")
    if isinstance(prompts, str) or not hasattr(prompts, "__len__"):
        raise GenerationError(f"A batch is a list of prompts, got {type(prompts).__name__}; give a list.")
    if not (isinstance(each, list | tuple | None) and all(isinstance(own, Mapping | None) for own in each or ())):
        raise GenerationError(f"each is a list of dicts of options, one a prompt, got {short(each)}.")
    if each is not None and len(each) != len(prompts):
        raise GenerationError(f"each is a list of as many options as prompts, got {len(prompts)} and {len(each)}.")
    of_prompts = {name: value for name, value in options.items() if name in OF_PROMPTS}
    common = {name: value for name, value in options.items() if name not in OF_PROMPTS}
    wanted = decoder._request_options(common)
    requests = [
        _request(decoder, prompt, wanted, common, own, of_prompts)
        for prompt, own in zip(prompts, each or [{}] * len(prompts), strict=True)
    ]
    return _answered(tapped(decoder, wanted), requests, batch_size, wanted.prefill_step_size)


def _answered(
    model: Tapped, requests: Sequence[Request], batch_size: int, step_size: int
) -> Generator[tuple[int, DFlashResponse], None, None]:
    """The responses of all requests, each with its request's number. Closing this, or any error, ends all of them."""
    generator = SpeculativeGenerator(model, batch_size, step_size)
    try:
        asked = [(number, request) for number, request in enumerate(requests) if request.max_tokens]
        uids = generator.insert(
            [request.prompt for _, request in asked],
            [request.max_tokens for _, request in asked],
            samplers=[request.sampler for _, request in asked],
            logits_processors=[list(request.processors) for _, request in asked],
            stop_sequences=[StopSequences([[token] for token in request.stops]) for _, request in asked],
        )
        answers = {
            uid: (number, Answer(len(request.prompt), request.text))
            for uid, (number, request) in zip(uids, asked, strict=True)
        }
        while blocks := generator.next_generated():
            for block in blocks:
                number, answer = answers[block.uid]
                response = answer.add(Step(block.block.tokens, block.block, block.finish_reason, error=block.error))
                if response.finish_reason is not None and block.finish_reason is None:
                    generator.remove([block.uid])  # a stop string
                yield number, response
    finally:
        generator.close()


def tapped(decoder: "DFlashSpeculativeDecoder", options: DecodeOptions) -> Tapped:
    """What batches decode with, by the policy of ``options``.

    Raises ``IncompatibleModelsError``, naming a layer, for a target of which several texts cannot be decoded at once.
    """
    with decoder.loaded_target.alone():
        decoder.loaded_target.check_batchable()

    policy = decoder._policy(options, batched=True)
    policy.begin()
    return Tapped(
        decoder.loaded_target,
        decoder.draft_model,
        policy,
        decoder.block_size,
        decoder.max_seq_length,
        decoder.clock,
        decoder.threads.in_use,
    )


def check_together(options: DecodeOptions) -> None:
    """Raise ``GenerationError`` for an option that works with one text only."""
    alone = [name for name in ALONE if name in options.asked()]
    alone += ["seed"] * (options.seed is not None and not options.greedy)  # the rows share MLX's random numbers
    alone += ["verify"] * (options.verify_rule() is not first_mismatch)
    if alone:
        raise GenerationError(f"{alone[0]} is for one prompt at a time: leave it out, or use stream_generate.")


def _request(
    decoder: "DFlashSpeculativeDecoder",
    prompt: Prompt,
    common: DecodeOptions,
    given: Mapping[str, Any],
    own: Mapping[str, Any],
    of_prompts: Mapping[str, Any],
) -> Request:
    """The row of one prompt, with its ``own`` options in the place of those ``given`` for all."""
    options = decoder._request_options(named(DecodeOptions, given) | named(DecodeOptions, own)) if own else common
    check_together(options)
    if shared := next((name for name in OF_ALL if getattr(options, name) != getattr(common, name)), None):
        raise GenerationError(f"{shared} holds for the whole batch; give it once, not for each prompt.")
    tokens = prompt_tokens(decoder.loaded_target, prompt, **of_prompts)
    max_tokens = decoder._check_request(tokens, options)
    stops = decoder.loaded_target.stop_token_ids() if options.stop_token_ids is None else options.stop_token_ids
    text = TextStream(decoder.tokenizer.detokenizer, options.stop_strings or ())
    sampler, processors = options.build_sampler(decoder.tokenizer), options.build_processors()
    return Request(tokens, max_tokens, sampler, processors, frozenset(stops), text)
