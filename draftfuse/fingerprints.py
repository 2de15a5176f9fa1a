"""Canonical texts of Python values, equal in two processes exactly if a trace would take the values for the same.

Functions are told apart by their bytecode and classes by all that they hold, so that a method that was replaced while
a process ran is seen as well as one whose file was edited.
"""

from __future__ import annotations

import builtins
import dis
import functools
import hashlib
import inspect
import sys
import types
from abc import ABCMeta
from collections import deque
from collections.abc import Iterable, Iterator
from enum import Enum
from importlib import import_module
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from draftfuse.paths import MISSING
from draftfuse.step_log import is_watched

PLAIN = (int, float, bool, str, bytes, complex, type(None))
_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
_SEQUENCES = (list, tuple, deque)
_SETS = (set, frozenset)  # their order counts: a loop may run over them
_WRAPPERS = (staticmethod, classmethod, functools.cached_property, functools.partialmethod)
_TENSORS = (Tensor, torch.nn.Parameter, torch.nn.Buffer)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
# What a class body leaves that no loop reads, or that differs from run to run.
_IGNORED = (
    "__dict__",
    "__weakref__",
    "__doc__",
    "__annotations__",
    "__slotnames__",  # what Python notes on a class when it first copies an object
    "_abc_impl",
    "__abstractmethods__",
)
_LONGEST = 200  # characters of a text that is kept readable
_NATIVE = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
)


class NoFingerprint(Exception):
    """A value that has no canonical text; the message says what it is."""


