"""What other packages add by name: adapters, drafters, objectives, rules, samplers, callbacks."""

import importlib
import importlib.util
import logging
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Generic, TypeVar

from .errors import DFlashError, did_you_mean, one_line
from .source import registrant, source_hash

T = TypeVar("T")

logger = logging.getLogger(__name__)

PLUGINS: list[str] = []
"""What :func:`load_plugin` loaded, as it was named, in order."""

_FILES: set[str] = set()  # of other packages and plug-ins: what registered something, or was loaded


class Registry(Generic[T]):
    """Named things of one kind, ours and those of other packages.

    Args:
        what: The kind, as messages call it: ``"adapter"``.
        group: The entry-point group of other packages: a module that registers when imported, or the thing itself
            under the name of the entry point.
        also: What may be given instead of a name, as a sentence.
        ours: Modules of this package that register when imported, as they are before the first thing is looked up.
    """

    def __init__(self, what: str, group: str, also: str = "", ours: Sequence[str] = ()):
        self.what, self.group, self.also, self.ours = what, group, also, ours
        self._known: dict[str, T] = {}
        self._sources: dict[str, str | None] = {}
        self._broken: dict[str, str] = {}
        self._loaded = False

    def register(self, *names: str) -> Callable[[T], T]:
        """Decorator: make a thing known under each of ``names``. Raises ``TypeError`` without names."""
        if not names or not all(isinstance(name, str) and name for name in names):
            raise TypeError(f'Registering takes the name of the {self.what}: @register_...("name"), with brackets.')

        def register(thing: T) -> T:
            frame, source = registrant(), None
            if frame is not None:
                _FILES.add(frame.f_code.co_filename)
                source = source_hash(frame.f_code.co_filename, frame.f_globals.get("__package__") or "")
            self._known.update(dict.fromkeys(names, thing))
            self._sources.update(dict.fromkeys(names, source))
            return thing

        return register

    @contextmanager
    def temporary(self, name: str, thing: T) -> Iterator[T]:
        """Let ``thing`` be known as ``name`` inside the ``with`` block only."""
        before = {name: self._known[name]} if name in self._known else {}
        source = self._sources.get(name)
        self.register(name)(thing)
        try:
            yield thing
        finally:
            del self._known[name]
            self._known |= before  # and what entry points registered meanwhile
            self._sources[name] = source

    def load_entry_points(self) -> None:
        """Import ours and other packages' entry points, once. A broken one is a warning here, an error where needed."""
        if self._loaded:
            return
        self._loaded = True
        for own in self.ours:
            importlib.import_module(own)
        for entry in entry_points(group=self.group):
            try:
                loaded = entry.load()
            except Exception as error:  # another package's code: anything can happen
                reason = f"{type(error).__name__}: {one_line(error)}"
                self._broken[entry.name] = (
                    f"The {self.what} {entry.name!r} ({entry.value}) of another package cannot be loaded: {reason}. "
                    "Repair or uninstall that package."
                )
                logger.warning("%s", self._broken[entry.name])
                continue
            if not isinstance(loaded, type(importlib)) and entry.name not in self._known:
                module = sys.modules[entry.module]
                file = getattr(module, "__file__", None) or ""
                self._known[entry.name], self._sources[entry.name] = loaded, source_hash(file, module.__package__ or "")
                _FILES.add(file)

    @property
    def broken(self) -> list[str]:
        """One message for each package that could not be loaded."""
        return list(self._broken.values())

    def all(self) -> dict[str, T]:
        """Everything known, sorted by name."""
        self.load_entry_points()
        return dict(sorted(self._known.items()))

    def find(self, name: str) -> T | None:
        """What is registered as ``name``, or ``None``. Raises :class:`DFlashError` for a broken package's."""
        self.load_entry_points()
        if name in self._known:
            return self._known[name]
        if name in self._broken:
            raise DFlashError(self._broken[name])
        return None

    def get(self, name: str) -> T:
        """What is registered as ``name``. Raises :class:`DFlashError` with :meth:`advice` if nothing is."""
        found = self.find(name)
        if found is None:
            raise DFlashError(f"Unknown {self.what} {name!r}; {self.advice(name)}")
        return found

    def source(self, name: str) -> str | None:
        """A hash of the source that registered ``name``; ``None`` for ours, empty where there is no source."""
        self.load_entry_points()
        return self._sources.get(name)

    def advice(self, name: str) -> str:
        """What to do about the unknown ``name``: the nearest one, or how to register one's own."""
        own = "Import the module that registers yours, or name it with --plugin FILE."
        return " ".join(part for part in (did_you_mean(name, self.all()), self.also, own) if part)


def load_plugin(plugin: str | Path) -> Any:
    """Import a plug-in, which registers what it adds: a ``.py`` file, or a module's dotted name.

    A file may import its neighbours: its folder is put on ``sys.path``. Raises :class:`DFlashError` if it is missing or
    fails.
    """
    module = _imported(plugin)
    if str(plugin) not in PLUGINS:
        PLUGINS.append(str(plugin))
    _FILES.add(getattr(module, "__file__", None) or "")
    return module


def _imported(plugin: str | Path) -> Any:
    path = Path(plugin)
    is_file = path.suffix == ".py"
    if is_file and not path.is_file():
        raise DFlashError(f"There is no plug-in file {plugin}.")
    if not is_file and (path.exists() or not all(part.isidentifier() for part in str(plugin).split("."))):
        raise DFlashError(f"The plug-in {plugin} is no Python; expected a .py file or a module's dotted name.")
    try:
        if not is_file:
            return importlib.import_module(str(plugin))
        folder = str(path.resolve().parent)
        if folder not in sys.path:
            sys.path.insert(0, folder)  # as for a script, so that a plug-in may be several files
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
    except Exception as error:  # the plug-in's own code
        raise DFlashError(f"Cannot load the plug-in {plugin}: {type(error).__name__}: {one_line(error)}") from error
    return module


def plugin_error(error: BaseException) -> str | None:
    """Where in a plug-in ``error`` arose, and what it is, on one line; ``None`` for an error that passed none."""
    frames = traceback.extract_tb(error.__traceback__)
    place = next((frame for frame in reversed(frames) if frame.filename in _FILES), None)
    if place is None:
        return None
    return f"{place.filename}:{place.lineno}, in {place.name}: {type(error).__name__}: {one_line(error)}"
