"""Stage 1: conversations become token shards.

In order: ``chat`` (a conversation as tokens), ``responses`` (what the target answers), ``prepare`` (the stage),
``dataset`` (the files it leaves), ``sequences`` (their rows in memory).
"""
