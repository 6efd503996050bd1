"""Stage 4: from a drafter to its loss.

In order: ``vocabulary`` (the tokens that it knows), ``init`` (new weights), ``targets`` (of each position),
``objectives`` (losses of predictions), ``loss`` (of a batch).
"""
