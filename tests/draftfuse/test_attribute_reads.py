"""Attributes and keys that only a copied step reads, whatever way Python finds them: a later change shows."""

from __future__ import annotations

import operator
import sys
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import draftfuse
from draftfuse.errors import StaleAddressError
from draftfuse.unroll import TRACED_STEPS
from tests.failures.small import Small, batch_of, both, runner_of

K = 5
IN_FULL = ("property",)  # other bytecode
EARLY = LATE = 1.0


class Config:
    early = late = 1.0


class Slotted:
    __slots__ = ("early", "late")

    def __init__(self) -> None:
        self.early = self.late = 1.0


class Inner:
    def __init__(self) -> None:
        self.scale, self.c = 1.0, SimpleNamespace(scale=1.0)
        self.table = [1.0, 1.0]


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.early = self.late = 1.0


def one() -> float:
    return 1.0


def table_in_closure() -> tuple[Callable[[str], float], dict[str, float]]:
    table = {"early": 1.0, "late": 1.0}
    return lambda name: table[name], table


class Chosen(Small):
    in_class_early = in_class_late = 1.0

    def __init__(self, read: Callable[[Any, str], Any]) -> None:
        super().__init__(k=K)
        self.read = read
        self.early = self.late = 1.0
        self.slotted, self.layer, self.names = Slotted(), Layer(), SimpleNamespace(early=1.0, late=1.0)
        self.early_inner, self.late_inner = Inner(), Inner()
        self.early_table, self.late_table = [1.0, 1.0], [1.0, 1.0]
        self.early_call = self.late_call = one
        self.early_tensor = self.late_tensor = torch.ones(1)
        self.options: dict[str, float] = {}
        self.flags: set[str] = set()
        self.queue = deque([1.0] * K)
        self.read_closure, self.closed = table_in_closure()

    @property
    def early_property(self) -> float:
        return self.early

    @property
    def late_property(self) -> float:
        return self.early + self.late - 1.0

    def sample(self, hidden: Tensor, step: int) -> Tensor:
        return super().sample(hidden * self.read(self, ("early", "late")[step >= 4]), step)


def set_global(value: float) -> None:
    global LATE
    LATE = value


Case = tuple[Callable[[Any, str], Any], Callable[[Any], object]]
CASES: dict[str, Case] = {
    "attribute": (getattr, lambda s: setattr(s, "late", -1.0)),
    "class attribute": (lambda s, n: getattr(s, f"in_class_{n}"), lambda s: setattr(Chosen, "in_class_late", -1.0)),
    "shadowed class attribute": (lambda s, n: getattr(s, f"in_class_{n}"), lambda s: setattr(s, "in_class_late", -1.0)),
    "slots": (lambda s, n: getattr(s.slotted, n), lambda s: setattr(s.slotted, "late", -1.0)),
    "module": (lambda s, n: getattr(s.layer, n), lambda s: setattr(s.layer, "late", -1.0)),
    "namespace": (lambda s, n: getattr(s.names, n), lambda s: setattr(s.names, "late", -1.0)),
    "class": (lambda s, n: getattr(Config, n), lambda s: setattr(Config, "late", -1.0)),
    "attrgetter": (lambda s, n: operator.attrgetter(n)(s), lambda s: setattr(s, "late", -1.0)),
    "attribute dictionary": (lambda s, n: s.__dict__[n], lambda s: setattr(s, "late", -1.0)),
    "attribute of an object": (
        lambda s, n: getattr(s, f"{n}_inner").scale,
        lambda s: setattr(s.late_inner, "scale", -1.0),
    ),
    "object": (lambda s, n: getattr(s, f"{n}_inner").scale, lambda s: setattr(s, "late_inner", negative())),
    "object deeper": (
        lambda s, n: {"early": s.early_inner.c, "late": s.late_inner.c}[n].scale,
        lambda s: setattr(s.late_inner.c, "scale", -1.0),
    ),
    "table": (lambda s, n: getattr(s, f"{n}_table")[0], lambda s: s.late_table.__setitem__(0, -1.0)),
    "table in a display": (
        lambda s, n: {"early": s.early_table, "late": s.late_table}[n][1],
        lambda s: s.late_table.__setitem__(1, -1.0),
    ),
    "table of an object": (
        lambda s, n: getattr(s, f"{n}_inner").table[1],
        lambda s: s.late_inner.table.__setitem__(1, -1.0),
    ),
    "function": (lambda s, n: getattr(s, f"{n}_call")(), lambda s: setattr(s, "late_call", lambda: -1.0)),
    "absent": (lambda s, n: getattr(s, f"{n}_absent", 1.0), lambda s: setattr(s, "late_absent", -1.0)),
    "key": (lambda s, n: s.options.get(n, 1.0), lambda s: s.options.update(late=-1.0)),
    "flag": (lambda s, n: -1.0 if n in s.flags else 1.0, lambda s: s.flags.add("late")),
    "queue": (lambda s, n: s.queue[{"early": 1, "late": 4}[n]], lambda s: s.queue.__setitem__(4, -1.0)),
    "longer list": (
        lambda s, n: s.early_table[{"early": 0, "late": -1}[n]],
        lambda s: s.early_table.append(-1.0),
    ),
    "closure": (lambda s, n: s.read_closure(n), lambda s: s.closed.update(late=-1.0)),
    "property": (lambda s, n: getattr(s, f"{n}_property"), lambda s: setattr(s, "late", -1.0)),
    "global of a module": (lambda s, n: getattr(sys.modules[__name__], n.upper()), lambda s: set_global(-1.0)),
}


