"""Make a drafter's folder in the package ready to ship, and enter it in the index by which its target finds it.

python .ci/publish.py dflash/real/NAME --target runs/NAME/target --name org/NAME --bits 8
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dflash import bundled, load_drafter, load_target, save_drafter
from dflash.core.errors import DFlashError, IncompatibleModelsError
from dflash.core.files import read_json, write_json
from dflash.target.identity import norm_fingerprint, target_fingerprint


def publish(folder: Path, target: Path, name: str, bits: int | None = None) -> None:
    """Enter the drafter in ``folder`` in the index as that of ``target``; messages call the target ``name``.

    The drafter is rewritten in bfloat16 or ``bits`` bits, without ``target_fingerprint``: one drafter serves every
    quantisation of its target. An older entry for the folder is replaced.

    Raises ``IncompatibleModelsError`` if the drafter was trained for another target or the target has no norm weights.
    """
    loaded, model = load_target(target), load_drafter(folder, bits)
    if model.config.target_fingerprint not in (None, target_fingerprint(loaded)):
        raise IncompatibleModelsError(f"The drafter in {folder} was trained for another target than {target}.")
    model.bind(loaded)
    fingerprint = norm_fingerprint(loaded)
    if fingerprint is None:
        raise IncompatibleModelsError(f"{target} has no norm weights, which identify a target.")
    model.config = replace(model.config, target_fingerprint=None)
    save_drafter(model, folder)
    place = Path(os.path.relpath(folder, bundled.INDEX.parent)).as_posix()
    known = read_json(bundled.INDEX) if bundled.INDEX.exists() else {}
    others = {key: entry for key, entry in known.items() if entry["folder"] != place}
    write_json(bundled.INDEX, others | {fingerprint: {"folder": place, "name": name}})


def main(arguments: Sequence[str] | None = None) -> None:
    """Publish the drafter that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="the drafter's folder in the package, as dflash export wrote it")
    parser.add_argument("--target", type=Path, required=True, help="the target's folder")
    parser.add_argument("--name", required=True, help="what the target is called")
    parser.add_argument("--bits", type=int, help="quantise the drafter to this many bits; default: bfloat16")
    given = parser.parse_args(arguments)
    try:
        publish(given.folder, given.target, given.name, given.bits)
    except (DFlashError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
