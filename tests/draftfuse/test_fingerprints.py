"""Two things that could act differently have two fingerprints."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import pytest
import torch

from draftfuse import fingerprints
from draftfuse.fingerprints import Fingerprints, patched


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * abs(2)


class Kind(ABC):
    """Something that classes are registered with."""

    @abstractmethod
    def act(self) -> None:
        """Do it."""


class Mine:
    """One that is."""


def outline(value: Any) -> str:
    return Fingerprints().outline(value)


def test_a_global_that_hides_a_builtin(monkeypatch: pytest.MonkeyPatch) -> None:
    before = outline(doubled)
    monkeypatch.setitem(globals(), "abs", lambda number: -number)
    assert outline(doubled) != before


def test_a_class_that_is_registered() -> None:
    before = outline(Kind)
    Kind.register(Mine)
    assert outline(Kind) != before


def test_the_order_of_a_set_counts() -> None:
    assert Fingerprints().exact({1, 9}) == Fingerprints().exact({1, 9})
    assert Fingerprints().exact(frozenset([1, 9])) != Fingerprints().exact(frozenset([1, 10]))


def test_a_method_of_pytorch_that_somebody_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    before = patched()
    monkeypatch.setattr(fingerprints.torch.nn.Linear, "forward", lambda self, x: -x)
    assert len(patched()) == len(before) + 1
    assert "Linear.forward" in str(patched())


def test_graphs_of_fx_are_no_replacement() -> None:
    before = patched()
    torch.fx.symbolic_trace(torch.nn.Linear(2, 2))
    assert patched() == before
