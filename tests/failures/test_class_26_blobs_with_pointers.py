"""Class 26: a scheduler blob that holds absolute pointers, copied. Only its backend's own refresh may touch it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import draftfuse
from draftfuse import CommonMetadata
from draftfuse.errors import UnsafeLoopError
from tests.failures.small import Small, WindowBuilder, WindowMetadata


@dataclass
class Planned(WindowMetadata):
    """``blob`` points at ``start``, as a CPU backend's scheduler metadata does."""

    blob: Tensor


class Pointing(WindowBuilder):
    refresh_kind = "host-planned"

    def build(self, common: CommonMetadata) -> Planned:
        m = super().build(common)
        blob = torch.tensor([7, m.start.data_ptr(), m.start.numel()]).view(torch.uint8)
        return Planned(m.seq_lens, m.block_table, m.slot_mapping, m.start, m.length, blob)


class InPlace(Pointing):
    def refresh(self, metadata: Planned, common: CommonMetadata) -> None:
        metadata.start.copy_((common.seq_lens - self.window).clamp(min=0))
        metadata.length.copy_(common.seq_lens - metadata.start)


def test_a_blob_with_pointers_is_never_copied() -> None:
    with pytest.raises(UnsafeLoopError, match=r"blob holds absolute addresses.*refresh"):
        draftfuse.compile(Small(k=3, builder=Pointing()), compiler="none").decode(2)


def test_a_blob_that_its_backend_refreshes_stays_where_it_is() -> None:
    spec, twin = Small(k=3, builder=InPlace()), Small(k=3, builder=InPlace())
    draftfuse.compile(spec, compiler="none").decode(2)
    draftfuse.compile(twin, mode="eager").decode(2)
    assert torch.equal(spec.inputs.draft_tokens[:2], twin.inputs.draft_tokens[:2])
