"""An OpenAI-compatible server: mlx-lm's own, with our loading, decoding and prompt caches, one request at a time.

``server`` starts it, ``http`` answers clients, ``body`` checks what they send, ``generator`` is the thread that
decodes, ``engine`` the function that it decodes with, ``counts`` what is told of it.
"""
