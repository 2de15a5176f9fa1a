"""Class 21: lengths not advanced, advanced late, rejected tail not subtracted. Each step is compared with an oracle."""

from __future__ import annotations

import torch

import draftfuse
from draftfuse.state import pad
from draftfuse.tapped import Tapped
from tests.failures.small import P, Small, batch_of

LENGTHS, REJECTED, K = [9, 12, 6], [0, 2, 1], 4


def test_positions_lengths_and_slots_of_every_step() -> None:
    spec = Small(k=K)
    fused = draftfuse.compile(spec, compiler="none")
    draftfuse.compile(spec, mode="eager").propose(batch_of(spec, LENGTHS, REJECTED), k=1)
    pad(spec.inputs, 3, 4)
    forced = {step: torch.zeros(4, dtype=torch.int64) for step in range(1, K)}
    with torch.no_grad():
        recorded = Tapped(fused, 4, K, forced).run()
    table = spec.attn_groups[0].block_table
    for step in range(1, K):
        position = [length - 1 - gone + step for length, gone in zip(LENGTHS, REJECTED, strict=True)]
        slots = [int(table[row, p // P]) * P + p % P for row, p in enumerate(position)]
        assert recorded["group0.slot_mapping", step].tolist() == [*slots, -1]
        assert recorded["group0.metadata.seq_lens", step].tolist() == [*(p + 1 for p in position), 0]
        if step < K - 1:
            assert recorded["inputs.positions", step].tolist()[:3] == [p + 1 for p in position]
