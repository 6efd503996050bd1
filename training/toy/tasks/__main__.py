"""Requests of the toy tasks as JSON lines.

    python -m dflash.training.toy.tasks train 7000 --seed 2 > requests.jsonl
    python -m dflash.training.toy.tasks heldout 100 > heldout.jsonl

Training requests come with the right response, held-out ones with what their answer is checked against.
"""

import argparse
import json
from typing import get_args

from . import samples
from .split import Split


def main() -> None:
    """Print as many different requests as asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("split", choices=get_args(Split))
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for one in samples(options.seed, options.count, options.split):
        more = {"response": one.answer} if options.split == "train" else {"check": one.check}
        print(json.dumps({"prompt": one.prompt} | more))


if __name__ == "__main__":
    main()
