"""Host values that a trace took from Python objects: listed in the report, and checked before every replay.

Dynamo notes each number, flag, string and None that the loop looked at. A replay does not look again, so a value that
differs sends the batch to a split loop traced with the new one.
"""

from __future__ import annotations

import inspect
import re
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch._guards import TracingContext

from draftfuse.guards import split_path
from draftfuse.module_hooks import ModuleHooks
from draftfuse.writers import LIBRARIES, is_library

_CONSTANT = ("CONSTANT_MATCH", "EQUALS_MATCH", "BOOL_MATCH", "NONE_MATCH")
_TABLES = (dict, list, tuple, set, deque)
_ROUTINES = ("BUILTIN_MATCH", "CLOSURE_MATCH", "FUNCTION_MATCH")
_LENGTHS = ("SEQUENCE_LENGTH", "DICT_KEYS_MATCH", "MAPPING_KEYS_CHECK")
_ENTRIES = ("DICT_CONTAINS", "DICT_NOT_CONTAINS", "SET_CONTAINS", "SET_NOT_CONTAINS")
SCALARS = (int, float, bool, str, type(None), bytes, complex, torch.dtype, torch.device, frozenset, Enum)
# How Dynamo writes a class attribute that it found through an object: ``dict(type(L['spec']).__dict__)['scale']``.
_OF_CLASS = re.compile(r"dict\(type\((?P<owner>.+)\)(\.__mro__\[\d+\])?\.__dict__\)\['(?P<name>\w+)'\]")
_ASKED = re.compile(r"len\((?P<measured>.+)\)|(?P<key>'[^']*'|\d+) in (?P<container>.+)")


def taken(roots: Mapping[str, Any], module_globals: dict[str, Any]) -> dict[str, Any]:
    """Values by path (``L['spec'].page_size``) that the trace in progress took; call it inside a Dynamo backend."""
    context = TracingContext.try_get()
    found: dict[str, Any] = {}
    for guard in context.guards_context.dynamo_guards if context is not None else ():
        name: Any = guard.name
        if (path := asked(name() if callable(name) else name, guard)) is not None:
            value = value_at(path, roots, module_globals)
            value = frozenset(value) if isinstance(value, set) else value  # Dynamo takes a whole set
            if is_taken(path, value):
                found[as_attribute(path, value, roots, module_globals)] = value
    return dict(sorted(found.items()))


def asked(path: str, guard: Any) -> str | None:
    """What the loop looked at, as an expression over Dynamo's path; None where that is no scalar.

    Beside values these are lengths (``len(L['spec'].scales)``), keys (``'x' in L['spec'].options``) and attributes that
    an object itself does not have (``'x' in L['spec'].__dict__``): what a default, or a class, stands in for.
    """
    kind, owner = guard.create_fn_name(), split_path(path)[0] if path else ""
    if kind in _CONSTANT:
        return path if "[" in owner else None
    if "[" not in path:
        return None
    if kind in _ROUTINES:
        return path if path.startswith("L['spec']") else None
    if kind == "TYPE_MATCH":
        return f"{path}.__class__" if path.startswith("L['spec']") else None
    if kind in _LENGTHS:
        return f"len({path})"
    given = getattr(guard.create_fn, "keywords", {})
    if kind in ("HASATTR", "NOT_PRESENT_IN_GENERIC_DICT"):
        # In torch 2.11 a HASATTR stands at the attribute itself.
        path, key = (path, given["attr"]) if given.get("attr") else split_path(path)
        path = f"{path}.__dict__"
    elif kind in _ENTRIES:
        key = given.get("key")
    else:
        return None
    return f"{key!r} in {path}" if isinstance(key, (str, int)) else None


def is_taken(path: str, value: Any) -> bool:
    """Whether a value that the loop looked at is one that is guarded: a scalar, a function, the class of an object.

    Of classes those of plain objects of the user's; a module that is replaced brings other parameters.
    """
    if isinstance(value, type) and path.endswith(".__class__"):
        return not is_library(value) and not issubclass(value, (torch.nn.Module, torch.Tensor, *_TABLES, *SCALARS))
    return isinstance(value, SCALARS) or inspect.isroutine(value)


