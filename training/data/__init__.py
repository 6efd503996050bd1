"""Stage 1: conversations become token shards.

In order: ``self_prompts`` (requests that the target makes up), ``chat`` (a conversation as tokens), ``plan`` (which
ones are used), ``responses`` (what the target writes), ``prepare`` (the stage), ``dataset`` (the files it leaves),
``split`` (which of them are held out), ``sequences`` (their rows in memory). ``text`` reads a dataset as people do;
``mask_token`` finds a token that none of it uses.
"""
