"""Attributes that a loop looked for in vain where Dynamo leaves no guard: they may come while a process runs.

That is so for ``try: self.scale`` with an ``except AttributeError``, and for ``getattr`` and ``hasattr`` of a module.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterable, Mapping
from typing import Any

from draftfuse.handlers import catches, of_users, protected
from draftfuse.paths import MISSING, value_at
from draftfuse.writers import LIBRARIES, is_library

_ASKING = {"getattr", "hasattr"}


def looked_for(
    codes: Iterable[types.CodeType], paths: Iterable[str], roots: Mapping[str, Any], module_globals: dict[str, Any]
) -> dict[str, bool]:
    """``'scale' in L['spec'].__dict__`` with False, for each name that the code tries and an object does not have."""
    codes = of_users(codes)
    asks = any(_ASKING & {*code.co_names} for code in codes)
    catching = any(catches(code, AttributeError) for code in codes)
    owners = {path: value_at(path, roots, module_globals) for path in dict.fromkeys(paths)} if catching or asks else {}
    tried = protected(codes, filter(_has_functions, owners.values())) if catching else set()
    named = {c for code in codes for c in code.co_consts if isinstance(c, str) and c.isidentifier()} if asks else set()
    found = dict[str, bool]()
    for path, owner in owners.items():
        if isinstance(owner, types.ModuleType):
            names = tried | named if _is_users_module(owner) else set()
        else:
            names = tried if _is_of_users(owner) else set()
        gone = (n for n in names if inspect.getattr_static(owner, n, MISSING) is MISSING)
        found |= {f"{name!r} in {path}.__dict__": False for name in sorted(gone)}
    return found


def _is_users_module(owner: Any) -> bool:
    return isinstance(owner, types.ModuleType) and owner.__name__.split(".")[0] not in LIBRARIES


def _has_functions(owner: Any) -> bool:
    """Whether ``owner`` is, or has, what the user's code may call."""
    return isinstance(owner, types.FunctionType) or _is_users_module(owner) or _is_of_users(owner)


def _is_of_users(owner: Any) -> bool:
    is_object = hasattr(owner, "__dict__") and not isinstance(owner, type) and not inspect.isroutine(owner)
    return is_object and not is_library(type(owner))