def as_attribute(path: str, value: Any, roots: Mapping[str, Any], module_globals: dict[str, Any]) -> str:
    """A class attribute as an attribute of the object that it was read through, where that reads the same."""
    parts = _OF_CLASS.fullmatch(path)
    if parts is None:
        return path
    through = f"{parts['owner']}.{parts['name']}"
    return through if _equal(value, value_at(through, roots, module_globals)) else path


REPLACED = "an object that the loop read its values from, one of its methods, or a hook of a module, was replaced"
MISSING = object()
_BUILTINS = {"type": type, "dict": dict, "len": len}


class _Modules(dict[str, Any]):
    """Modules by the names that Dynamo gives them: ``G['__import_package_dot_module']``."""

    def __missing__(self, key: str) -> Any:
        return sys.modules[key.removeprefix("__import_").replace("_dot_", ".")]


MODULES = _Modules()


def value_at(path: str, roots: Mapping[str, Any], module_globals: dict[str, Any]) -> Any:
    """What stands at Dynamo's ``path`` now; :data:`MISSING` where nothing does."""
    try:
        return eval(path, {"__builtins__": _BUILTINS}, {"L": roots, "G": module_globals})  # Dynamo's own path
    except (AttributeError, KeyError, IndexError, NameError, TypeError, SyntaxError):
        return MISSING


def plain(path: str) -> str:
    """A path as a user would write it: ``L['spec'].builder.window`` -> ``spec.builder.window``."""
    path = re.sub(r"G\['__import_(\w+)'\]", lambda found: found[1].replace("_dot_", "."), path)
    if (parts := _ASKED.fullmatch(path)) is not None:
        inner = plain(parts["measured"] or parts["container"])
        return f"len({inner})" if parts["measured"] else f"{parts['key']} in {inner}"
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
            if comparison.add(path, value):
                values[path] = value
        for path in methods_of(roots):
            comparison.methods(path)
        if "spec" in roots:
            comparison.hooks(ModuleHooks(roots["spec"]))
        current = {path: _reader(path, roots) for path in values}
        return cls(values, comparison.compiled(), current)

    def broken(self) -> list[str]:
        """Each value that is not what it was, as text; empty where all hold."""
        if self.holds():
            return []
        changed = [(p, self.values[p], read()) for p, read in self.current.items()]
        named = [f"{plain(p)}: traced with {old!r}, now {new!r}" for p, old, new in changed if not _equal(old, new)]
        return named or [REPLACED]


def methods_of(roots: Mapping[str, Any]) -> list[str]:
    """Paths of the objects whose methods the loop runs: the speculator and its builders."""
    groups = range(len(roots["spec"].attn_groups)) if "spec" in roots else ()
    return [f"L['{name}']" for name in roots] + [f"L['spec'].attn_groups[{index}].builder" for index in groups]


def _reader(path: str, roots: Mapping[str, Any]) -> Callable[[], Any]:
    return lambda: value_at(path, roots, MODULES)


def _equal(old: Any, new: Any) -> bool:
    return (type(old) is type(new) or isinstance(old, frozenset)) and bool(old == new)


