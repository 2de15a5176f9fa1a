"""Class 27: a consumer keeps the row stride of capture while the builder packs by batch. Layout is guarded."""

from __future__ import annotations

import pytest

import draftfuse
from draftfuse import CommonMetadata
from draftfuse.errors import UnstableMetadataError
from tests.failures.small import Small, WindowBuilder, WindowMetadata, both, three_rows


class Packing(WindowBuilder):
    """A block table as wide as the host says, packed."""

    def __init__(self) -> None:
        super().__init__()
        self.width = 8

    def build(self, common: CommonMetadata) -> WindowMetadata:
        metadata = super().build(common)
        metadata.block_table = common.block_table[:, : self.width].contiguous()
        return metadata


class PackingByStep(Packing):
    refresh_kind = "host-planned"

    def build(self, common: CommonMetadata) -> WindowMetadata:
        self.width = 8 - common.draft_step
        return super().build(common)


def test_another_width_is_another_signature() -> None:
    pair = both(lambda: Small(k=3, builder=Packing()), three_rows)
    for spec in (pair.fused.spec, pair.eager.spec):
        spec.builder.width = 5
    pair.draft(three_rows)
    assert "builder.width: traced with 8, now 5" in pair.fused.report.fallbacks[0].reason


def test_a_layout_that_changes_inside_the_loop_is_refused() -> None:
    with pytest.raises(UnstableMetadataError, match="block_table"):
        draftfuse.compile(Small(k=4, builder=PackingByStep()), compiler="none").decode(2)
