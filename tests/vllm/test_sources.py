"""The texts that a proposal in one graph stands for: what is installed, and what the released wheels hold."""

from __future__ import annotations

import ast
import hashlib
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from draftfuse.vllm.sources import digest, functions, overridden
from draftfuse.vllm.versions import RELEASES, Release, release_of

WHEELS = Path(os.environ.get("DRAFTFUSE_VLLM_WHEELS", "/nonexistent"))  # <folder>/<version>/vllm/...
FOUND = [
    p.name for p in sorted(WHEELS.glob("*")) if (p / "vllm").is_dir() and getattr(release_of(p.name), "read", None)
]


class Base:
    def method(self) -> int:
        return 1

    def other(self) -> int:
        return 2


class Kernel:
    """What a decorator of Triton makes of a function."""

    def __init__(self, fn: Any) -> None:
        self.fn = fn


@Kernel
def kernel() -> int:
    return 3


def release() -> Release:
    names = ("Base.method", "kernel")
    return Release((0, 1), (0, 1), "", "", "", "", read={"read_here": names})


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    made = ModuleType("read_here")
    made.Base, made.kernel = Base, kernel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "read_here", made)
    return made


def test_texts_are_those_of_the_functions_below_their_decorators() -> None:
    texts = "    def method(self) -> int:\n        return 1\n", "@Kernel\ndef kernel() -> int:\n    return 3\n"
    assert digest(release()) == hashlib.sha256("".join(texts).encode()).hexdigest()
    assert [(name, function) for _, name, function in functions(release())] == [
        ("method", Base.method),
        ("kernel", kernel.fn),
    ]


def test_what_is_not_there_has_no_digest(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    del module.kernel
    assert digest(release()) == ""
    module.kernel = len  # type: ignore[attr-defined]
    assert digest(release()) == "", "a function without a text"
    monkeypatch.delitem(sys.modules, "read_here")
    assert digest(release()) == ""


def test_overridden_methods_are_found() -> None:
    class Same(Base):
        def other(self) -> int:
            return 4

    class Other(Same):
        def method(self) -> int:
            return 5

    assert overridden(Same, release()) == ""
    assert overridden(Other, release()) == "method"


def test_only_releases_without_a_fused_loop_are_read() -> None:
    assert [bool(r.read) for r in RELEASES] == [not r.fuses for r in RELEASES]


@pytest.mark.parametrize("version", FOUND or [pytest.param("", marks=pytest.mark.skip(reason="no unpacked wheels"))])
def test_the_released_text_is_the_one_that_was_read(version: str) -> None:
    known = release_of(version)
    assert known is not None
    texts = [text for module, names in known.read.items() for text in in_wheel(WHEELS / version, module, names)]
    assert hashlib.sha256("".join(texts).encode()).hexdigest() == known.digest


def in_wheel(root: Path, module: str, names: tuple[str, ...]) -> list[str]:
    """Texts as ``inspect.getsource`` returns them, decorators and all."""
    text = (root / (module.replace(".", "/") + ".py")).read_text()
    lines, found = text.splitlines(keepends=True), {}
    for node in ast.walk(ast.parse(text)):
        for item in getattr(node, "body", []) if isinstance(node, (ast.ClassDef, ast.Module)) else []:
            if isinstance(item, ast.FunctionDef):
                owner = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
                first = min(item.lineno, *(decorator.lineno for decorator in item.decorator_list or [item]))
                found[owner + item.name] = "".join(lines[first - 1 : item.end_lineno])
    return [found[name] for name in names]
