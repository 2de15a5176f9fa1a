"""Class 2: drafting past max_model_len. A row at the limit writes nothing more, block 0 and other rows are unharmed."""

from __future__ import annotations

import torch

from draftfuse import DraftBatch
from tests.failures.small import P, Small, batch_of, both


def near_the_limit(spec: Small) -> DraftBatch:
    return batch_of(spec, [spec.max_model_len - 2, 5, spec.max_model_len])


def test_rows_at_the_limit_write_nothing_and_others_go_on() -> None:
    before = Small(k=5).key
    pair = both(lambda: Small(k=5), near_the_limit)
    spec = pair.fused.spec
    changed = (spec.key != before).flatten(2).any(-1).flatten().nonzero().flatten().tolist()
    table, limit = spec.attn_groups[0].block_table, spec.max_model_len
    positions = {0: range(limit - 2 - 6, limit), 1: range(5 + 4), 2: range(limit - 6, limit)}
    allowed = {int(table[row, p // P]) * P + p % P for row, at in positions.items() for p in at}
    assert set(changed) <= allowed
    assert {int(table[0, p // P]) * P + p % P for p in (limit - 2, limit - 1)} <= set(changed)
    assert not any(slot < P for slot in changed)
    assert torch.equal(spec.inputs.seq_lens[:3] <= spec.inputs.positions[:3], torch.tensor([True, False, True]))
