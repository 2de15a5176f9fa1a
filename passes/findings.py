"""What the lint says: one finding, where it is, how bad it is, what to do, and whether the user allowed it."""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from draftfuse.errors import SourceLine

ERROR, WARNING = "error", "warning"
CLASSES = {
    "host-sync": "the host waits for a value of the device",
    "cpu-tensor": "a tensor made on the host enters the loop",
    "data-dependent-shape": "a shape depends on values",
    "baked-rng": "the state of a random generator would be frozen",
    "fresh-allocation": "a tensor made in the loop is bound to something that outlives it",
    "foreign-write": "the loop writes a tensor that the speculator does not own",
    "undeclared-input": "the loop reads a tensor that the speculator does not reach",
    "raw-kv-write": "an indexed write into a KV pool, where slot -1 is the last slot",
    "short-table": "a table is shorter than the positions it is asked for",
    "python-branch": "Python decides by a value of the batch",
    "rank-branch": "Python decides by the rank of the process",
    "collective": "a collective that cannot be part of one captured loop",
    "side-effect": "Python state changes while the loop runs",
    "unstable-trace": "tracing twice gives two graphs",
    "context-read": "the loop reads a context or environment variable",
    "hidden-read": "an operator reads a buffer that is not among its arguments",
    "loop-kind": "a loop of another kind",
    "untraceable": "a statement cannot become part of a graph",
}
_ALLOW = re.compile(r"#\s*draftfuse:\s*allow\[(?P<names>[\w\-, ]+)\]\s*(?P<reason>.*)")


@dataclass(frozen=True)
class Finding:
    """One thing that a captured loop would freeze, lose or get wrong."""

    severity: str  # "error" or "warning"
    name: str  # a key of CLASSES
    text: str
    todo: str
    source: SourceLine | None = None
    allowed: str | None = None  # the reason that the user gave on the line
    phase: str = ""  # of the loop; what a builder does in Python can still run split

    def __str__(self) -> str:
        at = f"\n  {self.source}" if self.source is not None else ""
        head = f"allowed ({self.allowed})" if self.allowed is not None else self.severity
        return f"{head} [{self.name}] {self.text}. {self.todo}{at}"

    @property
    def is_error(self) -> bool:
        """Whether the loop must not be captured because of it."""
        return self.severity == ERROR and self.allowed is None


def allowed(finding: Finding) -> Finding:
    """``finding`` with the reason of a ``# draftfuse: allow[<class>] reason`` comment on its line, if there is one."""
    if finding.source is None:
        return finding
    found = _ALLOW.search(linecache.getline(finding.source.file, finding.source.line))
    if found is None or finding.name not in [n.strip() for n in found["names"].split(",")]:
        return finding
    return replace(finding, allowed=found["reason"].strip() or "no reason given")


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Each finding once (a loop has the same one at every draft step), errors first, comments read."""
    unique = dict.fromkeys(allowed(f) for f in findings)
    return sorted(unique, key=lambda f: (f.allowed is not None, f.severity != ERROR))
