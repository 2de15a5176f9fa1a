"""Paths that Dynamo writes, and what stands there: ``L['spec'].window``, ``G['__import_my_dot_module'].TABLE[0]``."""

from __future__ import annotations

import ast
import inspect
import math
import re
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import CodeType, SimpleNamespace
from typing import Any, NamedTuple

import torch


class _Missing:
    """What stands where nothing does."""

    def __repr__(self) -> str:
        return "nothing"


MISSING = _Missing()
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
# Beside what Dynamo calls, the names that stand in the texts of keys: torch.float32, device(type='cpu'), inf.
_NAMES: dict[str, Any] = {
    **{called.__name__: called for called in (type, dict, len, tuple, list)},
    "torch": SimpleNamespace(**_DTYPES),
    "device": torch.device,
    "inf": math.inf,
}
_KEY = re.compile(r"list\(dict\.keys\(.+?\)\)\[(\d+)\]")  # a key that has no text
_CACHED = 1 << 14  # paths


class Computed(str):
    """A key that is no literal, as the expression that Dynamo writes for it: ``torch.float32``."""


class Asked(NamedTuple):
    """A question that is no path: ``len(path)``, ``tuple(path)``, ``key in path``, ``path is key``."""

    kind: str  # len, tuple, in or is
    container: str
    key: str = ""


def arguments_of(function: Callable[..., Any], args: tuple[Any, ...]) -> dict[str, Any]:
    """What Dynamo calls ``L`` in ``function(*args)``: its arguments by name, defaults too."""
    given = inspect.signature(function).bind(*args)
    given.apply_defaults()
    return dict(given.arguments)


def imported(key: str) -> Any:
    """The module that Dynamo calls ``__import_package_dot_module``."""
    return sys.modules[key.removeprefix("__import_").replace("_dot_", ".")]


class _Modules(dict[str, Any]):
    """Modules by the names that Dynamo gives them: ``G['__import_package_dot_module']``."""

    def __missing__(self, key: str) -> Any:
        return imported(key)


MODULES = _Modules()


@lru_cache(_CACHED)
def _compiled(path: str) -> CodeType:
    return compile(path, "<path>", "eval")


def value_at(path: str, roots: Mapping[str, Any], module_globals: dict[str, Any]) -> Any:
    """What stands at Dynamo's ``path`` now; :data:`MISSING` where nothing does."""
    try:
        return eval(_compiled(path), {"__builtins__": _NAMES}, {"L": roots, "G": module_globals})  # Dynamo's own path
    except (AttributeError, LookupError, NameError, TypeError, SyntaxError):
        return MISSING


def of_modules(path: str) -> str:
    """A path with modules by their own names."""
    return re.sub(r"G\['__import_(\w+)'\]", lambda found: found[1].replace("_dot_", "."), path)


def plain(path: str) -> str:
    """A path as a user would write it: ``L['spec'].builder.window`` -> ``spec.builder.window``."""
    if (question := asked_of(path)) is not None:
        inner, key = plain(question.container), question.key
        shown = {"tuple": f"keys of {inner}", "len": f"len({inner})", "in": f"{key} in {inner}"}
        return shown[question.kind] if question.kind in shown else f"{inner} is {plain(key)}"
    path = _KEY.sub(r"<key \1>", of_modules(path))
    for prefix in ("L['", "G['"):
        if path.startswith(prefix):
            return path[3:].replace("']", "", 1)
    return path


@lru_cache(_CACHED)
def _parsed(path: str) -> ast.expr | None:
    try:
        return ast.parse(path, mode="eval").body
    except SyntaxError:
        return None


def _source(path: str, node: ast.expr) -> str:
    return ast.get_source_segment(path, node) or ""


@lru_cache(_CACHED)
def asked_of(path: str) -> Asked | None:
    """The parts of a question; None for a path."""
    node = _parsed(path)
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In):
        return Asked("in", _source(path, node.comparators[0]), _source(path, node.left))
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Is):
        return Asked("is", _source(path, node.left), _source(path, node.comparators[0]))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("len", "tuple"):
        return Asked(node.func.id, _source(path, node.args[0]))
    return None


@lru_cache(_CACHED)
def split_path(path: str) -> tuple[str, Any]:
    """``L['spec'].inputs.seq_lens`` -> (``L['spec'].inputs``, ``seq_lens``); ``x[0]`` -> (``x``, 0)."""
    node = _parsed(path)
    if isinstance(node, ast.Attribute):
        return _source(path, node.value), node.attr
    if not isinstance(node, ast.Subscript):
        return "", path
    try:
        key = ast.literal_eval(node.slice)
    except (ValueError, TypeError):
        key = Computed(_source(path, node.slice))
    return _source(path, node.value), key


def text_of_key(key: Any) -> str | None:
    """How a key stands in a path; None where it has no text that reads as itself again."""
    if isinstance(key, tuple):
        texts = [text_of_key(item) for item in key]
        return None if type(key) is not tuple or None in texts else repr(key)
    has_text = type(key) in (str, int, bool, bytes, float, type(None), torch.dtype, torch.device)
    return repr(key) if has_text and key == key else None  # NaN is not


def owner_of(path: str) -> str:
    """The path of the object that a path reads from: ``len(x.scales)`` and ``'a' in x.__dict__`` ask of ``x``'s."""
    question = asked_of(path)
    return (split_path(path)[0] if question is None else question.container).removesuffix(".__dict__")
