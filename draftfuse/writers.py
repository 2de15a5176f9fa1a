"""Which statement of a user's code changes an attribute: read from the source, for messages that point at it."""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from collections.abc import Callable, Iterator
from typing import Any

from draftfuse.errors import SourceLine

LIBRARIES = ("builtins", "torch", "typing", "abc", "collections", "dataclasses", "contextvars", "draftfuse")
_CHANGERS = (
    "append",
    "extend",
    "insert",
    "add",
    "update",
    "setdefault",
    "pop",
    "clear",
    "remove",
    "popitem",
    "appendleft",
)


def writer_of(owner: Any, attribute: str) -> SourceLine | None:
    """The statement outside ``__init__`` that assigns or changes ``attribute`` of ``owner``."""
    functions = sorted(_functions(owner), key=lambda f: f.__name__.startswith("on_"))  # lifecycle hooks put it back
    return next((line for f in functions if (line := _writer_in(f, attribute)) is not None), None)


def _functions(owner: Any) -> Iterator[Callable[..., Any]]:
    if isinstance(owner, types.FunctionType):
        yield owner
        yield from (f for _, f in globals_of(owner) if isinstance(f, types.FunctionType))
        return
    klass = owner if isinstance(owner, type) else type(owner)
    for base in klass.__mro__:
        if not is_library(base):
            yield from (f for n, f in vars(base).items() if isinstance(f, types.FunctionType) and n != "__init__")


def _writer_in(function: Callable[..., Any], attribute: str) -> SourceLine | None:
    try:
        lines, start = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines)))
        file = inspect.getsourcefile(function) or "?"
    except (OSError, TypeError, SyntaxError):
        return None
    for node in ast.walk(tree):
        if _writes(node, attribute):
            return SourceLine.of(file, start + node.lineno - 1)  # type: ignore[attr-defined]
    return None


def _writes(node: ast.AST, name: str) -> bool:
    if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Delete)):
        targets = node.targets if isinstance(node, (ast.Assign, ast.Delete)) else [node.target]
        return any(_names(part, name) for target in targets for part in ast.walk(target))
    called = node.func if isinstance(node, ast.Call) else None
    return isinstance(called, ast.Attribute) and called.attr in _CHANGERS and _names(called.value, name)


def _names(node: ast.AST, name: str) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr == name) or (isinstance(node, ast.Name) and node.id == name)


def globals_of(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Module globals that ``function`` (or a function written inside it) names."""
    pending = [function.__code__]
    while pending:
        code = pending.pop()
        pending += [c for c in code.co_consts if isinstance(c, types.CodeType)]
        for name in code.co_names:
            if name in function.__globals__:
                yield name, function.__globals__[name]


def is_library(klass: type) -> bool:
    """Whether a class belongs to Python or torch rather than to a user."""
    module = klass.__module__ or ""
    return module.split(".")[0] in LIBRARIES
