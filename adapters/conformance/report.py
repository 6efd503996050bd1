"""The result of a conformance check, as records and as a table."""

from dataclasses import dataclass, field

from rich.table import Table
from rich.text import Text


@dataclass(frozen=True)
class Check:
    """One row of the report.

    Args:
        name: What was checked.
        difference: The first difference found; empty if the check passed.
        skipped: Why it was skipped, or what is missing; the target decodes without it.
    """

    name: str
    difference: str = ""
    skipped: str = ""

    @property
    def passed(self) -> bool:
        """Whether nothing differed."""
        return not self.difference


@dataclass(frozen=True)
class Report:
    """The result of :func:`~dflash.adapters.conformance.check`.

    Args:
        model_type: The model's architecture.
        adapter: Name of its adapter class; empty if none fits.
        caches: Cache class of each layer with its rewind rule, ``None`` if there is none.
        checks: One entry per check, in the order in which they ran.
    """

    model_type: str
    adapter: str
    caches: list[tuple[str, str | None]] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether all checks passed."""
        return bool(self.checks) and all(c.passed for c in self.checks)

    @property
    def failure(self) -> str:
        """The first failed check and its difference on one line; empty if all passed."""
        return next((f"{c.name}: {c.difference}" for c in self.checks if not c.passed), "")

    @property
    def cache_kinds(self) -> str:
        """Distinct cache classes, in the order of their layers."""
        return ", ".join(dict.fromkeys(name for name, _ in self.caches))

    @property
    def title(self) -> str:
        """Architecture, adapter and caches on one line."""
        return f"{self.model_type}: {self.adapter or 'no adapter'}; caches: {self.cache_kinds or 'unknown'}"

    def table(self) -> Table:
        """For a terminal or a notebook: check, verdict, first difference."""
        table = Table("check", "verdict", "first difference", title=self.title, title_justify="left")
        for c in self.checks:
            passed = Text("skip", "yellow") if c.skipped else Text("pass", "green")
            table.add_row(c.name, passed if c.passed else Text("fail", "red"), Text(c.difference or c.skipped))
        return table
