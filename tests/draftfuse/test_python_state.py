"""Python state: what is walked, what a diff says, what a restore puts back, and where the writing line is."""

from __future__ import annotations

import inspect
from collections import deque
from typing import Any

import pytest
import torch

from draftfuse.python_changes import diff
from draftfuse.python_state import of_speculator, small_tensors, snapshot
from tests.failures.small import Small

TRAIL: list[int] = []


class Inner:
    __slots__ = ("items", "number")

    def __init__(self) -> None:
        self.number, self.items = 1, {"a": 1}

    def bump(self) -> None:
        self.number += 1  # bump

    def remember(self, key: str) -> None:
        self.items[key] = 2  # remember


class Outer:
    shared: list[int] = []  # noqa: RUF012

    def __init__(self) -> None:
        self.inner = Inner()
        self.queue: deque[int] = deque([1])
        self.tensors = [torch.zeros(2)]
        self.loop: Any = self

    def log(self) -> None:
        TRAIL.append(1)  # log


def line_of(text: str) -> int:
    source = inspect.getsource(inspect.getmodule(line_of))  # type: ignore[arg-type]
    return next(i for i, line in enumerate(source.splitlines(), start=1) if line.endswith(f"# {text}"))


def change_of(change: Any) -> Any:
    outer = Outer()
    before = snapshot(outer, names=("outer",))
    change(outer)
    return diff(before, snapshot(outer, names=("outer",))), before, outer


@pytest.mark.parametrize(
    ("change", "path", "kind"),
    [
        (lambda o: o.inner.bump(), "outer.inner.number", "value"),
        (lambda o: o.inner.remember("b"), "outer.inner.items", "entry"),
        (lambda o: o.queue.append(2), "outer.queue", "entry"),
        (lambda o: setattr(o, "new", 3), "outer.new", "value"),
        (lambda o: o.tensors.append(torch.ones(1)), "outer.tensors", "tensor"),
        (lambda o: o.tensors.__setitem__(0, torch.ones(2)), "outer.tensors[0]", "tensor"),
        (lambda o: o.log(), "<global TRAIL>", "entry"),
        (lambda o: o.shared.append(1), "Outer.shared", "entry"),
    ],
)
def test_a_change_is_found_and_put_back(change: Any, path: str, kind: str) -> None:
    changes, before, outer = change_of(change)
    assert [(c.path, c.kind) for c in changes] == [(path, kind)]
    before.restore()
    assert diff(before, snapshot(outer, names=("outer",))) == []


def test_nothing_changed_gives_no_change() -> None:
    assert change_of(lambda o: None)[0] == []
    assert change_of(lambda o: o.tensors[0].add_(1))[0] == []  # contents are not its business


@pytest.mark.parametrize(
    ("change", "line"), [(lambda o: o.inner.bump(), "bump"), (lambda o: o.inner.remember("b"), "remember")]
)
def test_the_writing_line_is_named(change: Any, line: str) -> None:
    (found,), _, _ = change_of(change)
    assert found.source is not None
    assert found.source.line == line_of(line)


def test_paths_of_a_speculator_are_the_users() -> None:
    spec = Small()
    tensors = of_speculator(spec, wide=False).tensors
    assert tensors["spec.inputs.positions"] is spec.inputs.positions
    assert tensors["spec.attn_groups[0].block_table"] is spec.attn_groups[0].block_table
    assert "spec.attn_groups[0].builder.window" in of_speculator(spec).leaves


def test_small_tensors_leave_pools_out() -> None:
    spec = Small()
    kept = {t.data_ptr() for t in small_tensors(spec)}
    assert spec.embed.data_ptr() in kept
    assert spec.key.data_ptr() not in kept


def test_an_engines_own_objects_are_not_walked() -> None:
    engine = type("Engine", (), {"__module__": "vllm.engine"})()
    engine.queue = []
    spec = Small()
    spec.engine = engine  # type: ignore[attr-defined]
    assert not any(path.startswith("spec.engine.") for path in of_speculator(spec).leaves)
