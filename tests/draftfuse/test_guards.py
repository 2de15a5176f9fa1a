"""Guards of host values and addresses: everything that was baked is listed, each change is named, a check is cheap."""

from __future__ import annotations

import timeit
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import draftfuse
from draftfuse import DraftInputs
from draftfuse.errors import StaleAddressError
from draftfuse.scalar_guards import REPLACED
from tests.failures.small import Small, runner_of
from tests.timing import allowed

NAMES = [f"w{index}" for index in range(14)]
BUDGET = 5e-6  # seconds for all scalars, the fastest of many runs on a machine of common speed


@dataclass
class Inner:
    """Values at the end of a chain of attributes."""

    scale: float = 0.5
    heads: int = 2


class Twenty(Small):
    """Reads fourteen numbers, a flag, a string, a None, a dictionary's item and two nested values in every forward."""

    def __init__(self) -> None:
        super().__init__(k=2)
        for index, name in enumerate(NAMES):
            setattr(self, name, 0.25 + index)
        self.flag, self.kind, self.bias = True, "tanh", None
        self.table = {"gain": 1.5}
        self.inner = Inner()

    def enter(self, inputs: DraftInputs) -> Tensor:
        x = super().enter(inputs)
        total = self.w0 + self.w1 + self.w2 + self.w3 + self.w4 + self.w5 + self.w6  # type: ignore[attr-defined]
        total += self.w7 + self.w8 + self.w9 + self.w10 + self.w11 + self.w12 + self.w13  # type: ignore[attr-defined]
        x = x * total if self.flag else x
        x = x.tanh() if self.kind == "tanh" else x
        x = x if self.bias is None else x + self.bias
        return x * self.table["gain"] * self.inner.scale + self.inner.heads


EXPECTED: dict[str, Any] = {f"spec.{name}": 0.25 + index for index, name in enumerate(NAMES)} | {
    "spec.flag": True,
    "spec.kind": "tanh",
    "spec.bias": None,
    "spec.table['gain']": 1.5,
    "spec.inner.scale": 0.5,
    "spec.inner.heads": 2,
}
CHANGES: list[tuple[str, Any]] = [("flag", False), ("kind", "relu"), ("bias", 1.0), *((name, 9.0) for name in NAMES)]


@pytest.fixture(scope="module")
def fused() -> draftfuse.FusedDraft:
    made = draftfuse.compile(Twenty(), compiler="none", request_capacities=[2])
    made.decode(2)
    return made


def test_the_report_lists_every_value_that_the_trace_took(fused: draftfuse.FusedDraft) -> None:
    baked = fused.report.baked
    assert {path: baked.get(path, "missing") for path in EXPECTED} == EXPECTED
    assert len(runner_of(fused).scalars.values) >= 20
    assert all(path in fused.explain() for path in EXPECTED)


@pytest.mark.parametrize(("name", "value"), CHANGES)
def test_each_change_is_named(fused: draftfuse.FusedDraft, name: str, value: Any) -> None:
    spec, scalars = fused.spec, runner_of(fused).scalars
    old = getattr(spec, name)
    setattr(spec, name, value)
    try:
        assert scalars.broken() == [f"spec.{name}: traced with {old!r}, now {value!r}"]
    finally:
        setattr(spec, name, old)
    assert scalars.broken() == []


def test_changes_behind_containers_and_chains_are_named(fused: draftfuse.FusedDraft) -> None:
    spec, scalars = fused.spec, runner_of(fused).scalars
    spec.table["gain"], spec.inner.scale = 2.5, 0.75
    assert scalars.broken() == [
        "spec.inner.scale: traced with 0.5, now 0.75",
        "spec.table['gain']: traced with 1.5, now 2.5",
    ]
    spec.table["gain"], spec.inner.scale = 1.5, 0.5
    inner, spec.inner = spec.inner, Inner()
    assert scalars.broken() == [REPLACED]
    spec.inner = inner
    assert scalars.broken() == []


def test_a_replaced_tensor_is_named(fused: draftfuse.FusedDraft) -> None:
    spec, addresses = fused.spec, runner_of(fused).addresses
    mix, spec.mix = spec.mix, torch.eye(8)
    with pytest.raises(StaleAddressError, match="mix"):
        addresses.check()
    spec.mix = mix
    addresses.check()


def test_a_changed_mode_is_named(fused: draftfuse.FusedDraft) -> None:
    scalars = runner_of(fused).scalars
    torch.use_deterministic_algorithms(True)
    try:
        assert scalars.broken() == ["torch.are_deterministic_algorithms_enabled(): traced with False, now True"]
    finally:
        torch.use_deterministic_algorithms(False)
    assert scalars.broken() == []


class Slotted:
    """A tensor in an object without a dictionary."""

    __slots__ = ("weight",)

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight


class Holders(Small):
    """Tensors in holders of several kinds."""

    def __init__(self) -> None:
        super().__init__(k=2)
        self.slotted, self.queue = Slotted(torch.eye(8)), deque([torch.eye(8)])
        self.by_dtype = {torch.float32: torch.eye(8)}
        self.slots = (Slotted(torch.eye(8)),)

    def enter(self, inputs: DraftInputs) -> Tensor:
        x = super().enter(inputs) @ self.slotted.weight @ self.queue[0]
        return x @ self.by_dtype[torch.float32] @ self.slots[0].weight


REPLACED_TENSORS: dict[str, Callable[[Any], Any]] = {
    "slotted.weight": lambda spec: setattr(spec.slotted, "weight", torch.ones(8, 8)),
    "slotted,": lambda spec: setattr(spec, "slotted", Slotted(spec.slotted.weight)),
    "queue": lambda spec: spec.queue.__setitem__(0, torch.ones(8, 8)),
    "by_dtype": lambda spec: spec.by_dtype.update({torch.float32: torch.ones(8, 8)}),
    "slots": lambda spec: setattr(spec.slots[0], "weight", torch.ones(8, 8)),
    r"queue\[0\]": lambda spec: spec.queue.clear(),
}


def test_a_tensor_that_is_replaced_in_any_holder_is_named() -> None:
    for name, change in REPLACED_TENSORS.items():
        made = draftfuse.compile(Holders(), compiler="none", request_capacities=[2])
        made.decode(2)
        addresses = runner_of(made).addresses
        addresses.check()
        change(made.spec)
        with pytest.raises(StaleAddressError, match=name):
            addresses.check()


def test_each_check_costs_a_few_microseconds(fused: draftfuse.FusedDraft) -> None:
    runner = runner_of(fused)
    assert len(runner.scalars.values) >= 20
    assert len(runner.addresses.tensors) >= 8

    # A CPU build of torch asks each tensor for its address; others ask once for all.
    for check, seconds in ((runner.scalars.broken, BUDGET), (runner.addresses.check, 3 * BUDGET)):
        taken = [total / 500 for total in timeit.repeat(check, number=500, repeat=60)]
        assert min(taken) < allowed(seconds), taken
