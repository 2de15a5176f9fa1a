"""What the lint says: one finding, where it is, how bad it is, what to do, and whether the user allowed it."""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from draftfuse.errors import SourceLine, without_addresses

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
    "other-program": "the trace computes something else than the loop as Python runs it",
    "context-read": "the loop reads a context or environment variable",
    "hidden-read": "an operator reads a buffer that is not among its arguments",
    "loop-kind": "a loop of another kind",
    "untraceable": "a statement cannot become part of a graph",
    "failure": "a statement of the loop raises",
    "comment": "a comment to draftfuse that it cannot read",
}
_COMMENT = re.compile(r"#\s*draftfuse:(?P<rest>.*)")
_ALLOW = re.compile(r"\s*allow\[(?P<names>[^\]]*)\]\s*(?P<reason>.*)")


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
    needed: str = ""  # why nothing can be compiled with it, so that no comment allows it
    path: str = ""  # of the Python state that changes
    is_counted: bool = False  # and that nothing reads

    def __str__(self) -> str:
        at = f"\n  {self.source}" if self.source is not None else ""
        head = f"allowed ({self.allowed})" if self.allowed is not None else self.severity
        return without_addresses(f"{head} [{self.name}] {self.text}. {self.todo}{at}")

    @property
    def is_error(self) -> bool:
        """Whether the loop must not be captured because of it."""
        return self.severity == ERROR and self.allowed is None


def allowed(finding: Finding) -> Finding:
    """``finding`` with the reason of a ``# draftfuse: allow[<class>] reason`` comment on its line, if there is one.

    One that compiling cannot do without says so instead.
    """
    names, reason = _allowed_at(finding.source)
    if finding.name not in names:
        return finding
    if finding.needed:
        return replace(finding, todo=f"{finding.todo} It cannot be allowed: {finding.needed}.")
    return replace(finding, allowed=reason or "no reason given")


def _allowed_at(source: SourceLine | None) -> tuple[list[str], str]:
    """The classes that the comment of a line names, and its reason."""
    found = _COMMENT.search(_text_of(source)) if source is not None else None
    parts = _ALLOW.match(found["rest"]) if found is not None else None
    if parts is None:
        return [], ""
    return [name for n in parts["names"].split(",") if (name := n.strip())], parts["reason"].strip()


def _text_of(source: SourceLine) -> str:
    return linecache.getline(source.file, source.line)


def unread_comments(lines: Iterable[SourceLine]) -> Iterator[Finding]:
    """Comments to draftfuse on ``lines`` that name no class of findings, or one that does not exist."""
    todo = f"Write allow[<class>] reason, with classes among {', '.join(CLASSES)}."
    for source in lines:
        found = _COMMENT.search(_text_of(source))
        names, _ = _allowed_at(source)
        unknown = [n for n in names if n not in CLASSES]
        if found is not None and (unknown or not names):
            text = f"allow[{', '.join(unknown)}] names no class of findings" if names else "this comment allows nothing"
            yield Finding(WARNING, "comment", text, todo, source)


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """One finding a line and class (a loop has the same one at every draft step), errors first, comments read."""
    first: dict[Any, Finding] = {}
    found = list(findings)
    lines = dict.fromkeys(f.source for f in found if f.source is not None)
    for finding in (*map(allowed, found), *unread_comments(lines)):
        known = first.setdefault(key_of(finding), finding)
        if _weight(finding) > _weight(known):
            first[key_of(finding)] = finding
    return sorted(first.values(), key=lambda f: (f.allowed is not None, f.severity != ERROR))


def key_of(finding: Finding) -> tuple[Any, ...]:
    """What makes two findings one: their class, with their line where they have one."""
    source = finding.source
    return (finding.name, finding.text) if source is None else (finding.name, source.file, source.line)


def _weight(finding: Finding) -> tuple[bool, bool]:
    return finding.is_error, bool(finding.needed)
