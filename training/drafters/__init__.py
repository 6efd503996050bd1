"""Stage 4: from a drafter to its loss.

In order: ``init`` (new weights), ``forward`` (all blocks of a batch), ``attention`` (what a block sees),
``targets`` (what it should predict), ``objectives`` (how a prediction is scored), ``loss`` (of a batch).
"""
