"""Class 10: a plan that is valid only while seq_lens keep their values, frozen at its first use."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

import draftfuse
from draftfuse import CommonMetadata
from draftfuse.errors import NotFusableError
from draftfuse.lint import lint
from tests.failures.small import Small, WindowBuilder, WindowMetadata, both, three_rows


class Lazy(WindowBuilder):
    """Plans once, and checks nothing but that there is a plan."""

    plan: Tensor | None = None

    def build(self, common: CommonMetadata) -> WindowMetadata:
        metadata = super().build(common)
        if self.plan is None or self.plan.shape != metadata.start.shape:
            self.plan = metadata.start.clone()
        metadata.start = self.plan
        return metadata


class PerStep(WindowBuilder):
    def build(self, common: CommonMetadata) -> WindowMetadata:
        metadata: Any = super().build(common)
        metadata.plan = metadata.start + metadata.length
        return metadata


def test_a_frozen_plan_is_not_fused() -> None:
    with pytest.raises(NotFusableError):
        draftfuse.compile(Small(k=3, builder=Lazy()), compiler="none", mode="fused").decode(2)
    fused = draftfuse.compile(Small(k=3, builder=Lazy()), compiler="none")
    fused.decode(2)
    assert [f.mode for f in fused.report.fallbacks] == ["split"]
    assert any(f.name == "fresh-allocation" and "plan" in f.text for f in lint(Small(k=3, builder=Lazy())))


def test_a_plan_made_anew_at_each_step_is() -> None:
    pair = both(lambda: Small(k=3, builder=PerStep()), three_rows)
    assert pair.fused.report.fallbacks == []
