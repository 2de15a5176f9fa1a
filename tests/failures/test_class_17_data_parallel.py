"""Class 17: one rank drafts fewer steps and the others hang. All ranks take one capacity and one step count."""

from __future__ import annotations

import draftfuse
from tests.failures.small import Small, batch_of


def test_every_rank_runs_the_capacity_of_the_largest() -> None:
    sizes = (0, 3, 1)
    counters = []
    for number in sizes:
        spec = Small(k=2)
        fused = draftfuse.compile(spec, compiler="none")
        batch = batch_of(spec, [5, 9, 3][: max(1, number)])
        batch.num_reqs, batch.num_tokens = (number, batch.num_tokens) if number else (0, 0)
        tokens = fused.propose(batch, num_reqs_across_dp=sizes)
        assert tokens.shape == (number, 2)
        counters.append({n: c for n, c in fused.report.counters.items() if n.startswith("decode capacity")})
    assert counters == [{"decode capacity 4": 1}] * 3
