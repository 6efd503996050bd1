"""The method: draft a block, verify it in one target pass, commit, rewind.

Start with ``loop``; ``block`` has its data, ``verify`` the rules, ``stream`` what a caller sees.
"""
