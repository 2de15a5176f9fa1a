"""Attributes that only a copied draft step reads: ``getattr(self, ("early", "late")[step >= 6])``.

The trace read ``early``; the copied steps read ``late``, which happened to hold the same. While the logged run
(:mod:`draftfuse.step_log`) runs all steps in Python, the user's classes note each attribute that is read of their
objects, and ``getattr`` notes what it is asked of any other object. What comes up behind the traced steps is guarded.
"""

from __future__ import annotations

import builtins
import inspect
import threading
import types
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from draftfuse import python_state
from draftfuse.baked import SCALARS, same
from draftfuse.paths import MISSING
from draftfuse.writers import is_library

TRACED = 3  # steps whose reads the trace guards; the copied ones begin behind
_OF_MODULES = frozenset(vars(torch.nn.Module()))  # what PyTorch reads at each call
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class whose attributes can be assigned


@dataclass(frozen=True, eq=False)
class Read:
    """An attribute, or an item of a table, and what it held; :data:`MISSING` where there is none of that name."""

    owner: Any
    name: Any
    value: Any
    label: str
    is_item: bool = False

    @property
    def key(self) -> tuple[int, Any]:
        """What tells two reads apart."""
        return id(self.owner), self.name

    def now(self) -> Any:
        """What it holds now."""
        if not self.is_item:
            return getattr(self.owner, self.name, MISSING)
        try:
            return self.owner[self.name]
        except LookupError:
            return MISSING


class AttributeReads:
    """Notes attribute reads inside :meth:`noted`, of objects that are there before."""

    def __init__(self, spec: Any) -> None:
        state = python_state.of_speculator(spec)
        self.paths = {(id(owner), name): path for path, (owner, name) in reversed(state.owners.items())}
        self.owners = {id(owner): owner for owner, _ in state.owners.values() if owner is not None}
        self.log: list[tuple[Any, str, Any]] = []
        self.ends: dict[int, int] = {}  # by draft step, how many there are at its end
        self.thread = threading.get_ident()

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Inside, reads go to :attr:`log`."""
        classes = {type(owner) for owner in self.owners.values() if not isinstance(owner, type)}
        plain = {k: k.__getattribute__ for k in classes if k.__flags__ & _HEAP_TYPE and not is_library(k)}
        own = {klass: vars(klass).get("__getattribute__") for klass in plain}
        getattr_ = builtins.getattr
        try:
            for klass, read in plain.items():
                klass.__getattribute__ = self._noting(read)
            builtins.getattr = self._noting_getattr(getattr_)
            yield
        finally:
            builtins.getattr = getattr_
            for klass, method in own.items():
                if method is not None:
                    klass.__getattribute__ = method
                elif "__getattribute__" in vars(klass):
                    del klass.__getattribute__

    def _noting(self, plain: Any) -> Any:
        def read(owner: Any, name: str) -> Any:
            try:
                value = plain(owner, name)
            except AttributeError:
                self._note(owner, name, MISSING)
                raise
            self._note(owner, name, value)
            return value

        return read

    def _noting_getattr(self, plain: Any) -> Any:
        def read(owner: Any, name: str, *default: Any) -> Any:
            if isinstance(owner, (type, types.ModuleType)) or id(owner) in self.owners:
                self._note(owner, name, MISSING)  # looked up later: the class may note the value itself
            return plain(owner, name, *default)

        return read

    def _note(self, owner: Any, name: str, value: Any) -> None:
        if threading.get_ident() == self.thread and not name.startswith("__"):
            self.log.append((owner, name, value))

    def behind_traced(self) -> Iterator[Read]:
        """What only steps behind the traced ones read, as it is now, and what they could read of the same tables.

        Raises:
            ChangedRead: it is not what the steps saw, so the loop itself changes it.
        """
        traced, end = self.ends[TRACED], max(self.ends.values())  # a hook after the last step is traced too
        seen = {(id(owner), name) for owner, name, _ in self.log[:traced]}
        done, tables = set[tuple[int, str]](), set[int]()
        for index, (owner, name, value) in enumerate(self.log[:end]):
            if (id(owner), name) in done or (index >= traced and (id(owner), name) in seen):
                continue
            done.add((id(owner), name))
            if self._was_there(owner):
                if index >= traced:
                    yield from self._own_read(owner, name, value)
                if not isinstance(owner, torch.nn.Module) or name not in _OF_MODULES:
                    yield from inside(getattr(owner, name, None), self._label(owner, name), tables)

    def _was_there(self, owner: Any) -> bool:
        is_namespace = isinstance(owner, types.ModuleType) or (isinstance(owner, type) and not is_library(owner))
        return is_namespace or id(owner) in self.owners

    def _label(self, owner: Any, name: str) -> str:
        return self.paths.get((id(owner), name)) or f"{_name_of(owner)}.{name}"

    def _own_read(self, owner: Any, name: str, seen: Any) -> Iterator[Read]:
        label = self._label(owner, name)
        if isinstance(inspect.getattr_static(type(owner), name, None), property):
            return  # what it reads was noted in its turn
        value = getattr(owner, name, MISSING)
        if seen is not MISSING and not same(value, seen):
            raise ChangedRead(f"a step that repeats others reads {label}, which the loop changes")
        yield Read(owner, name, value, label)


class ChangedRead(Exception):
    """What a copied step reads is not there before the loop, or is another thing then."""


def _name_of(owner: Any) -> str:
    return str(getattr(owner, "__qualname__", None) or getattr(owner, "__name__", None) or type(owner).__qualname__)


def inside(value: Any, label: str, seen: set[int]) -> Iterator[Read]:
    """The scalars of a table, of the tables in it, and of objects whose class notes nothing (SimpleNamespace)."""
    if id(value) in seen:
        return
    seen.add(id(value))
    pairs: Iterable[tuple[Any, Any]] = ()
    is_namespace = is_plain_namespace(value)
    if isinstance(value, (dict, types.MappingProxyType)):
        pairs = list(value.items())
    elif isinstance(value, (list, tuple, deque)):
        pairs = list(enumerate(value))
    elif is_namespace:
        pairs = list(vars(value).items())
    for key, item in pairs:
        here = f"{label}.{key}" if is_namespace else f"{label}[{key!r}]"
        if isinstance(item, (*SCALARS, torch.Tensor)) or inspect.isroutine(item):
            yield Read(value, key, item, here, is_item=not is_namespace)
        else:
            yield from inside(item, here, seen)


def is_plain_namespace(value: Any) -> bool:
    """Whether a value is an object of one of Python's own classes that holds attributes."""
    is_built_in = not type(value).__flags__ & _HEAP_TYPE and not isinstance(value, types.ModuleType)
    return is_built_in and hasattr(value, "__dict__") and not callable(value)
