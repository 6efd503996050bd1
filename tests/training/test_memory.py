"""The memory of training, by arithmetic: what each part of it follows from."""

from dataclasses import replace

from support.models import random_drafter

from dflash.training.memory import training_memory


def of(config, **changed):
    sizes = {"target_bytes": 0, "value_bytes": 4, "parameters": 0, "blocks": 8, "batch_tokens": 64, "chunk": 16}
    return training_memory(config, **sizes | {"several_batches": False, "grad_checkpoint": False} | changed)


def test_logits_are_those_of_the_tokens_that_the_drafter_knows():
    whole = random_drafter(3, 200).config
    part = replace(whole, draft_vocab_size=50)
    assert of(whole).batch - of(part).batch == 3 * 16 * (200 - 50) * 4
    assert of(part, chunk=32).batch - of(part).batch == 3 * 16 * 50 * 4
