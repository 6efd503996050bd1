"""Prompts unlike the toy tasks: the first lines of functions of Python's standard library.

python notebooks/stdlib_prompts.py 50 > outside.jsonl
dflash bench --raw --prompts outside.jsonl
"""

import importlib
import inspect
import json
import sys
from collections.abc import Iterator

MODULES = (
    "bisect calendar colorsys difflib fnmatch fractions functools heapq inspect ipaddress keyword locale "
    "operator posixpath pprint random shlex shutil statistics string textwrap tokenize traceback types "
    "urllib.parse uuid warnings"
).split()
LINES = 4  # of each function: its signature and the beginning of its docstring or body


def beginnings() -> Iterator[str]:
    """The first lines of each public Python function of some modules, in a fixed order."""
    for name in MODULES:
        module = importlib.import_module(name)
        for _, function in sorted(inspect.getmembers(module, inspect.isfunction)):
            own = getattr(inspect.unwrap(function), "__code__", None)  # a wrapped function may be built in
            if own is not None and own.co_filename == module.__file__ and not function.__name__.startswith("_"):
                lines = inspect.getsource(function).splitlines(keepends=True)
                if len(lines) > 2 * LINES:
                    yield "".join(lines[:LINES])


if __name__ == "__main__":
    texts = list(beginnings())
    count = min(int(sys.argv[1]), len(texts))
    for i in range(count):  # evenly spread over the functions
        print(json.dumps({"prompt": texts[i * len(texts) // count]}))
