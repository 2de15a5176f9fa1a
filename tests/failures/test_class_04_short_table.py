"""Class 4: the draft's position table is shorter than the positions that it is asked for."""

from __future__ import annotations

import pytest
from torch import Tensor

import draftfuse
from draftfuse import DraftInputs
from draftfuse.errors import UnsafeLoopError
from draftfuse.lint import lint
from tests.failures.small import Small


class Short(Small):
    def __init__(self, rows: int = 20) -> None:
        super().__init__(k=3)
        self.place = self.place[:rows].clone()


class Clamped(Short):
    def enter(self, inputs: DraftInputs) -> Tensor:
        return self.embed[inputs.input_ids] + self.place[inputs.positions.clamp(max=19)]


class Halved(Short):
    def enter(self, inputs: DraftInputs) -> Tensor:
        return self.embed[inputs.input_ids] + self.place[inputs.positions // 2 + 5]


@pytest.mark.parametrize("make", [Short, lambda: Halved(20)])
def test_a_short_table_is_refused_at_build(make: type[Short]) -> None:
    with pytest.raises(UnsafeLoopError, match="a table of 20 rows is read at positions up to") as caught:
        draftfuse.compile(make(), compiler="none").decode(2)
    assert "self.place[inputs.positions" in str(caught.value)


@pytest.mark.parametrize("make", [Clamped, lambda: Halved(21)])
def test_positions_that_fit_are_not(make: type[Short]) -> None:
    assert lint(make()) == []
