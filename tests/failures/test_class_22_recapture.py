"""Class 22: a capture at every round, because two shapes share a key. The key is the whole signature."""

from __future__ import annotations

from typing import Any

from draftfuse import DraftBatch
from tests.failures.small import Small, batch_of, both


def rows(number: int) -> Any:
    def make(spec: Small) -> DraftBatch:
        return batch_of(spec, [5, 9, 3, 7][:number], seed=number)

    return make


def test_alternating_shapes_build_nothing_new() -> None:
    pair = both(lambda: Small(k=3), rows(2))
    pair.draft(rows(4))
    pair.draft(rows(4), k=2)
    builds, made = len(pair.fused.report.builds), len(pair.fused.runners.made)
    for number, k in ((2, 3), (4, 3), (4, 2), (3, 3), (2, 3), (4, 2)):
        pair.draft(rows(number), k)
    assert len(pair.fused.report.builds) == builds
    assert len(pair.fused.runners.made) == made
