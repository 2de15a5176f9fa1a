"""Class 1: a window start that stays that of step 1. Derived fields are refreshed at every step."""

from __future__ import annotations

from draftfuse import DraftBatch
from tests.failures.small import Small, batch_of, both


def long_rows(spec: Small) -> DraftBatch:
    return batch_of(spec, [9, 12, 7])


def test_every_step_reads_its_own_window() -> None:
    pair = both(lambda: Small(k=5), long_rows)
    assert pair.fused.report.fallbacks == []
    assert pair.fused.audit(long_rows(pair.fused.spec)).ok
