"""Class 15: counters in the loop crash or freeze. A Python counter is reported; a tensor counts."""

from __future__ import annotations

import torch
from torch import Tensor

from draftfuse import DraftInputs
from tests.failures.small import Small, both, three_rows


class Counting(Small):
    def __init__(self) -> None:
        super().__init__(k=3)
        self.calls = 0
        self.load = torch.zeros(4, dtype=torch.int64)

    def enter(self, inputs: DraftInputs) -> Tensor:
        self.calls += 1
        self.load[:1].add_(1)
        return super().enter(inputs)


def test_a_python_counter_is_reported_and_a_tensor_counter_counts() -> None:
    pair = both(Counting, three_rows)
    pair.draft(three_rows)
    found = pair.fused.report.findings
    assert [(f.severity, f.name) for f in found] == [("warning", "side-effect")]
    assert "self.calls += 1" in str(found[0])
    assert torch.equal(pair.fused.spec.load, pair.eager.spec.load)
    assert int(pair.fused.spec.load[0]) == 2 * 3
