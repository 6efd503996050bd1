"""Stage 1: conversations become token shards.

In order: ``self_prompts`` (requests that the target writes), ``chat`` (conversations as tokens), ``plan`` (the choice
of conversations), ``responses`` (the target's), ``prepare`` (the stage itself), ``dataset`` (its files), ``split``
(held-out conversations), ``sequences`` (rows in memory). ``text`` reads a dataset as text; ``mask_token`` finds an
unused token.
"""
