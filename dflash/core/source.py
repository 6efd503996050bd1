"""The source of plug-ins, hashed as they register, so that studies see a change."""

import hashlib
import linecache
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

_PASSED = (__name__.partition(".")[0], "contextlib")


def registrant() -> FrameType | None:
    """The frame of the code that registers: the nearest one outside this package; ``None`` for the package's own."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _top(frame.f_globals.get("__name__")) in _PASSED:
        if frame.f_code.co_name == "<module>":
            return None
        frame = frame.f_back
    return frame


def source_hash(file: str, names: Mapping[str, Any]) -> str:
    """A hash of the source ``file``, whose globals are ``names``, and of what it imports from its folder or package.

    Cells of notebooks have a source too. Empty where there is none, as for what is typed into an interpreter.
    """
    sources: dict[str, str] = {}
    waiting = [(file, names)]
    while waiting:
        file, names = waiting.pop()
        if file in sources:
            continue
        linecache.checkcache(file)
        sources[file] = "".join(linecache.getlines(file))
        for module in filter(None, map(_module_of, list(names.values()))):
            other = getattr(module, "__file__", None)
            inside = _top(module.__name__) == _top(names.get("__package__")) != ""
            if other and (inside or Path(other).parent == Path(file).parent):
                waiting.append((other, vars(module)))
    if not any(sources.values()):
        return ""
    texts = sorted((Path(file).name, text) for file, text in sources.items())
    return hashlib.sha256(repr(texts).encode()).hexdigest()[:16]


def _module_of(value: Any) -> ModuleType | None:
    name = getattr(value, "__module__", None)
    return value if isinstance(value, ModuleType) else sys.modules.get(name) if isinstance(name, str) else None


def _top(name: Any) -> str:
    return str(name or "").partition(".")[0]
