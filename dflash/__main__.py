"""``python -m dflash``: the ``dflash`` command."""

from .cli import main

main()
