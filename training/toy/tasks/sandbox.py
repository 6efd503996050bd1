"""Run untrusted functions where they can neither hang nor hurt.

Two walls: the syntax list refuses imports, underscored names and unknown methods before anything runs;
the child has few builtins, little memory, no files to open and a limit on processor time.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

SECONDS = 1  # of the processor, per function; an honest one needs milliseconds

_NODES = (
    ast.Module, ast.arguments, ast.arg, ast.Return, ast.Assign, ast.AugAssign, ast.AnnAssign,
    ast.For, ast.While, ast.If, ast.Expr, ast.Pass, ast.Break, ast.Continue, ast.BoolOp, ast.BinOp,
    ast.UnaryOp, ast.Lambda, ast.IfExp, ast.Dict, ast.Set, ast.ListComp, ast.SetComp, ast.DictComp,
    ast.GeneratorExp, ast.comprehension, ast.Compare, ast.Call, ast.keyword, ast.Constant,
    ast.Subscript, ast.Starred, ast.List, ast.Tuple, ast.Slice, ast.JoinedStr, ast.FormattedValue,
    ast.expr_context, ast.boolop, ast.operator, ast.unaryop, ast.cmpop,
)  # fmt: skip
_METHODS = frozenset((
    "append", "extend", "insert", "pop", "remove", "sort", "reverse", "count", "index", "copy", "items",
    "keys", "values", "get", "update", "setdefault", "add", "join", "split", "strip", "lstrip", "rstrip",
    "upper", "lower", "capitalize", "title", "swapcase", "startswith", "endswith", "isalpha", "isdigit",
    "isupper", "islower", "isspace", "isalnum", "replace", "find", "fromkeys",
))  # fmt: skip
_BUILTINS = (
    "abs", "all", "any", "bool", "dict", "enumerate", "filter", "float", "int", "iter", "len", "list", "map",
    "max", "min", "next", "pow", "range", "reversed", "round", "set", "sorted", "str", "sum", "tuple", "zip",
)  # fmt: skip

_WORKER = r"""
import json, os, resource, sys
job = json.load(sys.stdin)
source = __builtins__
allowed = {name: getattr(source, name) for name in job["builtins"]}

def plain(value, depth=0):
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)) and depth < 5:
        return [plain(item, depth + 1) for item in value]
    if isinstance(value, dict) and depth < 5:
        return {"dict": [[plain(k, depth + 1), plain(v, depth + 1)] for k, v in value.items()]}
    return {"type": type(value).__name__}

def answer(program):
    scope, outputs = {"__builtins__": dict(allowed)}, []
    try:
        exec(compile(program["code"], "answer", "exec"), scope)
        for arguments in program["inputs"]:
            outputs.append(plain(scope[program["name"]](*arguments)))
        line = json.dumps(outputs)
        return line if len(line) <= 1000000 else "null"
    except BaseException:
        return "null"

for program in job["programs"]:
    child = os.fork()
    if not child:  # it has the limits, and ends with its program
        resource.setrlimit(resource.RLIMIT_AS, (1 << 29, 1 << 29))
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (job["seconds"], job["seconds"]))
        print(answer(program), flush=True)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        print("null", flush=True)
"""


def may_run(code: str) -> bool:
    """Whether this code only defines functions, with no syntax, method or name beyond those allowed."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return len(tree.body) == len(functions) > 0 and all(map(_is_allowed, ast.walk(tree)))


def _is_allowed(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr in _METHODS
    if isinstance(node, ast.Name):
        return not node.id.startswith("_") or node.id == "_"
    if isinstance(node, ast.FunctionDef):
        return not node.name.startswith("_") and not node.decorator_list
    return isinstance(node, _NODES)


def first_function(code: str) -> str:
    """The name of the first function in code that `may_run` accepts."""
    return next(node.name for node in ast.parse(code).body if isinstance(node, ast.FunctionDef))


def run_programs(programs: Sequence[tuple[str, list[list[Any]]]]) -> list[list[Any] | None]:
    """What each program returns for its inputs, or ``None`` if it fails; `may_run` must accept its code.

    A child process forks itself for each, so a bad program costs only itself.
    """
    named = [{"code": code, "name": first_function(code), "inputs": inputs} for code, inputs in programs]
    job = json.dumps({"seconds": SECONDS, "builtins": _BUILTINS, "programs": named})
    command = [sys.executable, "-I", "-S", "-c", _WORKER]
    child = subprocess.run(command, input=job, stdout=subprocess.PIPE, text=True, env={}, check=True)
    return [json.loads(line) for line in child.stdout.splitlines()]