class Fingerprints:
    """Texts of values of one moment; :attr:`codes` gathers the bytecode that stands behind them."""

    def __init__(self) -> None:
        self.codes: set[str] = set()
        self._known: dict[int, tuple[Any, str]] = {}  # by id: the object, alive so that ids stay unique, and its text

    def exact(self, value: Any) -> str:
        """The text of all of ``value``.

        Raises:
            NoFingerprint: the value is an object whose state is not canonical.
        """
        if isinstance(value, (*_SEQUENCES, *_SETS)):
            return _short(f"{name_of(type(value))} of {[*map(self.exact, value)]}")
        if isinstance(value, dict):
            return _short(f"{name_of(type(value))} of {[(self.exact(k), self.exact(v)) for k, v in value.items()]}")
        found = self._simple(value)
        if found is None:
            raise NoFingerprint(f"an object of class {name_of(type(value))}")
        return found

    def outline(self, value: Any) -> str:
        """The text of what is seen of ``value`` without looking into it: its class, its length, its keys."""
        if isinstance(value, (dict, *_SETS)):
            return _short(f"{self.outline(type(value))} with {[*map(self._key, value)]}")
        if isinstance(value, _SEQUENCES):
            return _short(f"{self.outline(type(value))} of {len(value)}")
        if (found := self._simple(value)) is not None:
            return found
        return f"object of {self._class(type(value))}{self._module(value)}{_own_names(value)}"

    def code(self, code: types.CodeType) -> str:
        """The text of bytecode, with that of functions written inside it."""
        return self._once(code, lambda: self._digest_of_code(code))

    def _simple(self, value: Any) -> str | None:
        """The text of a value that has no state of its own; None for any other."""
        if value is MISSING:
            return "nothing"
        if isinstance(value, Enum):
            return f"{name_of(type(value))}.{value.name} {value.value!r}" if type(value.value) in PLAIN else None
        if type(value) in PLAIN or isinstance(value, (*_TORCH, range, slice)) or value is Ellipsis:
            return _short(f"{type(value).__name__} {value!r}")
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, types.ModuleType):
            return f"module {value.__name__}{_own_names(value)}"
        return self._callable(value)

    def _tensor(self, value: Tensor) -> str:
        if type(value) not in _TENSORS:
            raise NoFingerprint(f"a tensor of class {name_of(type(value))}")
        place = f"{[*value.stride()]}+{value.storage_offset()}" if value.layout is torch.strided else str(value.layout)
        flags = value.requires_grad, value.is_conj(), value.is_neg()
        return f"{type(value).__name__} {value.dtype} {[*value.shape]} {place} {value.device} {flags}"

    def _callable(self, value: Any) -> str | None:
        if isinstance(value, types.FunctionType):
            return self._once(value, lambda: f"function {value.__qualname__} {_digest(self._function(value))}")
        if isinstance(value, types.MethodType):
            return f"method of {name_of(type(value.__self__))}: {self.outline(value.__func__)}"
        if isinstance(value, types.CodeType):
            return self.code(value)
        if isinstance(value, functools.partial):
            given = [self.exact(value.func), *map(self.exact, value.args), self.exact(value.keywords)]
            return f"partial {_digest(given)}"
        if isinstance(value, (torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch._ops.HigherOrderOperator)):
            return f"operator {value}"
        if isinstance(value, _NATIVE):
            owner = getattr(value, "__self__", None)
            of = owner.__name__ if isinstance(owner, (type, types.ModuleType)) else type(owner).__name__
            return f"builtin {getattr(value, '__module__', '')} {of} {value.__qualname__}"
        return None

    def _function(self, function: types.FunctionType) -> Iterator[str]:
        if getattr(function, "_dynamo_marked_constant", False):
            raise NoFingerprint(f"{function.__qualname__}, whose result Dynamo was told to take for a constant")
        yield self.code(function.__code__)
        yield f"builtins {_builtins_of(function)}"
        for name, value in [("", function.__defaults__), *sorted((function.__kwdefaults__ or {}).items())]:
            yield f"{name}={self._held(value)}"
        for cell in function.__closure__ or ():
            yield self._held(_contents(cell))
        yield self._held(getattr(function, "__wrapped__", MISSING))

    def _held(self, value: Any) -> str:
        """What a class, a closure or a default holds: functions and scalars, of anything else the class alone.

        Of what a loop reads there Dynamo has a guard of its own.
        """
        if isinstance(value, property):
            return f"property {[self._held(f) for f in (value.fget, value.fset)]}"
        if isinstance(value, _WRAPPERS):
            inner = getattr(value, "func", None) or getattr(value, "__func__", None)
            return f"{type(value).__name__} {self._held(inner)}"
        if isinstance(value, tuple):
            return f"tuple {[*map(self._held, value)]}"
        if isinstance(value, type):
            return f"class {name_of(value)}"
        if isinstance(value, (types.FunctionType, types.MethodType, types.CodeType)):
            return self._callable(value) or ""
        return f"{type(value).__name__} {value!r}" if type(value) in PLAIN else f"a {name_of(type(value))}"

    def _class(self, klass: type) -> str:
        if is_library(klass):
            others = sorted(_registered(klass)) if isinstance(klass, ABCMeta) else []
            return f"class {name_of(klass)}{f' of {others}' if others else ''}"
        return self._once(klass, lambda: f"class {name_of(klass)} {_digest(self._bases(klass))}")

    def _bases(self, klass: type) -> Iterator[str]:
        for base in klass.__mro__:
            yield name_of(base)
            if not is_library(base):
                items = sorted(vars(base).items(), key=lambda item: str(item[0]))
                yield from (f"{n}: {self._held(v)}" for n, v in items if n not in _IGNORED)
        if type(klass) is not type:
            yield self._class(type(klass))
        if isinstance(klass, ABCMeta):
            yield f"registered {sorted(_registered(klass))}"

    def _module(self, value: Any) -> str:
        """Of a module what it does beside its class: hooks are code that no guard is on."""
        if not isinstance(value, torch.nn.Module):
            return ""
        if any(getattr(value, kind, None) for kind in _HOOKS):
            raise NoFingerprint(f"a {name_of(type(value))} with forward hooks")
        return f" training={value.training}"

    def _key(self, key: Any) -> str:
        found = self._simple(key)
        if found is None:
            raise NoFingerprint(f"a key of class {name_of(type(key))}")
        return found

    def _digest_of_code(self, code: types.CodeType) -> str:
        facts = [code.co_filename, code.co_firstlineno, code.co_qualname, code.co_flags, code.co_code]
        facts += [code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_exceptiontable]
        facts += [code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars]
        constants = [self._constant(value, is_iterated(code, i)) for i, value in enumerate(code.co_consts)]
        digest = f"code {code.co_qualname} {_digest([repr(facts), *constants])}"
        self.codes.add(digest)
        return digest

    def _constant(self, value: Any, ordered: bool = True) -> str:
        if isinstance(value, types.CodeType):
            return self.code(value)
        if isinstance(value, tuple):
            return f"tuple {[*map(self._constant, value)]}"
        if isinstance(value, frozenset):
            items = [*map(self._constant, value)]
            return f"set {items if ordered else sorted(items)}"
        return f"{type(value).__name__} {value!r}"

    def _once(self, value: Any, make: Any) -> str:
        if id(value) not in self._known:
            self._known[id(value)] = value, "itself"  # a function that closes over itself
            self._known[id(value)] = value, make()
        return self._known[id(value)][1]


