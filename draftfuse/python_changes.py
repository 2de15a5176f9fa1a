"""What one run changed in the Python state behind a loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from draftfuse.errors import SourceLine
from draftfuse.python_state import State
from draftfuse.writers import writer_of


@dataclass(frozen=True)
class Change:
    """One difference between two states: where, what it was, what it is, and the statement that does it."""

    path: str
    before: str
    after: str
    kind: str  # "value", "tensor", "entry" or "iterator"
    source: SourceLine | None = None

    @property
    def is_builders(self) -> bool:
        """Whether it is state of a metadata builder, which runs in Python in a split loop."""
        return self.path.startswith("spec.attn_groups[") and ".builder" in self.path

    def __str__(self) -> str:
        return f"{self.path}: {self.before} -> {self.after}"


def diff(before: State, after: State) -> list[Change]:
    """What differs, in the order of the paths after; the lines that do it where the owner's source shows them."""
    changes: list[Change] = []
    for path in dict.fromkeys([*after.leaves, *before.leaves]):
        old, new = before.leaves.get(path), after.leaves.get(path)
        if old == new or _belongs_to_changed(path, changes):
            continue
        owner, attribute = (after if path in after.owners else before).owners[path]
        kind = "tensor" if _holds_new_tensor(path, before, after) else _kind_of(new or old)
        changes.append(Change(path, show(old), show(new), kind, writer_of(owner, attribute)))
    return changes


def _holds_new_tensor(path: str, before: State, after: State) -> bool:
    """Whether a tensor that was not reachable before is at ``path`` or below."""
    known = {id(t) for t in before.tensors.values()}
    below = (path, f"{path}[", f"{path}.")
    return any(id(t) not in known for p, t in after.tensors.items() if p == path or p.startswith(below[1:]))


def _belongs_to_changed(path: str, changes: list[Change]) -> bool:
    """Entries of a container that was reported already need no line of their own."""
    return any(path.startswith((f"{c.path}[", f"{c.path}.")) for c in changes)


def _kind_of(leaf: Any) -> str:
    return "iterator" if leaf[0] == "iterator" else "entry" if _is_container(leaf) else "value"


def _is_container(leaf: Any) -> bool:
    return leaf[0] in ("dict", "list", "set", "deque", "tuple")


def show(leaf: Any) -> str:
    """A summary as text."""
    if leaf is None:
        return "nothing"
    if leaf[0] == "tensor":
        return f"a tensor {leaf[3]}{list(leaf[2])}"
    if _is_container(leaf):
        return f"{leaf[0]} of {leaf[1]}"
    return repr(leaf[1]) if len(leaf) > 1 else f"a {leaf[0]}"
