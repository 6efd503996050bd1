"""The page of the command line is what the commands say of themselves."""

from pathlib import Path

import dflash
from dflash.cli.docs import page


def test_the_page_of_the_command_line_is_up_to_date():
    written = Path(dflash.__file__).parent / "docs" / "cli.md"
    assert written.read_text() == page(), "run: python -m dflash.cli.docs > dflash/docs/cli.md"
