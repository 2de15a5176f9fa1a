"""Attributes that a loop looked for in vain where Dynamo leaves no guard: they may come while a process runs.

That is so for ``try: self.scale`` with an ``except AttributeError``, and for ``getattr`` and ``hasattr`` of a module.
"""

from __future__ import annotations

import dis
import inspect
import types
from collections.abc import Iterable, Mapping
from typing import Any

from draftfuse.paths import MISSING, value_at
from draftfuse.writers import LIBRARIES, is_library

_CAUGHT = {"AttributeError", "Exception", "BaseException"}
_ASKING = {"getattr", "hasattr"}
_LOADS = ("LOAD_ATTR", "LOAD_METHOD")


def looked_for(
    codes: Iterable[types.CodeType], paths: Iterable[str], roots: Mapping[str, Any], module_globals: dict[str, Any]
) -> dict[str, bool]:
    """``'scale' in L['spec'].__dict__`` with False, for each name that the code tries and an object does not have."""
    codes = [c for c in dict.fromkeys(codes) if not _is_own(c)]
    tried = {name for code in codes if _CAUGHT & {*code.co_names} for name in _protected(code)}
    asks = any(_ASKING & {*code.co_names} for code in codes)
    named = {c for code in codes for c in code.co_consts if isinstance(c, str) and c.isidentifier()} if asks else set()
    found = dict[str, bool]()
    for path in dict.fromkeys(paths) if tried or named else ():
        owner = value_at(path, roots, module_globals)
        if isinstance(owner, types.ModuleType):
            names = set() if owner.__name__.split(".")[0] in LIBRARIES else tried | named
        else:
            names = tried if _is_of_users(owner) else set()
        gone = (n for n in names if inspect.getattr_static(owner, n, MISSING) is MISSING)
        found |= {f"{name!r} in {path}.__dict__": False for name in sorted(gone)}
    return found


def _is_own(code: types.CodeType) -> bool:
    from draftfuse.step_log import is_watched

    return not is_watched(code.co_filename)


def _is_of_users(owner: Any) -> bool:
    is_object = hasattr(owner, "__dict__") and not isinstance(owner, type) and not inspect.isroutine(owner)
    return is_object and not is_library(type(owner))


def _protected(code: types.CodeType) -> set[str]:
    """Names of attributes that are read where an exception is caught."""
    steps = list(dis.get_instructions(code))
    table: Any = dis.Bytecode(code)
    ranges = [(e.start, e.end) for e in table.exception_entries]
    return {
        str(i.argval) for i in steps if i.opname in _LOADS and any(start <= i.offset < end for start, end in ranges)
    }
