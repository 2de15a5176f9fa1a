"""Class 8: metadata in the target's shape. Every group's builder gets its own page size, table and slots."""

from __future__ import annotations

from typing import Any

import torch

from draftfuse import AttentionGroup, CommonMetadata, DraftInputs
from tests.failures.small import Small, WindowBuilder, WindowMetadata, both, three_rows


class Noting(WindowBuilder):
    """Keeps what it saw in host values that tests read; they are written before the loop is built."""

    def __init__(self, page_size: int) -> None:
        super().__init__()
        self.page_size = page_size

    def build(self, common: CommonMetadata) -> WindowMetadata:
        assert common.page_size == self.page_size
        assert common.block_table.shape[1] * common.page_size >= 32
        return super().build(common)


class Two(Small):
    """A second group with pages of another size, read by the same forward."""

    def __init__(self) -> None:
        super().__init__(k=3, builder=Noting(4))
        first = self.attn_groups[0]
        table = torch.arange(5 * 2, dtype=torch.int32).view(5, 2) + 1
        slots = torch.full_like(first.slot_mapping, -1)
        self.attn_groups = [first, AttentionGroup(Noting(16), table, slots, 16, ("other",))]

    def forward(self, inputs: DraftInputs, metadata: Any) -> Any:
        hidden, feedback = super().forward(inputs, metadata)
        slots = metadata["other"].slot_mapping
        return hidden + (slots % 7).unsqueeze(1) * 0.01, feedback


def test_each_group_is_built_from_its_own_configuration() -> None:
    pair = both(Two, three_rows)
    spec = pair.fused.spec
    first, second = (g.slot_mapping[:3] for g in spec.attn_groups)
    positions = spec.inputs.positions[:3]
    assert torch.equal(first % 4, (positions) % 4)
    assert torch.equal(second % 16, (positions) % 16)
