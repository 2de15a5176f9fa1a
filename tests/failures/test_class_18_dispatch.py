"""Class 18: graphs captured and never used, or a size dispatched that was not captured. One table serves both."""

from __future__ import annotations

import draftfuse
from tests.failures.small import Small


def test_dispatch_returns_only_what_capture_makes() -> None:
    fused = draftfuse.compile(Small(k=3), compiler="none")
    captured = {d for k in range(4) for d in fused.ladder.descriptors([k])}
    used = set()
    for num_reqs in range(1, 5):
        for query in (1, 2, 4):
            for k in range(4):
                decision = fused.dispatch(num_reqs, num_reqs * query, k)
                chosen = {d for d in (decision.prefill, decision.decode) if d is not None}
                assert chosen <= captured
                assert decision.reason
                used |= chosen
    assert {d.num_reqs for d in used} == set(fused.ladder.capacities)
