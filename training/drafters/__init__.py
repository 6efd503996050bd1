"""Stage 4: from a drafter to its loss.

In order: ``init`` (new weights), ``forward`` (all blocks of a batch), ``attention`` (of blocks to their context),
``targets`` (of each position), ``objectives`` (losses of predictions), ``loss`` (of a batch).
"""
