"""What the package offers is found from ``import dflash`` alone: by attribute, by ``dir`` and by ``help``."""

import subprocess
import sys

import pytest

import dflash
import dflash.training

FROM_A_BARE_IMPORT = """
import sys, dflash
assert "mlx.core" not in sys.modules
for names in ("adapters.register_adapter", "bench.compare", "study.ablate", "training.register_objective"):
    subpackage, name = names.split(".")
    assert subpackage in dir(dflash)
    assert callable(getattr(getattr(dflash, subpackage), name))
assert callable(dflash.training.run_recipe)
"""


@pytest.mark.parametrize("package", [dflash, dflash.training], ids=lambda package: package.__name__)
def test_every_public_name_loads_and_is_listed(package):
    for name in package.__all__:
        assert getattr(package, name).__name__ == {"run_recipe": "train"}.get(name, name)
        assert name in dir(package)
        assert f" {name}" in package.__doc__
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        package.no_such_name  # noqa: B018


def test_subpackages_load_on_first_use_and_mlx_after_the_backend():
    run = subprocess.run([sys.executable, "-c", FROM_A_BARE_IMPORT], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")


def test_what_stands_elsewhere_is_imported_by_its_public_name():
    from dflash.bench import HELDOUT, register_check
    from dflash.errors import DataError, DFlashError
    from dflash.prompts import Conversation, read_conversations

    assert HELDOUT.is_file()
    assert callable(register_check)
    assert issubclass(DataError, dflash.DFlashError)
    assert (DFlashError, read_conversations) == (dflash.DFlashError, dflash.read_conversations)
    assert type(read_conversations(HELDOUT, limit=1)[0]) is Conversation
    assert (dflash.errors, dflash.bench) == (sys.modules["dflash.errors"], sys.modules["dflash.bench"])