class _Comparison:
    """Builds ``o0.a == 3 and o0.b is o1 and o1.c is None ...`` over bound objects."""

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self.roots = roots
        self.names: dict[str, Any] = {}
        self.owners: dict[str, str] = {}  # path of an owner -> its bound name
        self.terms: list[str] = []

    def add(self, path: str, value: Any) -> bool:
        if isinstance(value, type):  # of an object that may be replaced by one with other methods
            owner_path = split_path(path)[0]
            self.owner(owner_path, value_at(owner_path, self.roots, MODULES))
            return True
        read = self.question(path) if _ASKED.fullmatch(path) else self.attribute(path)
        if read is None:
            return False
        is_named = value is None or isinstance(value, bool)
        self.terms.append(f"({read}) is {value!r}" if is_named else f"{read} == {self.constant(value)}")
        return True

    def methods(self, path: str) -> None:
        """The class of an object, the functions that it has from classes of the user's, and those of its own."""
        owner = value_at(path, self.roots, MODULES)
        klass, name = type(owner), self.owner(path, owner)
        if is_library(klass):
            return
        self.terms.append(f"{name}.__class__ is {self.constant(klass)}")
        known = {n for base in klass.__mro__ if not is_library(base) for n in vars(base)}
        for method in sorted(n for n in known if inspect.isfunction(inspect.getattr_static(klass, n, None))):
            self.terms.append(f"{self.constant(klass)}.{method} is {self.constant(getattr(klass, method))}")
        for attribute, value in getattr(owner, "__dict__", {}).items():
            if inspect.isroutine(value) and attribute.isidentifier():
                self.terms.append(f"{name}.{attribute} is {self.constant(value)}")

    def hooks(self, found: ModuleHooks) -> None:
        """The forward hooks of the modules behind the loop."""
        self.terms.append(f"{self.constant(found.hold)}()")

    def attribute(self, path: str) -> str | None:
        """How an attribute or item is read; None where nobody can assign it."""
        owner_path, key = split_path(path)
        owner = value_at(owner_path, self.roots, MODULES)
        return _access(self.owner(owner_path, owner), owner, key) if _can_change(owner, key) else None

    def question(self, path: str) -> str | None:
        """How a length is taken, or a key looked up; None where neither can change."""
        parts = _ASKED.fullmatch(path)
        assert parts is not None
        container_path = parts["measured"] or parts["container"]
        container = value_at(container_path, self.roots, MODULES)
        if not isinstance(container, (dict, list, set, deque)) or container_path.startswith("dict("):
            return None
        name = self.owner(container_path, container)
        return f"len({name})" if parts["measured"] else f"{parts['key']} in {name}"

    def owner(self, path: str, owner: Any) -> str:
        """The bound name of an object, with the identity of everything on the way to it in the comparison."""
        if path not in self.owners:
            self.owners[path] = name = f"o{len(self.owners)}"
            self.names[name] = owner
            above, key = split_path(path)
            parent = value_at(above, self.roots, MODULES) if above and above not in ("L", "G") else MISSING
            if parent is not MISSING and key != "__dict__":
                access = _access(self.owner(above, parent), parent, key)  # what a tuple holds stays; the tuple may not
                if _can_change(parent, key):
                    self.terms.append(f"{access} is {name}")
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
    """Whether ``owner`` is an object, class or module of the user's that lets ``key`` be assigned, or a container."""
    if isinstance(owner, (dict, list)):
        return True
    if isinstance(owner, types.CellType):
        return bool(key == "cell_contents")
    if not isinstance(key, str) or not key.isidentifier() or owner is MISSING:
        return False
    if isinstance(owner, types.ModuleType):
        return owner.__name__.split(".")[0] not in LIBRARIES
    if isinstance(owner, type):
        return not is_library(owner)
    if isinstance(owner, (tuple, torch.Tensor)) or (isinstance(owner, torch.nn.Module) and is_library(type(owner))):
        return False
    frozen = getattr(getattr(type(owner), "__dataclass_params__", None), "frozen", False)
    return not frozen and (key in _own_names(owner) or _is_plain(inspect.getattr_static(type(owner), key, None)))


def _is_plain(value: Any) -> bool:
    """Whether a class holds a value itself, so that an assignment to the object, or to the class, changes it."""
    return isinstance(value, SCALARS) and value is not None


def _own_names(owner: Any) -> Iterator[str]:
    yield from getattr(owner, "__dict__", ())
    for klass in type(owner).__mro__:
        yield from (n for n in vars(klass) if n in getattr(klass, "__slots__", ()))
