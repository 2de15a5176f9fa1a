"""Paths that Dynamo writes, and what stands there: ``L['spec'].window``, ``G['__import_my_dot_module'].TABLE[0]``."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

ASKED = re.compile(r"len\((?P<measured>.+)\)|tuple\((?P<listed>.+)\)|(?P<key>'[^']*'|\d+) in (?P<container>.+)")


class _Missing:
    """What stands where nothing does."""

    def __repr__(self) -> str:
        return "nothing"


MISSING = _Missing()
_BUILTINS = {"type": type, "dict": dict, "len": len, "tuple": tuple}


def imported(key: str) -> Any:
    """The module that Dynamo calls ``__import_package_dot_module``."""
    return sys.modules[key.removeprefix("__import_").replace("_dot_", ".")]


class _Modules(dict[str, Any]):
    """Modules by the names that Dynamo gives them: ``G['__import_package_dot_module']``."""

    def __missing__(self, key: str) -> Any:
        return imported(key)


MODULES = _Modules()


def value_at(path: str, roots: Mapping[str, Any], module_globals: dict[str, Any]) -> Any:
    """What stands at Dynamo's ``path`` now; :data:`MISSING` where nothing does."""
    try:
        return eval(path, {"__builtins__": _BUILTINS}, {"L": roots, "G": module_globals})  # Dynamo's own path
    except (AttributeError, KeyError, IndexError, NameError, TypeError, SyntaxError):
        return MISSING


def of_modules(path: str) -> str:
    """A path with modules by their own names."""
    return re.sub(r"G\['__import_(\w+)'\]", lambda found: found[1].replace("_dot_", "."), path)


def plain(path: str) -> str:
    """A path as a user would write it: ``L['spec'].builder.window`` -> ``spec.builder.window``."""
    path = of_modules(path)
    if (parts := ASKED.fullmatch(path)) is not None:
        inner = plain(parts["measured"] or parts["listed"] or parts["container"])
        if parts["listed"]:
            return f"keys of {inner}"
        return f"len({inner})" if parts["measured"] else f"{parts['key']} in {inner}"
    for prefix in ("L['", "G['"):
        if path.startswith(prefix):
            return path[3:].replace("']", "", 1)
    return path


def split_path(path: str) -> tuple[str, Any]:
    """``L['spec'].inputs.seq_lens`` -> (``L['spec'].inputs``, ``seq_lens``); ``x[0]`` -> (``x``, 0)."""
    if path.endswith("]"):
        start = path.rindex("[")
        text = path[start + 1 : -1]
        return path[:start], text.strip("'\"") if not text.lstrip("-").isdigit() else int(text)
    owner, _, name = path.rpartition(".")
    return owner, name


def owner_of(path: str) -> str:
    """The path of the object that a path reads from: ``len(x.scales)`` and ``'a' in x.__dict__`` ask of ``x``'s."""
    if (parts := ASKED.fullmatch(path)) is not None:
        return (parts["measured"] or parts["listed"] or parts["container"]).removesuffix(".__dict__")
    return split_path(path)[0].removesuffix(".__dict__")
