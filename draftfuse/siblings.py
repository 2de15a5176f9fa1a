"""What stands beside the values that a trace took: a draft step that was copied may read another entry of a table.

``scales[step]`` was read at the steps that were traced; step 6 reads ``scales[6]``, which nobody looked at. So every
scalar of a list or dictionary on the way to a value is guarded with it, once a table, and with it what a copied step
could ask of the table itself: its length, and which keys it has. Attributes are noted as they are read
(:mod:`draftfuse.attribute_reads`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from itertools import chain
from types import MappingProxyType
from typing import Any

from draftfuse.attribute_reads import is_plain_namespace
from draftfuse.baked import is_taken
from draftfuse.paths import MISSING, MODULES, asked_of, split_path, text_of_key, value_at
from draftfuse.unroll import Irregular

_SEQUENCES = (list, tuple, deque)
_MAPPINGS = (dict, MappingProxyType)
_TABLES = (*_MAPPINGS, *_SEQUENCES)
LIMIT = 4096  # entries looked at: guards on more would cost more than the steps that copying saves
_ANY = object()  # a key that stands for every entry

Shape = tuple[str, tuple[Any, ...]]


class TooManyEntries(Irregular):
    """The tables that a loop reads are too large to be guarded entry by entry."""


def check_number(count: int, what: str) -> None:
    """Raise :class:`TooManyEntries` for more than :data:`LIMIT`."""
    if count > LIMIT:
        raise TooManyEntries(f"the loop reads tables of more than {LIMIT} entries, {what} among them")


def with_siblings(values: Mapping[str, Any], roots: Mapping[str, Any]) -> dict[str, Any]:
    """``values``, and what else a copied step could read through the same tables.

    Raises:
        TooManyEntries: there are more than :data:`LIMIT` of them.
    """
    found = dict(values)
    questions = {path: question for path in values if (question := asked_of(path)) is not None}
    containers = dict.fromkeys(q.container for q in questions.values() if q.kind == "in")
    shapes = dict.fromkeys(_shape(path, roots) for path in values if path not in questions)
    beside = [_walk(base, value_at(base, roots, MODULES), keys) for base, keys in shapes]
    asked = [_keys(c, value_at(c, roots, MODULES)) for c in containers]
    for path, value in chain(*beside, *asked):
        found.setdefault(path, value)
        check_number(len(found) - len(values), path)
    return found


def _shape(path: str, roots: Mapping[str, Any]) -> Shape:
    """The root of a path and the keys behind it, that of a table replaced by :data:`_ANY`."""
    base, keys = path, list[Any]()
    while (parts := split_path(base))[0] not in ("", "L", "G"):
        base = parts[0]
        owner = value_at(base, roots, MODULES)
        keys.insert(0, _ANY if isinstance(owner, _TABLES) or is_plain_namespace(owner) else parts[1])
    return base, tuple(keys)


def _walk(path: str, value: Any, keys: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    """Scalars at the end of ``keys``, with every entry of a table tried, and the tables in it."""
    if not keys:
        if is_taken(value):
            yield path, value
        return
    if keys[0] is not _ANY:
        item = getattr(value, str(keys[0]), MISSING)
        if item is not MISSING:
            yield from _walk(f"{path}.{keys[0]}", item, keys[1:])
        return
    if isinstance(value, (list, deque)):
        yield f"len({path})", len(value)
    for there, item in _entries(path, value):
        yield from _walk(there, item, keys[1:])
        if len(keys) > 1 or not is_taken(item):
            yield from _inside(there, item, {id(value)})


def _entries(path: str, owner: Any) -> list[tuple[str, Any]]:
    if isinstance(owner, _MAPPINGS):
        texts = {text: item for key, item in owner.items() if (text := text_of_key(key)) is not None}
        return [(f"{path}[{text}]", item) for text, item in texts.items()]
    if isinstance(owner, _SEQUENCES):
        return [(f"{path}[{index}]", item) for index, item in enumerate(owner)]
    return [(f"{path}.{name}", item) for name, item in vars(owner).items()] if is_plain_namespace(owner) else []


def _inside(path: str, value: Any, above: set[int]) -> Iterator[tuple[str, Any]]:
    """All scalars of nested tables."""
    if is_taken(value):
        yield path, value
    elif isinstance(value, _TABLES) and id(value) not in above:
        for there, item in _entries(path, value):
            yield from _inside(there, item, above | {id(value)})


def _keys(path: str, container: Any) -> Iterator[tuple[str, Any]]:
    """Which keys a dictionary or set has: copied steps may ask for another one than the traced steps."""
    if isinstance(container, (*_MAPPINGS, set)) and not path.endswith(".__dict__"):
        yield f"len({path})", len(container)
        yield from ((f"{text} in {path}", True) for key in container if (text := text_of_key(key)) is not None)
