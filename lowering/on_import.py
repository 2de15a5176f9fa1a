"""Run a callback when a module is imported for the first time, so that nothing heavy is imported only to be patched."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

Callback = Callable[[ModuleType], None]
_WAITING: dict[str, list[Callback]] = {}


def on_import(name: str, callback: Callback) -> None:
    """Call ``callback(module)`` now if module ``name`` is imported, else right after it is; the same one only once."""
    if name in sys.modules and name not in _WAITING:
        callback(sys.modules[name])
        return
    waiting = _WAITING.setdefault(name, [])
    if callback not in waiting:
        waiting.append(callback)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing by itself: wraps the loader that the other finders give for a module that somebody waits for."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _WAITING:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = None if finder is self or find is None else find(fullname, path, target)
            if spec is not None:
                spec.loader = _Loader(spec.loader)
                return spec  # type: ignore[no-any-return]
        return None


class _Loader(importlib.abc.Loader):
    """The loader of the module, followed by the callbacks."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.inner.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        self.inner.exec_module(module)
        for callback in _WAITING.pop(module.__name__, []):
            callback(module)
