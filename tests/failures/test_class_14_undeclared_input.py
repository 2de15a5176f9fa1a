"""Class 14: an input that is no graph input is ignored by replays. It is refused, or guarded while it is None."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import draftfuse
from draftfuse import DraftInputs
from draftfuse.errors import UnsafeLoopError
from tests.failures.small import H, Small, both, three_rows

PICTURES = torch.ones(H)


class Global(Small):
    def enter(self, inputs: DraftInputs) -> Tensor:
        return super().enter(inputs) + PICTURES


class Optional(Small):
    pictures: Tensor | None

    def __init__(self) -> None:
        super().__init__(k=3)
        self.pictures = None

    def enter(self, inputs: DraftInputs) -> Tensor:
        x = super().enter(inputs)
        return x if self.pictures is None else x + self.pictures


def test_an_undeclared_input_is_an_error_at_build() -> None:
    with pytest.raises(UnsafeLoopError, match="PICTURES") as caught:
        draftfuse.compile(Global(k=3), compiler="none").decode(2)
    assert "return super().enter(inputs) + PICTURES" in str(caught.value)


def test_an_input_that_appears_later_is_not_ignored() -> None:
    pair = both(Optional, three_rows)
    without = pair.draft(three_rows)
    pair.fused.spec.pictures, pair.eager.spec.pictures = torch.ones(H) * 3, torch.ones(H) * 3
    assert not torch.equal(pair.draft(three_rows), without)
    assert "pictures" in pair.fused.report.fallbacks[0].reason
