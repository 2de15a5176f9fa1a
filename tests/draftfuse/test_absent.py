"""What a loop looked for in vain, or ran over in some order, is guarded too."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from tests.failures.small import Small, both, three_rows

SETTINGS = types.ModuleType("settings_of_a_user")


class Tries(Small):
    """An attribute that may be there."""

    def sample(self, hidden: Tensor, step: int) -> Tensor:
        try:
            hidden = hidden * self.gain  # type: ignore[attr-defined]
        except AttributeError:
            hidden = hidden + 0.0
        return super().sample(hidden, step)


LACKS = AttributeError


class TriesAll(Small):
    """The same, with whatever is raised."""

    def sample(self, hidden: Tensor, step: int) -> Tensor:
        try:
            hidden = hidden * self.gain  # type: ignore[attr-defined]
        except:  # noqa: E722
            hidden = hidden + 0.0
        return super().sample(hidden, step)


class TriesByAnotherName(Small):
    """The same, with another name for the error."""

    def sample(self, hidden: Tensor, step: int) -> Tensor:
        try:
            hidden = hidden * self.gain  # type: ignore[attr-defined]
        except LACKS:
            hidden = hidden + 0.0
        return super().sample(hidden, step)


class TriesBelow(Small):
    """The same, raised in what it calls, and in what that calls."""

    def sample(self, hidden: Tensor, step: int) -> Tensor:
        try:
            hidden = hidden * self.asked()
        except AttributeError:
            hidden = hidden + 0.0
        return super().sample(hidden, step)

    def asked(self) -> Any:
        return gain_of(self)


def gain_of(spec: Any) -> Any:
    return spec.gain


class AsksModule(Small):
    """A setting of a module that may be there."""

    def sample(self, hidden: Tensor, step: int) -> Tensor:
        return super().sample(hidden * getattr(SETTINGS, "gain", 1.0), step)


class AsksWhether(Small):
    """The same, asked for first."""

    def sample(self, hidden: Tensor, step: int) -> Tensor:
        return super().sample(-hidden if hasattr(SETTINGS, "flipped") else hidden, step)


class RunsOver(Small):
    """The order of a set decides."""

    def __init__(self, k: int = 3) -> None:
        super().__init__(k=k)
        self.gains = {1, 9}

    def sample(self, hidden: Tensor, step: int) -> Tensor:
        for gain in self.gains:
            hidden = hidden * gain - gain
        return super().sample(hidden, step)


class Proxy(Small):
    """A read-only view of a table that others may write."""

    def __init__(self, k: int = 8) -> None:
        super().__init__(k=k)
        self.table = dict.fromkeys(range(k + 1), 1.0)
        self.view = types.MappingProxyType(self.table)

    def sample(self, hidden: Tensor, step: int) -> Tensor:
        return super().sample(hidden * self.view[step], step)


def setting(name: str) -> Callable[[Any], None]:
    return lambda spec: setattr(SETTINGS, name, -3.0)


CASES: dict[str, tuple[Callable[[], Small], Callable[[Any], None]]] = {
    "tried": (Tries, lambda spec: setattr(spec, "gain", -3.0)),
    "tried with anything": (TriesAll, lambda spec: setattr(spec, "gain", -3.0)),
    "tried by another name": (TriesByAnotherName, lambda spec: setattr(spec, "gain", -3.0)),
    "tried below": (TriesBelow, lambda spec: setattr(spec, "gain", -3.0)),
    "asked of a module": (AsksModule, setting("gain")),
    "asked whether": (AsksWhether, setting("flipped")),
    "entry behind a view": (lambda: Proxy(8), lambda spec: spec.table.__setitem__(6, -3.0)),
}


@pytest.fixture(autouse=True)
def plain_settings() -> Any:
    vars(SETTINGS).pop("gain", None)
    vars(SETTINGS).pop("flipped", None)
    yield
    vars(SETTINGS).pop("gain", None)
    vars(SETTINGS).pop("flipped", None)


@pytest.mark.parametrize("name", CASES)
def test_what_comes_later_is_seen(name: str) -> None:
    make, change = CASES[name]
    pair = both(make, three_rows, request_capacities=[3], one_launch=False)
    assert not pair.fused.report.fallbacks
    for spec in (pair.fused.spec, pair.eager.spec):
        change(spec)
    pair.draft(three_rows)
    assert pair.fused.report.fallbacks


def test_a_set_in_the_same_order_is_no_other() -> None:
    pair = both(RunsOver, three_rows, request_capacities=[3], one_launch=False)
    for spec in (pair.fused.spec, pair.eager.spec):
        spec.gains = {1, 9}
    pair.draft(three_rows)
    assert not pair.fused.report.fallbacks
