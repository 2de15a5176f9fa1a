"""Class 12: buffers of an earlier capture read by another. Every build gets fresh inputs; live ones are untouched."""

from __future__ import annotations

from typing import Any

import torch

from draftfuse import DraftBatch
from draftfuse.dispatch import DECODE, Descriptor
from tests.failures.small import Small, batch_of, both


def rows(number: int) -> Any:
    def make(spec: Small) -> DraftBatch:
        return batch_of(spec, [5, 9, 3, 7][:number], seed=number)

    return make


def test_capacities_and_ks_interleave() -> None:
    pair = both(lambda: Small(k=3), rows(3))
    for number, k in ((2, 3), (4, 2), (3, 3), (2, 2), (4, 3)):
        pair.draft(rows(number), k)


def test_a_build_in_the_middle_of_serving_changes_no_live_input() -> None:
    spec = both(lambda: Small(k=2), rows(2)).fused.spec
    import draftfuse

    fused = draftfuse.compile(spec, compiler="none")
    before = {n: t.clone() for n, t in spec.inputs.named_tensors().items()}
    fused.runners.get(Descriptor(DECODE, 4, 4, 2))
    after = spec.inputs.named_tensors()
    assert all(torch.equal(before[n], after[n]) for n in before)
