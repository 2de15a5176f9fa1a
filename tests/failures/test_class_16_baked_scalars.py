"""Class 16: a scalar baked at capture differs at replay. It is listed, guarded, and checked in a few microseconds."""

from __future__ import annotations

import timeit

from tests.failures.small import Small, both, three_rows
from tests.timing import allowed


def test_a_changed_scalar_sends_the_batch_to_a_split_loop() -> None:
    pair = both(lambda: Small(k=3), three_rows)
    assert pair.fused.report.baked["spec.attn_groups[0].builder.window"] == 5
    before = pair.draft(three_rows)
    for spec in (pair.fused.spec, pair.eager.spec):
        spec.builder.window = 2
    changed = pair.draft(three_rows)
    assert changed.shape == before.shape
    assert "builder.window: traced with 5, now 2" in pair.fused.report.fallbacks[0].reason
    for spec in (pair.fused.spec, pair.eager.spec):
        spec.builder.window = 5
    pair.draft(three_rows)
    assert pair.fused.report.counters["broken guards"] == 1


def test_the_check_takes_microseconds() -> None:
    pair = both(lambda: Small(k=2), three_rows)
    scalars = next(iter(pair.fused.runners.made.values())).scalars
    assert len(scalars.values) >= 3

    taken = [total / 1000 for total in timeit.repeat(scalars.broken, number=1000, repeat=20)]
    assert min(taken) < allowed(5e-6), taken
