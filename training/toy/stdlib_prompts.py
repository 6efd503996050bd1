"""Prompts unlike the toy tasks: the first lines of functions of Python's standard library.

    python -m dflash.training.toy.stdlib_prompts 50 > outside.jsonl
    dflash bench --raw --prompts outside.jsonl

Knows where Python keeps its sources. Must not know the toy tasks or any model.
"""

import argparse
import importlib
import inspect
import json
from collections.abc import Iterator

_MODULES = (
    "bisect calendar colorsys difflib fnmatch fractions functools heapq inspect ipaddress keyword locale "
    "operator posixpath pprint random shlex shutil statistics string textwrap tokenize traceback types "
    "urllib.parse uuid warnings"
).split()
_LINES = 4  # of each function: its signature and the beginning of its docstring or body


def beginnings() -> Iterator[str]:
    """The first lines of each public Python function of some modules, in a fixed order."""
    for name in _MODULES:
        module = importlib.import_module(name)
        for _, function in sorted(inspect.getmembers(module, inspect.isfunction)):
            own = getattr(inspect.unwrap(function), "__code__", None)  # a wrapped function may be built in
            if own is not None and own.co_filename == module.__file__ and not function.__name__.startswith("_"):
                lines = inspect.getsource(function).splitlines(keepends=True)
                if len(lines) > 2 * _LINES:
                    yield "".join(lines[:_LINES])


def main() -> None:
    """Print prompts evenly spread over the functions found, as JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("count", type=int, help="how many prompts")
    texts = list(beginnings())
    count = min(parser.parse_args().count, len(texts))
    for i in range(count):
        print(json.dumps({"prompt": texts[i * len(texts) // count]}))


if __name__ == "__main__":
    main()
