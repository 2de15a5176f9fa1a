"""Class 25: a sparse-index cache filled in forward is reused from step 1. It is declared, or found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from torch import Tensor

import draftfuse
from draftfuse import CommonMetadata, DraftInputs
from draftfuse.errors import UnsafeLoopError
from tests.failures.small import Small, WindowBuilder, WindowMetadata, both, three_rows


class Undeclared(Small):
    """Keeps the indices of the first step on the speculator."""

    indices: Tensor | None = None

    def forward(self, inputs: DraftInputs, metadata: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        hidden, feedback = super().forward(inputs, metadata)
        if self.indices is None:
            self.indices = metadata["draft"].seq_lens * 2
        return hidden + (self.indices[:1] * 0.01), feedback


class Invalidating(WindowBuilder):
    """Holds its metadata; what forward derives from it is dropped at every refresh."""

    def build(self, common: CommonMetadata) -> WindowMetadata:
        metadata: Any = super().build(common)
        metadata.indices = None
        return metadata

    def refresh(self, metadata: Any, common: CommonMetadata) -> None:
        metadata.start.copy_((common.seq_lens - self.window).clamp(min=0))
        metadata.length.copy_(common.seq_lens - metadata.start)

    def invalidate(self, metadata: Any) -> None:
        metadata.indices = None


class Declared(Small):
    def __init__(self) -> None:
        super().__init__(k=4, builder=Invalidating())

    def forward(self, inputs: DraftInputs, metadata: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        meta = metadata["draft"]
        if meta.indices is None:
            meta.indices = meta.start * 2 + meta.length
        hidden, feedback = super().forward(inputs, metadata)
        if inputs.positions.shape[0] != meta.indices.shape[0]:
            return hidden, feedback
        return hidden + (meta.indices * 0.01).unsqueeze(1), feedback


def test_an_undeclared_cache_is_refused_with_its_line() -> None:
    with pytest.raises(UnsafeLoopError) as caught:
        draftfuse.compile(Undeclared(k=3), compiler="none").decode(2)
    assert "self.indices = metadata" in str(caught.value)


def test_a_declared_cache_is_filled_anew_at_every_step() -> None:
    pair = both(Declared, three_rows)
    assert pair.fused.audit(three_rows(pair.fused.spec)).ok
