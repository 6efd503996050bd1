"""Run untrusted functions where they can neither hang nor hurt.

Two walls: the syntax list refuses imports, underscored names and unknown methods before anything runs;
the child has few builtins, little memory, no open files and a limit on time.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

SECONDS = 1.0  # per function; an honest one needs milliseconds
BATCH = 400

_NODES = (
    ast.Module, ast.FunctionDef, ast.arguments, ast.arg, ast.Return, ast.Assign, ast.AugAssign, ast.AnnAssign,
    ast.For, ast.While, ast.If, ast.Expr, ast.Pass, ast.Break, ast.Continue, ast.BoolOp, ast.BinOp,
    ast.UnaryOp, ast.Lambda, ast.IfExp, ast.Dict, ast.Set, ast.ListComp, ast.SetComp, ast.DictComp,
    ast.GeneratorExp, ast.comprehension, ast.Compare, ast.Call, ast.keyword, ast.Constant, ast.Attribute,
    ast.Subscript, ast.Starred, ast.Name, ast.List, ast.Tuple, ast.Slice, ast.JoinedStr, ast.FormattedValue,
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
import json, resource, signal, sys, time
job = json.load(sys.stdin)
resource.setrlimit(resource.RLIMIT_AS, (1 << 29, 1 << 29))
resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
seconds = job["seconds"]
source = __builtins__
allowed = {name: getattr(source, name) for name in job["builtins"]}

class Late(BaseException):
    pass

def late(signum, frame):
    raise Late

def plain(value, depth=0):
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return {"float": repr(value)}
    if isinstance(value, (list, tuple)) and depth < 5:
        return [plain(item, depth + 1) for item in value]
    if isinstance(value, dict) and depth < 5:
        return {"dict": [[plain(k, depth + 1), plain(v, depth + 1)] for k, v in value.items()]}
    return {"type": type(value).__name__}

signal.signal(signal.SIGALRM, late)
for program in job["programs"]:
    outputs, problem, line = [], "", ""
    # One long operation in C ignores the alarm; the limit on processor time does not.
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time() + seconds) + 2, resource.RLIM_INFINITY))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        scope = {"__builtins__": dict(allowed)}
        exec(compile(program["code"], "answer", "exec"), scope)
        function = scope[program["name"]]
        for arguments in program["inputs"]:
            outputs.append(plain(function(*json.loads(json.dumps(arguments)))))
        line = json.dumps({"outputs": outputs, "problem": ""})
        if len(line) > 1000000:
            problem = "it returns too much"
    except Late:
        problem = "it takes too long"
    except BaseException as error:
        problem = type(error).__name__ + ": " + str(error)[:120].replace("\n", " ")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    print(json.dumps({"outputs": [], "problem": problem}) if problem else line, flush=True)
"""


def refuse(code: str) -> str:
    """Why this code must not run, or "" when it may."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"it is not valid Python: {getattr(error, 'msg', type(error).__name__)}"
    if not tree.body or not all(isinstance(node, ast.FunctionDef) for node in tree.body):
        return "it must hold function definitions only"
    for node in ast.walk(tree):
        if not isinstance(node, _NODES):
            return f"{type(node).__name__} is not allowed"
        if isinstance(node, ast.Attribute) and node.attr not in _METHODS:
            return f"the attribute {node.attr} is not allowed"
        names: tuple[str, ...] = (
            (node.id,) if isinstance(node, ast.Name) else (node.name,) if isinstance(node, ast.FunctionDef) else ()
        )
        if any(name.startswith("_") and name != "_" for name in names):
            return f"the name {names[0]} is not allowed"
        if isinstance(node, ast.FunctionDef) and node.decorator_list:
            return "decorators are not allowed"
    return ""


def first_function(code: str) -> str:
    """The name of the first function in code that `refuse` accepts."""
    return next(node.name for node in ast.parse(code).body if isinstance(node, ast.FunctionDef))


def run_programs(
    programs: Sequence[tuple[str, list[list[Any]]]], seconds: float = SECONDS
) -> list[tuple[list[Any], str]]:
    """Outputs on every input, and a problem or "", for (code, inputs) pairs that `refuse` accepts.

    One child runs them all. When it dies, the programs it did not reach are run again, the first of
    them alone, so one bad program costs only itself.
    """
    done: list[tuple[list[Any], str]] = []
    size = BATCH
    while len(done) < len(programs):
        batch = programs[len(done) : len(done) + size]
        lines, complete = _run_child(batch, seconds)
        done += lines
        if not lines and len(batch) == 1:
            done.append(([], "it takes too long or too much memory"))
            size = BATCH
        else:
            size = BATCH if complete else 1
    return done


def _run_child(
    programs: Sequence[tuple[str, list[list[Any]]]], seconds: float
) -> tuple[list[tuple[list[Any], str]], bool]:
    """One child process; the answers it got to, and whether it reached the end."""
    job = {
        "seconds": seconds,
        "builtins": _BUILTINS,
        "programs": [{"code": code, "name": first_function(code), "inputs": inputs} for code, inputs in programs],
    }
    try:
        child = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _WORKER], input=json.dumps(job), capture_output=True, text=True, env={},
            timeout=seconds * (len(programs) if len(programs) < 3 else 3 + len(programs) / 10) + 3,
        )  # fmt: skip
        text = child.stdout
    except subprocess.TimeoutExpired as error:
        text = (error.stdout or b"").decode() if isinstance(error.stdout, bytes) else error.stdout or ""
    whole = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
    answers = [json.loads(line) for line in whole]
    return [(answer["outputs"], answer["problem"]) for answer in answers], len(answers) == len(programs)
