"""Values that change in ways of their own: immutable ones that are replaced, orders, classes, PyTorch's own modules."""

from __future__ import annotations

import collections
import dataclasses
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import draftfuse
from tests.failures.small import Small, both, runner_of, three_rows


class Pair(NamedTuple):
    scale: float
    other: float


@dataclasses.dataclass(frozen=True)
class Frozen:
    scale: float = 1.0


class Head:
    def go(self) -> float:
        return 1.0


class OtherHead(Head):
    def go(self) -> float:
        return -1.0


def helper(scale: float = 1.0, *, sign: float = 1.0) -> float:
    return scale * sign


class Key:
    """A key that is equal to itself alone."""


KEY = Key()
KEYED: dict[Any, float] = {
    (0, "a"): 1.0,
    None: 1.0,
    0.5: 1.0,
    True: 1.0,
    "True": 1.0,
    b"x": 1.0,
    "a']['b": 1.0,
    torch.float32: 1.0,
    torch.device("cpu"): 1.0,
    Key: 1.0,
    KEY: 1.0,
}


class Reading(Small):
    """Scales by what ``read`` finds."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        super().__init__(k=2)
        self.read = read
        self.table, self.pair, self.frozen, self.head = (1.0, 2.0), Pair(1.0, 2.0), Frozen(), Head()
        self.named, self.ordered = {"a": 1.0, "b": -1.0}, collections.OrderedDict(a=1.0, b=-1.0)
        self.view, self.counts = types.MappingProxyType(self.named), collections.Counter(a=1)
        self.part, self.size, self.numbers = slice(0, 4), torch.Size([4]), range(1, 2)
        self.absent: Any = collections.defaultdict(lambda: 1.0)
        self.norm, self.batch = torch.nn.LayerNorm(8), torch.nn.BatchNorm1d(8).eval()
        self.chain = torch.nn.Sequential(torch.nn.Tanh())
        self.integer: Any = 1
        self.zero = 0.0
        self.keyed, self.by_dtype, self.small = dict(KEYED), {torch.float32: 1.0, torch.int32: 2.0}, {"y": 1.0}
        self.first = self.second = [1.0]
        self.embed.gain = 1.0  # type: ignore[attr-defined]
        self.weight = torch.nn.Linear(1, 1)
        self.weight.weight.gain = 1.0  # type: ignore[attr-defined]

    def sample(self, hidden: Tensor, step: int) -> Tensor:
        return super().sample(hidden * self.read(self), step)


def put(name: str, value: Any) -> Callable[[Any], None]:
    return lambda spec: setattr(spec, name, value)


def turned(mapping: Any) -> None:
    mapping["a"] = mapping.pop("a")


def tried(spec: Any) -> float:
    try:
        return float(spec.small["x"])
    except KeyError:
        return 1.0


def replaced_key(mapping: dict[Any, Any], key: Any) -> None:
    """Another key, as many as before."""
    mapping.pop(next(iter(mapping)))
    mapping[key] = -1.0


Case = tuple[Callable[[Any], Any], Callable[[Any], Any]]


def entry(key: Any) -> Case:
    """A value by a key of some type."""
    return lambda s: s.keyed[key], lambda s: s.keyed.update({key: -1.0})


CASES: dict[str, Case] = {
    "tuple": (lambda s: s.table[0], put("table", (-1.0, 2.0))),
    "longer tuple": (lambda s: sum(s.table), put("table", (1.0, 2.0, -9.0))),
    "named tuple": (lambda s: s.pair.scale, put("pair", Pair(-1.0, 2.0))),
    "frozen object": (lambda s: s.frozen.scale, lambda s: object.__setattr__(s.frozen, "scale", -1.0)),
    "slice": (lambda s: torch.arange(8.0)[s.part].sum(), put("part", slice(4, 8))),
    "size": (lambda s: torch.arange(8.0)[: s.size[0]].sum(), put("size", torch.Size([2]))),
    "range": (lambda s: sum(s.numbers), put("numbers", range(2, 3))),
    "order of keys": (lambda s: next(iter(s.named.values())), lambda s: turned(s.named)),
    "order of an ordered dictionary": (
        lambda s: next(iter(s.ordered.values())),
        lambda s: s.ordered.move_to_end("a"),
    ),
    "view of a dictionary": (lambda s: s.view["a"], lambda s: s.named.update(a=-1.0)),
    "counter": (lambda s: float(s.counts["a"]), lambda s: s.counts.update(a=5)),
    "class of an object": (lambda s: s.head.go(), lambda s: setattr(s.head, "__class__", OtherHead)),
    "constant of a module": (lambda s: s.norm(torch.arange(8.0)), lambda s: setattr(s.norm, "eps", 50.0)),
    "mode of a module": (lambda s: s.batch(torch.ones(2, 8)).sum(), lambda s: s.batch.train()),
    "module in a chain": (lambda s: s.chain(torch.ones(1)), lambda s: s.chain.__setitem__(0, torch.nn.Sigmoid())),
    "integer to float": (lambda s: (torch.ones(1, dtype=torch.int64) * s.integer / 3).sum(), put("integer", 1.0)),
    "sign of zero": (lambda s: torch.atan2(torch.zeros(1) * s.zero, -torch.ones(1)), put("zero", -0.0)),
    "defaults": (lambda s: helper(), lambda s: setattr(helper, "__defaults__", (-1.0,))),
    "keyword defaults": (lambda s: helper(1.0), lambda s: setattr(helper, "__kwdefaults__", {"sign": -1.0})),
    "code of a function": (lambda s: helper(), lambda s: setattr(helper, "__code__", lower.__code__)),
    "code of a method": (lambda s: s.head.go(), lambda s: setattr(Head.go, "__code__", OtherHead.go.__code__)),
    "dtype of the process": (
        lambda s: torch.full((1,), 1.0).element_size() / 4,
        lambda s: torch.set_default_dtype(torch.float64),
    ),
    "entry by dtype": (lambda s: s.by_dtype[torch.float32], lambda s: s.by_dtype.update({torch.float32: -1.0})),
    "items by dtype": (
        lambda s: sum(value for _, value in s.by_dtype.items()),
        lambda s: s.by_dtype.update({torch.int32: -1.0}),
    ),
    "no such tuple": (lambda s: s.small.get((1, "a"), 1.0), lambda s: replaced_key(s.small, (1, "a"))),
    "no such entry": (tried, lambda s: replaced_key(s.small, "x")),
    "no such count": (lambda s: 1.0 + s.counts["b"], lambda s: replaced_key(s.counts, "b")),
    "attribute of a tensor": (lambda s: s.embed.gain, lambda s: setattr(s.embed, "gain", -1.0)),
    "attribute of a parameter": (
        lambda s: s.weight.weight.gain,
        lambda s: setattr(s.weight.weight, "gain", -1.0),
    ),
    "one list in two places": (lambda s: 1.0 if s.first is s.second else -1.0, put("second", [1.0])),
    "deterministic algorithms": (
        lambda s: -1.0 if torch.are_deterministic_algorithms_enabled() else 1.0,
        lambda s: torch.use_deterministic_algorithms(True),
    ),
    "dtype of autocast": (
        lambda s: s.zero + 1.0,
        lambda s: torch.set_autocast_dtype("cpu", torch.float16),
    ),
    **{f"entry by {key!r}": entry(key) for key in KEYED if not isinstance(key, Key)},
    "entry by an object": entry(KEY),
}


def lower(scale: float = 1.0, *, sign: float = 1.0) -> float:
    return -scale * sign


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    functions: list[Any] = [helper, Head.go]
    kept = [(f.__defaults__, f.__kwdefaults__, f.__code__) for f in functions]
    yield
    for function, parts in zip(functions, kept, strict=True):
        function.__defaults__, function.__kwdefaults__, function.__code__ = parts
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    torch.set_autocast_dtype("cpu", torch.bfloat16)


LATER = (
    *("longer tuple", "frozen object", "size", "range", "order of an ordered dictionary", "counter"),
    *("mode of a module", "module in a chain", "keyword defaults", "code of a method"),
    *("items by dtype", "no such count", "attribute of a parameter"),
)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in LATER else n for n in CASES])
def test_a_change_is_seen(name: str) -> None:
    read, change = CASES[name]
    fused = draftfuse.compile(Reading(read), compiler="none", request_capacities=[4])
    fused.decode(3)
    runner = runner_of(fused)
    assert runner.scalars.broken() == []
    change(fused.spec)
    assert runner.scalars.broken()


@pytest.mark.parametrize("name", ["named tuple", "constant of a module", "class of an object"])
def test_after_a_change_the_draft_is_that_of_eager(name: str) -> None:
    read, change = CASES[name]
    pair = both(lambda: Reading(read), three_rows)
    for spec in (pair.fused.spec, pair.eager.spec):
        change(spec)
    pair.draft(three_rows)
    assert pair.fused.report.counters["broken guards"] == 1


SAME: dict[str, Case] = {
    "equal tuple": (lambda s: s.table[0], lambda s: setattr(s, "table", tuple(map(float, s.table)))),
    "equal number": (lambda s: s.zero + 1.0, put("zero", float("0.0"))),
    "factory of a dictionary": (lambda s: s.absent.get("x", 1.0), lambda s: None),
    "keywords": (lambda s: functools.partial(helper, scale=1.0)(), lambda s: None),
    "keys of many types": (
        lambda s: s.keyed[(0, "a")] + s.keyed[None] + s.keyed[0.5] + s.keyed[b"x"] + s.keyed[True] + s.keyed[Key],
        lambda s: s.keyed.update({"another": 1.0}),
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_what_is_equal_holds(name: str) -> None:
    read, change = SAME[name]
    fused = draftfuse.compile(Reading(read), compiler="none", request_capacities=[4])
    fused.decode(3)
    change(fused.spec)
    fused.decode(3)
    assert "broken guards" not in fused.report.counters
