"""What the user's bytecode catches, and what it reads where it does: a loop goes on after what it asked for in vain."""

from __future__ import annotations

import builtins
import dis
import inspect
import types
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch

_LOADS = ("LOAD_ATTR", "LOAD_METHOD")
_BOUND = (types.MethodType, staticmethod, classmethod)
_NAMES = (*_LOADS, "LOAD_GLOBAL", "LOAD_NAME", "LOAD_FAST", "LOAD_DEREF", "LOAD_CLOSURE")


@lru_cache(4096)
def _steps(code: types.CodeType) -> tuple[dis.Instruction, ...]:
    return tuple(dis.get_instructions(code))


@lru_cache(4096)
def catches(code: types.CodeType, kind: type[BaseException]) -> bool:
    """Whether ``code`` may go on after an exception of ``kind``: a name that is no builtin may stand for any."""
    if "suppress" in code.co_names:
        return True
    steps = _steps(code)
    for index, step in enumerate(steps):
        if step.opname == "PUSH_EXC_INFO" and steps[index + 1].opname == "POP_TOP":
            return True
        if step.opname == "CHECK_EXC_MATCH" and any(_may_be(name, kind) for name in _named_before(steps, index)):
            return True
    return False


def _named_before(steps: tuple[dis.Instruction, ...], index: int) -> list[str]:
    """Names of the classes that a handler is for."""
    found = list[str]()
    for step in reversed(steps[:index]):
        if step.opname in _NAMES:
            found.append(str(step.argval))
        elif step.opname not in ("BUILD_TUPLE", "CACHE", "EXTENDED_ARG"):
            break
    return found


def _may_be(name: str, kind: type[BaseException]) -> bool:
    known: Any = getattr(builtins, name, None)
    return not isinstance(known, type) or issubclass(kind, known)


def protected(codes: Iterable[types.CodeType], owners: Iterable[Any]) -> set[str]:
    """Names of attributes that are read where an ``AttributeError`` is caught, there or in a function called there.

    Dynamo does not say which functions an exception left, so they are looked up by name, in the objects that the trace
    looked at (``owners``).
    """
    codes, owners = list(codes), list(owners)
    pool = [*codes, *(code for owner in owners for code in _codes_of(owner))]
    reads, todo, seen = set[str](), list[tuple[str, types.CodeType]](), set[tuple[str, types.CodeType]]()
    for code in codes:
        if catches(code, AttributeError):
            inside = _inside(code)
            reads |= _loaded(inside, _LOADS)
            todo += [(name, code) for name in _loaded(inside, _NAMES)]
            todo += [(c.co_name, c) for c in codes if _is_called_by_python(c.co_name)]
    while todo:
        if (called := todo.pop()) in seen:
            continue
        seen.add(called)
        for code in _called_as(*called, pool, owners):
            reads |= _loaded(_steps(code), _LOADS)
            todo += [(name, code) for name in _loaded(_steps(code), _NAMES)]
    return reads


def _inside(code: types.CodeType) -> list[dis.Instruction]:
    """What stands where an exception is caught."""
    table: Any = dis.Bytecode(code)
    ranges = [(e.start, e.end) for e in table.exception_entries]
    return [s for s in _steps(code) if any(start <= s.offset < end for start, end in ranges)]


def _called_as(
    name: str, caller: types.CodeType, pool: Iterable[types.CodeType], owners: Iterable[Any]
) -> list[types.CodeType]:
    """The user's code that may run where ``caller`` calls ``name``."""
    local = [c for c in caller.co_consts if isinstance(c, types.CodeType)]
    named = [inspect.getattr_static(owner, name, None) for owner in owners]
    found = [*(c for c in (*local, *pool) if c.co_name == name), *(c for value in named for c in _codes_of(value))]
    return of_users(found)


def _codes_of(value: Any) -> list[types.CodeType]:
    """The code that runs when ``value`` is called, or read where it is a property."""
    if isinstance(value, property):
        value = value.fget
    elif isinstance(value, _BOUND):
        value = value.__func__
    elif isinstance(value, torch.nn.Module):
        value = inspect.getattr_static(type(value), "forward", None)
    elif not isinstance(value, (type, types.FunctionType)):
        value = inspect.getattr_static(type(value), "__call__", None)
    return [value.__code__] if isinstance(value, types.FunctionType) else []


def of_users(codes: Iterable[types.CodeType]) -> list[types.CodeType]:
    """Code that may be the user's."""
    from draftfuse.step_log import is_watched

    return [c for c in dict.fromkeys(codes) if is_watched(c.co_filename)]


def _loaded(steps: Iterable[dis.Instruction], operations: tuple[str, ...]) -> set[str]:
    return {str(step.argval) for step in steps if step.opname in operations}


def _is_called_by_python(name: str) -> bool:
    return name == "<lambda>" or (name.startswith("__") and name.endswith("__"))
