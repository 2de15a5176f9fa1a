"""Class 20: a replay reads tables that the next batch already rewrites. What it reads from outside is listed."""

from __future__ import annotations

import torch
from torch import Tensor

from draftfuse import DraftInputs
from tests.failures.small import Small, both, three_rows


class Mapped(Small):
    def __init__(self) -> None:
        super().__init__(k=2)
        self.remap = torch.arange(17, dtype=torch.int32).flip(0)

    def enter(self, inputs: DraftInputs) -> Tensor:
        return super().enter(inputs) + self.embed[self.remap[inputs.input_ids]]


def test_tables_that_a_replay_reads_are_listed() -> None:
    fused = both(Mapped, three_rows).fused
    assert fused.report.external == ["spec.attn_groups[0].block_table", "spec.remap"]
    assert "reads spec.remap" in fused.explain()
    assert fused.batch_consumed is None  # on CUDA: the event behind which they may be rewritten
