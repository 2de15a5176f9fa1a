"""Python state that changes between two calls, wherever it stands: the next draft is that of eager, with the reason."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import draftfuse
from draftfuse import CommonMetadata, DraftInputs
from draftfuse.errors import UnsafeLoopError
from draftfuse.lint import lint
from tests.failures.small import Pair, Small, WindowBuilder, WindowMetadata, batch_of

FACTOR = 1.0


class Factor(Small):
    """Scales its input by what ``factor`` finds."""

    def __init__(self, builder: Any = None) -> None:
        super().__init__(k=2, builder=builder)
        self.options: dict[str, float] = {}
        self.flags: set[str] = set()
        self.factors = [1.5]
        self.module = Scale()
        self.closed, self.close_over = closure()

    def enter(self, inputs: DraftInputs) -> Tensor:
        return super().enter(inputs) * self.factor()

    def factor(self) -> Any:
        return 1.0


class Scale(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    def forward(self, x: float) -> float:
        return x * self.factor


def closure() -> tuple[Callable[[], float], Callable[[float], None]]:
    factor = 1.0

    def read() -> float:
        return factor

    def write(value: float) -> None:
        nonlocal factor
        factor = value

    return read, write


class OfClass(Factor):
    scale = 1.0

    def factor(self) -> Any:
        return self.scale


class Global(Factor):
    def factor(self) -> Any:
        return FACTOR


class Key(Factor):
    def factor(self) -> Any:
        return self.options.get("factor", 1.0)


class Entry(Factor):
    def factor(self) -> Any:
        return len(self.flags) + (2.0 if "wide" in self.flags else 1.0)


class Length(Factor):
    def factor(self) -> Any:
        return functools.reduce(lambda a, b: a * b, self.factors)


class Default(Factor):
    def factor(self) -> Any:
        return getattr(self, "extra", 1.0)


class Module(Factor):
    def factor(self) -> Any:
        return self.module(1.5)


class Cell(Factor):
    def factor(self) -> Any:
        return self.closed()


class Kind(Factor):
    kind = torch.float32

    def factor(self) -> Any:
        return torch.tensor(1 / 3, dtype=self.kind).float()


class Method(Factor):
    """Gets another method."""


class MethodOfClass(Factor):
    """Gets another method in its class."""


def scaled(common: CommonMetadata, scale: int) -> WindowMetadata:
    made = WindowBuilder().build(common)
    made.start = made.start * scale
    return made


class Bound:
    def __init__(self) -> None:
        self.build = functools.partial(scaled, scale=1)


def set_global(spec: Any, value: float) -> None:
    global FACTOR
    FACTOR = value


class Head:
    def __init__(self) -> None:
        self.act: Any = torch.abs

    def scale(self) -> float:
        return 1.0


class Deep:
    """A plain object whose class gets other methods; each kind has a class of its own."""

    def plain(self) -> float:
        return 1.0

    @staticmethod
    def static() -> float:
        return 1.0

    @classmethod
    def of_class(cls) -> float:
        return 1.0

    @property
    def computed(self) -> float:
        return 1.0


class Inheriting(Deep):
    """Has all of it from a base."""


class Called(torch.nn.Module):
    def __init__(self, weighted: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1)) if weighted else None

    def forward(self, x: Any) -> Any:
        return x if self.weight is None else x * self.weight


class Behind(Factor):
    """Calls methods of objects behind it, of modules and of globals."""

    def __init__(self) -> None:
        super().__init__()
        self.deep, self.called, self.bare = Inheriting(), Called(weighted=True), Called(weighted=False)

    def enter(self, inputs: DraftInputs) -> Tensor:
        x = super().enter(inputs) * self.deep.plain() * self.deep.static() * self.deep.of_class() * self.deep.computed
        x = self.called(x) * GLOBAL.plain() * scale_of(1.0)
        return self.bare(x)  # type: ignore[no-any-return]


GLOBAL = Deep()


def scale_of(x: float) -> float:
    return x


class Doubling(Head):
    def scale(self) -> float:
        return 2.0


class Halving(Head):
    def scale(self) -> float:
        return 0.5


class Deeper(Factor):
    """Calls what objects, tables and modules hold."""

    def __init__(self) -> None:
        super().__init__()
        self.head = Head()
        self.acts: dict[str, Any] = {"a": torch.abs}
        self.module = Scale()
        self.module.act = torch.abs  # type: ignore[assignment]
        self.factors = [twice] * 3  # type: ignore[list-item]

    def enter(self, inputs: DraftInputs) -> Tensor:
        x = super().enter(inputs) * self.head.scale()
        for act in (self.head.act, self.acts["a"], self.module.act, self.factors[1]):
            x = act(x)  # type: ignore[operator]
        return x


def twice(x: Tensor) -> Tensor:
    return x * 2


def thrice(x: Tensor) -> Tensor:
    return x * 3


def other(value: float) -> Any:
    """Another function, or another class, for each value."""
    return torch.neg if value > 1 else torch.square


class Constant(torch.nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Any) -> Any:
        return x * self.value


class Other(Deep):
    def __init__(self, value: float) -> None:
        self.value = value

    def plain(self) -> float:
        return self.value


def set_global_named(name: str, value: Any) -> None:
    globals()[name] = value


CHANGES: dict[str, tuple[type[Factor], Callable[[Any, float], object]]] = {
    "class attribute": (OfClass, lambda spec, v: setattr(OfClass, "scale", v)),
    "shadowed class attribute": (OfClass, lambda spec, v: setattr(spec, "scale", v)),
    "global": (Global, set_global),
    "key": (Key, lambda spec, v: spec.options.update(factor=v)),
    "entry": (Entry, lambda spec, v: spec.flags.update(["wide", str(v)])),
    "dtype": (Kind, lambda spec, v: setattr(spec, "kind", torch.float16 if v > 1 else torch.bfloat16)),
    "length": (Length, lambda spec, v: spec.factors.append(v)),
    "default": (Default, lambda spec, v: setattr(spec, "extra", v)),
    "module": (Module, lambda spec, v: setattr(spec.module, "factor", v)),
    "object": (Deeper, lambda spec, v: setattr(spec, "head", Doubling() if v > 1 else Halving())),
    "function of an object": (Deeper, lambda spec, v: setattr(spec.head, "act", other(v))),
    "function in a table": (Deeper, lambda spec, v: spec.acts.update(a=other(v))),
    "function of a module": (Deeper, lambda spec, v: setattr(spec.module, "act", other(v))),
    "function in a list": (Deeper, lambda spec, v: spec.factors.__setitem__(1, thrice if v > 1 else torch.neg)),
    "hook": (Module, lambda spec, v: spec.module.register_forward_hook(lambda module, args, out: out * v)),
    "pre-hook": (Module, lambda spec, v: spec.module.register_forward_pre_hook(lambda module, args: (args[0] * v,))),
    "method behind": (Behind, lambda spec, v: setattr(Inheriting, "plain", lambda self: v)),
    "method of a base": (Behind, lambda spec, v: setattr(Deep, "plain", lambda self: v)),
    "static method": (Behind, lambda spec, v: setattr(Deep, "static", staticmethod(lambda: v))),
    "class method": (Behind, lambda spec, v: setattr(Deep, "of_class", classmethod(lambda cls: v))),
    "property": (Behind, lambda spec, v: setattr(Deep, "computed", property(lambda self: v))),
    "forward of a module": (Behind, lambda spec, v: setattr(Called, "forward", lambda self, x: x * v)),
    "module without weights": (Behind, lambda spec, v: setattr(spec, "bare", Constant(v))),
    "global function": (Behind, lambda spec, v: set_global_named("scale_of", lambda x: v)),
    "global object": (Behind, lambda spec, v: set_global_named("GLOBAL", Other(v))),
    "cell": (Cell, lambda spec, v: spec.close_over(v)),
    "method": (Method, lambda spec, v: setattr(spec, "factor", lambda: v)),
    "method of the class": (MethodOfClass, lambda spec, v: setattr(MethodOfClass, "factor", lambda self: v)),
    "partial": (Factor, lambda spec, v: setattr(spec.builder, "build", functools.partial(scaled, scale=int(5 * v)))),
}


@pytest.fixture
def put_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Classes and globals as they were, after the test."""
    for owner, name in ((OfClass, "scale"), (MethodOfClass, "factor"), (Called, "forward")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    for name in ("plain", "static", "of_class", "computed"):
        monkeypatch.setattr(Deep, name, vars(Deep)[name])
    for name in ("GLOBAL", "scale_of"):
        monkeypatch.setitem(globals(), name, globals()[name])
    yield
    if "plain" in vars(Inheriting):
        del Inheriting.plain


@pytest.mark.parametrize("case", CHANGES)
def test_what_changes_between_calls_shows_in_the_next_draft(case: str, put_back: None) -> None:
    klass, change = CHANGES[case]
    set_global(None, 1.0)
    make = (lambda: klass(Bound())) if case == "partial" else klass
    fused = draftfuse.compile(make(), compiler="none", request_capacities=[4])
    pair = Pair(fused, draftfuse.compile(make(), mode="eager", request_capacities=[4]))
    pair.draft(lambda spec: batch_of(spec, [5, 9, 3]))
    assert fused.report.fallbacks == []
    for number, value in enumerate((3.0, 0.25), start=1):
        for spec in (pair.fused.spec, pair.eager.spec):
            change(spec, value)
        pair.draft(lambda spec, n=number: batch_of(spec, [30, 8, 7 + n], seed=n))  # type: ignore[misc]
        assert "a guard does not hold" in fused.report.fallbacks[-1].reason
    assert fused.report.counters["broken guards"] == 2


def test_what_was_there_before_runs_fused_again() -> None:
    fused = draftfuse.compile(Key(), compiler="none")
    fused.decode(2)
    fused.spec.options["factor"] = 2.0
    fused.decode(2)
    del fused.spec.options["factor"]
    fused.decode(2)
    assert fused.report.counters["broken guards"] == 1


def test_a_hook_that_is_removed_shows_too() -> None:
    spec, twin = Module(), Module()
    handles = [s.module.register_forward_hook(lambda module, args, out: out * 3.0) for s in (spec, twin)]
    pair = Pair(draftfuse.compile(spec, compiler="none"), draftfuse.compile(twin, mode="eager"))
    pair.draft(lambda spec: batch_of(spec, [5, 9, 3]))
    for handle in handles:
        handle.remove()
    pair.draft(lambda spec: batch_of(spec, [30, 8, 7], seed=1))
    assert pair.fused.report.counters["broken guards"] == 1


def test_hooks_of_other_modules_change_nothing() -> None:
    fused = draftfuse.compile(Module(), compiler="none")
    fused.decode(2)
    torch.nn.Linear(2, 2).register_forward_hook(lambda module, args, out: out)
    fused.decode(2)
    assert "broken guards" not in fused.report.counters


class Counting(Factor):
    def __init__(self) -> None:
        super().__init__()
        self.count = itertools.count()

    def factor(self) -> Any:
        return 1.0 + next(self.count)


def test_an_iterator_that_counts_is_python_state() -> None:
    with pytest.raises(UnsafeLoopError, match=r"moves the iterator at spec\.count"):
        draftfuse.compile(Counting(), compiler="none").decode(2)
    assert "side-effect" in [f.name for f in lint(Counting()) if f.is_error]
