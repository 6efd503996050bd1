"""The ``dflash`` command, also as ``python -m dflash``."""

import sys


def main() -> None:
    """Entry point of the console script: Ctrl-C is quiet while modules are imported, too."""
    try:
        from .cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
