"""An OpenAI-compatible server: mlx-lm's own, with our loading, decoding and prompt caches.

``server`` starts it, ``http`` answers clients, ``body`` checks what they send, ``generator`` is the thread that
decodes, ``models`` loads what it decodes with, ``engine`` decodes one request or several at once, ``caches`` keeps what
it read, ``counts`` is what is told of it, ``record`` what is kept of it for training.
"""
