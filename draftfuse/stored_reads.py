"""What only copied steps read, as another process finds it again: by the path from the speculator."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from draftfuse.attribute_reads import Read
from draftfuse.paths import split_path
from draftfuse.trace_facts import NotCacheable, Question, Scope

ROOT = "spec"


def path_of(label: str) -> str:
    """Dynamo's path of a read (``spec.options['sign']`` -> ``L['spec'].options['sign']``)."""
    return f"L['{ROOT}']{label.removeprefix(ROOT)}"


def questions(reads: Iterable[Read], scope: Scope) -> list[Question]:
    """What has to be the same before the reads are guarded elsewhere; tensors are compared by their places.

    Raises:
        NotCacheable: a read is not behind the speculator, or not what stands at its path.
    """
    found = []
    for read in reads:
        path = path_of(read.label)
        if not read.label.startswith((f"{ROOT}.", f"{ROOT}[")) or at(path, read.is_item, scope)[0] is not read.owner:
            raise NotCacheable(f"copied steps read {read.label}, which has no path")
        if not isinstance(read.value, Tensor):
            found.append(Question("exact", path))
    return found


def at(path: str, is_item: bool, scope: Scope) -> tuple[Any, Any, Any]:
    """Owner, name and value of a read."""
    above, name = split_path(path)
    value = scope.at(path)
    return scope.at(above), ast.literal_eval(path[len(above) + 1 : -1]) if is_item else name, value


def to_json(reads: Iterable[Read]) -> list[list[Any]]:
    """Labels, and whether each is an item of a table."""
    return [[read.label, read.is_item] for read in reads]


def from_json(data: Iterable[list[Any]], scope: Scope) -> list[Read]:
    """The reads on the live objects."""
    found = []
    for label, is_item in data:
        owner, name, value = at(path_of(label), is_item, scope)
        found.append(Read(owner, name, value, label, is_item))
    return found
