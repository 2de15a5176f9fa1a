"""Class 7: more splits at replay than at capture. A bound fixed at capture is a guard; a batch above it runs split."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from draftfuse import DraftBatch, Guard
from tests.failures.small import Small, WindowBuilder, batch_of, both


class Bounded(WindowBuilder):
    def guards(self, metadata: Any) -> Sequence[Guard]:
        return [Guard("num_splits", 12, "max_seq_len", "at_most")]


def lengths(longest: int) -> Any:
    def make(spec: Small) -> DraftBatch:
        return batch_of(spec, [longest, 4])

    return make


def test_a_batch_above_the_bound_runs_split() -> None:
    pair = both(lambda: Small(k=3, builder=Bounded()), lengths(9))
    assert pair.fused.report.fallbacks == []
    pair.draft(lengths(20))
    reasons = [f.reason for f in pair.fused.report.fallbacks]
    assert ["num_splits: captured 12, now 20" in r for r in reasons] == [True]
    assert pair.fused.report.counters["broken guards"] == 1
