"""Host values that a trace took from Python objects: listed in the report, and checked before every replay.

Dynamo notes each number, flag, string and None that the loop looked at. A replay does not look again, so a value that
differs sends the batch to a split loop traced with the new one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._guards import TracingContext

from draftfuse.guards import split_path

_CONSTANT = ("CONSTANT_MATCH", "EQUALS_MATCH", "BOOL_MATCH", "NONE_MATCH")
_SCALARS = (int, float, bool, str, type(None))


def taken(roots: Mapping[str, Any], module_globals: dict[str, Any]) -> dict[str, Any]:
    """Values by path (``L['spec'].page_size``) that the trace in progress took; call it inside a Dynamo backend."""
    context = TracingContext.try_get()
    found: dict[str, Any] = {}
    for guard in context.guards_context.dynamo_guards if context is not None else ():
        name: Any = guard.name
        path = name() if callable(name) else name
        owner, _ = split_path(path) if path else ("", None)
        if guard.create_fn_name() in _CONSTANT and "[" in owner:
            value = _value(path, roots, module_globals)
            if isinstance(value, _SCALARS):
                found[path] = value
    return dict(sorted(found.items()))


REPLACED = "an object that the loop read its values from was replaced"


def with_siblings(values: Mapping[str, Any], roots: Mapping[str, Any], count: int) -> dict[str, Any]:
    """``values``, and what stands at each path with one of its numbers replaced by another below ``count``.

    A loop of which some steps were copied may read ``scales[step]`` in a step that nobody traced.
    """
    found = dict(values)
    for path in values:
        for number in re.finditer(r"\d+", path):
            for i in range(count):
                sibling = f"{path[: number.start()]}{i}{path[number.end() :]}"
                value = _value(sibling, roots, {}) if sibling not in found else _MISSING
                if isinstance(value, _SCALARS):
                    found[sibling] = value
    return found


_MISSING = object()


def _value(path: str, roots: Mapping[str, Any], module_globals: dict[str, Any]) -> Any:
    try:
        return eval(path, {"__builtins__": {"type": type}}, {"L": roots, "G": module_globals})  # Dynamo's own path
    except (AttributeError, KeyError, IndexError, NameError, TypeError, SyntaxError):
        return _MISSING


def plain(path: str) -> str:
    """A path as a user would write it: ``L['spec'].builder.window`` -> ``spec.builder.window``."""
    for prefix in ("L['", "G['"):
        if path.startswith(prefix):
            return path[3:].replace("']", "", 1)
    return path


@dataclass
class ScalarGuards:
    """One compiled comparison over all values that can change."""

    values: dict[str, Any] = field(default_factory=dict)
    holds: Callable[[], bool] = lambda: True
    current: dict[str, Callable[[], Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, baked: Mapping[str, Any], roots: Mapping[str, Any]) -> ScalarGuards:
        """Guards on those of ``baked`` that an assignment to an attribute or item could change."""
        comparison, values = _Comparison(roots), {}
        for path, value in baked.items():
            if path.startswith("L['") and comparison.add(path, value):
                values[path] = value
        current = {path: _reader(path, roots) for path in values}
        return cls(values, comparison.compiled(), current)

    def broken(self) -> list[str]:
        """Each value that is not what it was, as text; empty where all hold."""
        if self.holds():
            return []
        changed = [(p, self.values[p], read()) for p, read in self.current.items()]
        named = [f"{plain(p)}: traced with {old!r}, now {new!r}" for p, old, new in changed if not _equal(old, new)]
        return named or [REPLACED]


def _reader(path: str, roots: Mapping[str, Any]) -> Callable[[], Any]:
    return lambda: _value(path, roots, {})


def _equal(old: Any, new: Any) -> bool:
    return type(old) is type(new) and bool(old == new)


class _Comparison:
    """Builds ``o0.a == 3 and o0.b is o1 and o1.c is None ...`` over bound objects."""

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self.roots = roots
        self.names: dict[str, Any] = {}
        self.owners: dict[str, str] = {}  # path of an owner -> its bound name
        self.terms: list[str] = []

    def add(self, path: str, value: Any) -> bool:
        owner_path, key = split_path(path)
        owner = _value(owner_path, self.roots, {})
        if not _can_change(owner, key):
            return False
        read = _access(self.owner(owner_path, owner), owner, key)
        self.terms.append(
            f"{read} is {value!r}" if value is None or isinstance(value, bool) else f"{read} == {self.constant(value)}"
        )
        return True

    def owner(self, path: str, owner: Any) -> str:
        """The bound name of an object, with the identity of everything on the way to it in the comparison."""
        if path not in self.owners:
            self.owners[path] = name = f"o{len(self.owners)}"
            self.names[name] = owner
            above, key = split_path(path)
            parent = _value(above, self.roots, {}) if above and above != "L" else _MISSING
            if _can_change(parent, key):
                self.terms.append(f"{_access(self.owner(above, parent), parent, key)} is {name}")
        return self.owners[path]

    def constant(self, value: Any) -> str:
        name = f"c{len(self.names)}"
        self.names[name] = value
        return name

    def compiled(self) -> Callable[[], bool]:
        parameters = ", ".join(f"{n}={n}" for n in self.names)
        body = " and ".join(self.terms) or "True"
        source = (
            f"def holds({parameters}):\n    try:\n        return {body}\n"
            "    except (AttributeError, LookupError):\n        return False\n"
        )
        scope = dict(self.names)
        exec(compile(source, "<draftfuse guards>", "exec"), scope)
        function: Callable[[], bool] = scope["holds"]
        return function


def _access(name: str, owner: Any, key: Any) -> str:
    return f"{name}[{key!r}]" if isinstance(owner, (dict, list)) else f"{name}.{key}"


def _can_change(owner: Any, key: Any) -> bool:
    """Whether ``owner`` is an object of the user's that holds ``key`` itself and lets it be assigned."""
    if isinstance(owner, (dict, list)):
        return True
    if owner is _MISSING or isinstance(owner, (type, tuple, torch.nn.Module, torch.Tensor)) or not isinstance(key, str):
        return False
    parameters = getattr(type(owner), "__dataclass_params__", None)
    return key.isidentifier() and not getattr(parameters, "frozen", False) and key in _own_names(owner)


def _own_names(owner: Any) -> Iterator[str]:
    yield from getattr(owner, "__dict__", ())
    for klass in type(owner).__mro__:
        yield from (n for n in vars(klass) if n in getattr(klass, "__slots__", ()))