def negative() -> Inner:
    made = Inner()
    made.scale = -1.0
    return made


def batch(spec: Any) -> Any:
    return batch_of(spec, [5, 12, 3], [0, 1, 0])


@pytest.fixture(autouse=True)
def put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, attribute in ((Chosen, "in_class_late"), (Config, "late")):
        monkeypatch.setattr(owner, attribute, 1.0)
    set_global(1.0)


@pytest.mark.parametrize("name", CASES)
def test_what_only_a_copied_step_reads_is_guarded(name: str) -> None:
    read, change = CASES[name]
    fused = draftfuse.compile(Chosen(read), compiler="none", request_capacities=[4])
    fused.decode(3)
    runner = runner_of(fused)
    assert runner.scalars.broken() == []
    assert fused.report.builds[0].copied_steps == (0 if name in IN_FULL else K - TRACED_STEPS)
    change(fused.spec)
    assert runner.scalars.broken()


@pytest.mark.parametrize("name", ["attribute", "object", "class"])
def test_after_a_change_the_draft_is_that_of_eager(name: str) -> None:
    pair = both(lambda: Chosen(CASES[name][0]), batch)
    for spec in (pair.fused.spec, pair.eager.spec):
        CASES[name][1](spec)
    pair.draft(batch)
    assert "a guard does not hold (" in pair.fused.report.fallbacks[-1].reason
    assert "late" in pair.fused.report.fallbacks[-1].reason


def test_a_tensor_that_only_a_copied_step_reads_is_watched() -> None:
    fused = draftfuse.compile(Chosen(lambda s, n: getattr(s, f"{n}_tensor")), compiler="none")
    fused.decode(3)
    fused.spec.late_tensor = -torch.ones(1)
    with pytest.raises(StaleAddressError, match="late_tensor"):
        fused.decode(3)


def test_what_no_step_reads_is_not_guarded() -> None:
    fused = draftfuse.compile(Chosen(getattr), compiler="none", request_capacities=[4])
    for calls in range(3):
        fused.spec.calls, fused.spec.early_absent = calls, 2.0 * calls
        fused.decode(3)
    assert fused.report.builds[0].copied_steps
    assert "broken guards" not in fused.report.counters


def test_classes_are_as_before_a_logged_run() -> None:
    fused = draftfuse.compile(Chosen(getattr), compiler="none")
    fused.decode(3)
    assert all("__getattribute__" not in vars(k) for k in (Chosen, Slotted, Layer, Inner))
    assert isinstance(getattr, type(len))
