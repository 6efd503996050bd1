"""The method: draft a block, verify it in one target pass, commit, rewind.

Start with ``loop``, then ``block`` (one block's records and steps), ``verify`` (the rules) and ``stream`` (responses).
"""
