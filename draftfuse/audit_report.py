"""What an audit found: the first divergence first, as a table that reads like one built from debug prints."""

from __future__ import annotations

import io
import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from draftfuse.errors import SourceLine

SHOWN = 20


@dataclass(frozen=True)
class Divergence:
    """One value that differs from the eager loop."""

    round: int  # 0: the batch as given, 1: changed values, 2: one row less
    step: int  # the draft step
    phase: str
    tensor: str
    request: int | None  # None: the tensor has no request rows
    expected: object
    got: object
    source: SourceLine | None


@dataclass
class AuditReport:
    """The result of one audit."""

    divergences: list[Divergence] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    values: int = 0  # tensors compared
    rounds: int = 0
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether everything that was compared is equal."""
        return not self.divergences

    @property
    def first(self) -> Divergence | None:
        """The first divergence in the order of the loop."""
        return self.divergences[0] if self.divergences else None

    def table(self) -> Table:
        """The first divergences as a table."""
        table = Table(title=self.headline(), title_justify="left")
        for name in ("round", "draft step", "phase", "tensor", "request", "expected", "got", "source line"):
            table.add_column(name, overflow="fold")
        for d in self.divergences[:SHOWN]:
            request = "" if d.request is None else str(d.request)
            source = f"{Path(d.source.file).name}:{d.source.line}" if d.source is not None else ""
            table.add_row(str(d.round), str(d.step), d.phase, d.tensor, request, show(d.expected), show(d.got), source)
        return table

    def lines(self) -> list[str]:
        """What stands under the table: the statement behind the first divergence, and the notes."""
        source = self.first.source if self.first is not None else None
        return [*([f"the first one at {source}"] if source is not None else []), *self.notes]

    def headline(self) -> str:
        """One line: how much was compared and what came of it."""
        verdict = "no divergence" if self.ok else f"{len(self.divergences)} divergences, the first one first"
        return f"{self.values} tensors compared in {self.rounds} rounds, {self.seconds:.1f} s: {verdict}"

    def __str__(self) -> str:
        console = Console(width=160, record=True, file=io.StringIO())
        console.print(self.table() if self.divergences else self.headline(), highlight=False)
        return "\n".join([console.export_text().rstrip(), *self.lines()])

    def to_json(self) -> str:
        """The report as JSON; numbers that JSON does not have (NaN, infinities) as text."""
        fields: dict[str, Any] = asdict(self) | {"ok": self.ok}
        for divergence in fields["divergences"]:
            divergence |= {name: _in_json(divergence[name]) for name in ("expected", "got")}
        return json.dumps(fields, default=str, allow_nan=False)


def show(value: object) -> str:
    """A value in a column of the table."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _in_json(value: object) -> object:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