def name_of(klass: type) -> str:
    """Module and name of a class."""
    return f"{klass.__module__}.{klass.__qualname__}"


def is_library(klass: type) -> bool:
    """Whether a class is Python's or torch's: of those the version says all."""
    return is_of_library(klass.__module__ or "")


def is_of_library(module: str) -> bool:
    """The same of the name of a module."""
    root = module.split(".")[0]
    return root == "torch" or (root in sys.stdlib_module_names and root != "__main__")


def is_shared(value: Any) -> bool:
    """Whether it matters that two names stand for one and the same ``value``: not for constants and code."""
    return not (
        isinstance(value, (*PLAIN, *_TORCH, Enum, tuple, frozenset, type, types.ModuleType, *_NATIVE))
        or value is MISSING
        or inspect.isroutine(value)
    )


def is_iterated(code: types.CodeType, index: int) -> bool:
    """Whether a constant of ``code`` is used for more than ``x in constant``: the order of a set may matter then."""
    if not isinstance(code.co_consts[index], frozenset):
        return False
    steps = [i for i in dis.get_instructions(code) if i.opname not in ("CACHE", "EXTENDED_ARG")]
    return any(a.opname == "LOAD_CONST" and a.arg == index and b.opname != "CONTAINS_OP" for a, b in pairwise(steps))


def _own_names(value: Any) -> str:
    """Which attributes an object, or a module of the user's, has: no guard says that one was looked for in vain."""
    if isinstance(value, types.ModuleType) and is_of_library(value.__name__):
        return ""
    names = [n for n in getattr(value, "__dict__", ()) if not str(n).startswith("__")]
    return f" with {_digest(sorted(map(str, names)))[:16]}" if names else ""


def _builtins_of(function: types.FunctionType) -> list[str]:
    """Names in a function that its module leaves to ``builtins``."""
    names, codes = set[str](), [function.__code__]
    for code in codes:
        names.update(code.co_names)
        codes += [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return sorted(n for n in names if hasattr(builtins, n) and n not in function.__globals__)


def _registered(klass: ABCMeta) -> Iterator[str]:
    """Classes of the user's that were registered with an abstract class, or with one below it."""
    abc: Any = import_module("_abc")  # the registry that ABCMeta itself prints
    found = (reference() for reference in abc._get_dump(klass)[0])
    yield from (name_of(c) for c in found if c is not None and not is_library(c))
    for below in _below(klass):
        if isinstance(below, ABCMeta):
            yield from _registered(below)


def _below(klass: Any) -> list[Any]:
    """Direct subclasses."""
    return type.__subclasses__(klass)


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return MISSING


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:40]}... {_digest([text])}"


def patched() -> list[str]:
    """Methods of PyTorch's tensors and modules that are code of somebody else's: no guard is on those of a library."""
    found, waiting = list[str](), [torch.Tensor, torch.nn.Module]
    known = set[type](waiting)
    while waiting:
        klass = waiting.pop()
        if is_library(klass) and "<locals>" not in klass.__qualname__:  # fx makes a class for each graph
            own = [(n, f) for n, f in vars(klass).items() if isinstance(f, types.FunctionType) and _is_foreign(f)]
            found += [f"{name_of(klass)}.{n} {Fingerprints().outline(f)}" for n, f in own]
            below = {k for k in _below(klass) if k not in known}
            known |= below
            waiting += below
    return sorted(found)


def _is_foreign(value: Any) -> bool:
    while isinstance(getattr(value, "__wrapped__", None), types.FunctionType):
        value = value.__wrapped__
    return isinstance(value, types.FunctionType) and is_watched(value.__code__.co_filename)
