"""A plug-in with a part of each kind that decoding names, as a user would write it."""

import mlx.core as mx

from dflash import (
    Policy,
    Proposal,
    Verified,
    register_drafter,
    register_logits_processor,
    register_policy,
    register_sampler,
    register_verify,
)


class Follows:
    """What followed each token last, the newest token, and how many there are."""

    def __init__(self):
        self.after, self.last, self.offset = {}, None, 0


@register_drafter("bigram")
class Bigram:
    """Drafts what followed each token last."""

    target_layer_ids = ()

    def __init__(self, block_size=8):
        self.block_size = block_size

    def bind(self, target):
        pass

    def make_cache(self):
        return Follows()

    def extend_context(self, features, cache, tokens):
        new = tokens.tolist()[0]
        cache.after.update(zip([cache.last, *new], new, strict=False))
        cache.last, cache.offset = new[-1], cache.offset + len(new)

    def propose(self, anchor, length, cache):
        found, after = [anchor.item()], cache.after | {cache.last: anchor.item()}
        while len(found) <= length and found[-1] in after:
            found.append(after[found[-1]])
        return Proposal(mx.array(found[1:], mx.int32)[None])


@register_drafter("half")
class Half:
    """Lacks what a drafter needs."""

    block_size, target_layer_ids = 4, ()


@register_drafter("fails")
class Fails(Bigram):
    """Makes a mistake when it is asked."""

    def propose(self, anchor, length, cache):
        return 1 // 0


@register_verify("typical")
def typical(proposal, logits_LV, sampler, epsilon=0.09):
    probs_LV = mx.softmax(logits_LV, axis=-1)
    drafts, accepted = proposal.tokens[0].tolist(), 0
    while accepted < len(drafts) and probs_LV[accepted, drafts[accepted]].item() > epsilon:
        accepted += 1
    return Verified([*drafts[:accepted], mx.argmax(logits_LV[accepted]).item()], accepted)


@register_policy("up_to")
class UpTo(Policy):
    def __init__(self, drafts):
        self.drafts = drafts + 0

    def verify_length(self, drafts):
        return min(self.drafts, drafts.count)


@register_sampler("nth")
def nth(logprobs, place=0):
    return mx.argsort(-logprobs, axis=-1)[:, place]


@register_logits_processor("only")
def only(tokens, logits, token=65):
    return mx.where(mx.arange(logits.shape[-1]) == token, logits, -mx.inf)
