"""The source of plug-ins, hashed as they register, so that studies see a change."""

import ast
import hashlib
import linecache
import sys
from collections.abc import Iterator
from importlib.util import resolve_name
from pathlib import Path
from types import FrameType, ModuleType

_PASSED = (__name__.partition(".")[0], "contextlib")


def registrant() -> FrameType | None:
    """The frame of the code that registers: the nearest one outside this package; ``None`` for the package's own."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _PASSED:
        if frame.f_code.co_name == "<module>":
            return None
        frame = frame.f_back
    return frame


def source_hash(file: str, package: str) -> str:
    """A hash of the source ``file`` of a module in ``package``, and of what it imports from its folder or package.

    Cells of notebooks have a source too. Empty where there is none, as for what is typed into an interpreter.
    """
    sources: dict[str, str] = {}
    waiting = [(file, package)]
    while waiting:
        file, package = waiting.pop()
        if file in sources:
            continue
        linecache.checkcache(file)
        sources[file] = "".join(linecache.getlines(file))
        for module in _imported(sources[file], package):
            other, theirs = getattr(module, "__file__", None), module.__package__ or ""
            inside = theirs.partition(".")[0] == package.partition(".")[0] != ""
            if other and (inside or Path(other).parent == Path(file).parent):
                waiting.append((other, theirs))
    texts = sorted((Path(file).name, text) for file, text in sources.items() if text)
    return hashlib.sha256(repr(texts).encode()).hexdigest()[:16] if texts else ""


def _imported(text: str, package: str) -> Iterator[ModuleType]:
    """The modules that a source imports, as far as they are loaded."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except SyntaxError:  # a cell with a line that is no Python
        return
    for node in nodes:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and (node.level == 0 or package):
            base = resolve_name("." * node.level + (node.module or ""), package)
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        yield from (sys.modules[name] for name in names if name in sys.modules)
