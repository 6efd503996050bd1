"""``python -m dflash``: the ``dflash`` command.

Knows where the command begins (``cli``). Must not know anything else.
"""

from .cli import main

main()
