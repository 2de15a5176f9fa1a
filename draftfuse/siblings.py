"""What stands beside the values that a trace took: a draft step that was copied may read another entry of a table.

``scales[step]`` was read at the steps that were traced; step 6 reads ``scales[6]``, which nobody looked at. So every
scalar of a list or dictionary on the way to a value is guarded with it, and every attribute whose name differs in
numbers alone (``scale_02``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from draftfuse.baked import MISSING, MODULES, is_taken, value_at
from draftfuse.guards import split_path

_TABLES = (dict, list, tuple)
LIMIT = 4096  # entries looked at: guards on more would cost more than the steps that copying saves


class TooManyEntries(Exception):
    """The tables that a loop reads are too large to be guarded entry by entry."""


def with_siblings(values: Mapping[str, Any], roots: Mapping[str, Any]) -> dict[str, Any]:
    """``values``, and what else a copied step could read through the same tables.

    Raises:
        TooManyEntries: there are more than :data:`LIMIT` of them.
    """
    found = dict(values)
    beside = (entry for path in values for entry in _beside(path, roots))
    for count, (path, value) in enumerate(beside):
        if count >= LIMIT:
            raise TooManyEntries(f"the loop reads tables of more than {LIMIT} entries, {path} among them")
        found.setdefault(path, value)
    return found


def _beside(path: str, roots: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    base, keys = path, list[Any]()
    while (parts := split_path(base))[0] not in ("", "L", "G"):
        base = parts[0]
        keys.insert(0, parts[1])
    owner = value_at(base, roots, MODULES)
    if owner is not MISSING:
        yield from _walk(base, owner, keys)


def _walk(path: str, value: Any, keys: list[Any]) -> Iterator[tuple[str, Any]]:
    """Scalars at the end of ``keys``, with every entry of a table and every number in a name tried."""
    if not keys:
        if is_taken(path, value):
            yield path, value
        return
    for key, item in _entries(value, keys[0]):
        is_table = isinstance(value, _TABLES)
        there = f"{path}[{key!r}]" if is_table else f"{path}.{key}"
        yield from _walk(there, item, keys[1:])
        if is_table:
            yield from _inside(there, item)


def _entries(owner: Any, key: Any) -> list[tuple[Any, Any]]:
    if isinstance(owner, dict):
        return [(k, item) for k, item in owner.items() if isinstance(k, (str, int))]
    if isinstance(owner, (list, tuple)):
        return list(enumerate(owner))
    if re.search(r"\d", str(key)):
        pattern = re.compile(re.sub(r"\d+", r"\\d+", str(key)))
        return [(k, item) for k, item in getattr(owner, "__dict__", {}).items() if pattern.fullmatch(str(k))]
    item = getattr(owner, str(key), MISSING)
    return [] if item is MISSING else [(key, item)]


def _inside(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """All scalars of nested tables."""
    if is_taken(path, value):
        yield path, value
    elif isinstance(value, _TABLES):
        for key, item in _entries(value, None):
            yield from _inside(f"{path}[{key!r}]", item)
