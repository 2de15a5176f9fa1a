"""What the user's bytecode catches, and what it reads where it does: a loop goes on after what it asked for in vain."""

from __future__ import annotations

import builtins
import dis
import types
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

_LOADS = ("LOAD_ATTR", "LOAD_METHOD")
_NAMES = (*_LOADS, "LOAD_GLOBAL", "LOAD_NAME", "LOAD_FAST", "LOAD_DEREF", "LOAD_CLOSURE")
_CALLED_BY_PYTHON = ("forward", "<lambda>")


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


def protected(codes: Iterable[types.CodeType]) -> set[str]:
    """Names of attributes that are read where an ``AttributeError`` is caught, there or in a function called there."""
    codes = list(codes)
    reads, called, seen = set[str](), set[str](), set[types.CodeType]()
    for code in codes:
        if catches(code, AttributeError):
            table: Any = dis.Bytecode(code)
            ranges = [(e.start, e.end) for e in table.exception_entries]
            inside = [s for s in _steps(code) if any(start <= s.offset < end for start, end in ranges)]
            reads |= _loaded(inside, _LOADS)
            called |= _loaded(inside, _NAMES)
    while more := [c for c in codes if c not in seen and called and _is_called(c.co_name, called)]:
        for code in more:
            seen.add(code)
            reads |= _loaded(_steps(code), _LOADS)
            called |= _loaded(_steps(code), _NAMES)
    return reads


def _loaded(steps: Iterable[dis.Instruction], operations: tuple[str, ...]) -> set[str]:
    return {str(step.argval) for step in steps if step.opname in operations}


def _is_called(name: str, called: set[str]) -> bool:
    """Whether code of that name may run below: by its name, or by one that Python does not write."""
    return name in called or name in _CALLED_BY_PYTHON or (name.startswith("__") and name.endswith("__"))
