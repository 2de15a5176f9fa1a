"""Class 11: metadata allocated anew at each call, while a graph keeps dead addresses. Rows are owned and kept."""

from __future__ import annotations

import gc

import torch

from tests.failures.small import Small, both, three_rows


def test_rows_of_derived_metadata_keep_their_address() -> None:
    pair = both(lambda: Small(k=3), three_rows)
    workspace = pair.fused.runners.workspace
    before = {d: c.data_ptr() for d, c in workspace.chunks.items()}
    for _ in range(3):
        gc.collect()
        scratch = [torch.randn(64) for _ in range(50)]  # what a freed row would be given to
        pair.draft(three_rows)
        del scratch
    assert {d: c.data_ptr() for d, c in workspace.chunks.items()} == before
    kept = next(iter(pair.fused.runners.made.values())).kept
    held = {t.untyped_storage().data_ptr() for t in kept.tensors}
    assert set(before.values()) <= held
