"""Class 19: every size times every K captured. One build serves a logarithmic ladder."""

from __future__ import annotations

import draftfuse
from tests.failures.small import Small, batch_of


def test_one_build_serves_the_ladder() -> None:
    spec = Small(max_num_reqs=9, k=2)
    fused = draftfuse.compile(spec, compiler="none")
    assert fused.ladder.capacities == [1, 2, 4, 8, 9]
    for rows in (2, 3, 5, 8, 9):
        fused.propose(batch_of(spec, [4] * rows))
    assert [b.num_reqs for b in fused.report.builds if b.kind == "decode"] == [None]
    rows_held = fused.memory()["rows"]
    assert rows_held == fused.runners.workspace.num_bytes
