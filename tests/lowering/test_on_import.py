"""Callbacks on the first import of a module."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from draftfuse.lowering.on_import import _Finder, on_import


@pytest.fixture
def module_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"draftfuse_test_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def test_runs_after_the_import_and_once(module_name: str) -> None:
    seen: list[int] = []

    def callback(module: object) -> None:
        seen.append(vars(module)["value"])

    on_import(module_name, callback)
    on_import(module_name, callback)
    assert seen == []
    importlib.import_module(module_name)
    importlib.import_module(module_name)
    assert seen == [1]


def test_runs_at_once_for_a_module_that_is_there(module_name: str) -> None:
    importlib.import_module(module_name)
    seen: list[str] = []
    on_import(module_name, lambda module: seen.append(module.__name__))
    assert seen == [module_name]


def test_one_finder_is_enough_and_others_are_not_disturbed(module_name: str) -> None:
    on_import(module_name, lambda module: None)
    assert sum(isinstance(finder, _Finder) for finder in sys.meta_path) == 1
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("draftfuse_no_such_module")
