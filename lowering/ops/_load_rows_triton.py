"""Triton kernel of ``load_rows``: one program a row walks over the row's tokens.

Imported only by the CUDA implementation, and by tests under Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256


@triton.jit  # type: ignore[untyped-decorator]
def _load_rows(
    out_ids: tl.tensor,
    out_positions: tl.tensor,
    out_seq_lens: tl.tensor,
    out_starts: tl.tensor,
    out_idx: tl.tensor,
    out_last: tl.tensor,
    out_temperature: tl.tensor,
    out_seeds: tl.tensor,
    ids: tl.tensor,
    positions: tl.tensor,
    seq_lens: tl.tensor,
    starts: tl.tensor,
    idx: tl.tensor,
    rejected: tl.tensor,
    sampled: tl.tensor,
    temperature: tl.tensor,
    seeds: tl.tensor,
    first: tl.tensor,
    rows: tl.tensor,
    query_len: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0) + first
    lane = tl.arange(0, BLOCK)
    if row < rows:
        begin = tl.load(starts + row)
        end = tl.load(starts + row + 1)
        last = end - 1 - tl.load(rejected + row)
        token = tl.load(sampled + row)
        for at in range(begin, end, BLOCK):
            t = at + lane
            live = t < end
            shifted = tl.load(ids + t + 1, mask=t + 1 < end, other=0).to(tl.int64)
            tl.store(out_ids + t, tl.where(t == last, token, shifted).to(tl.int32), mask=live)
            tl.store(out_positions + t, tl.load(positions + t, mask=live, other=0), mask=live)
        if row == 0:
            tl.store(out_starts, begin)
        tl.store(out_starts + row + 1, end)
        tl.store(out_last + row, last.to(tl.int64))
        tl.store(out_seq_lens + row, tl.load(seq_lens + row))
        tl.store(out_idx + row, tl.load(idx + row))
        tl.store(out_temperature + row, tl.load(temperature + row))
        tl.store(out_seeds + row, tl.load(seeds + row))
    else:
        begin = row * query_len
        end = begin + query_len
        for at in range(begin, end, BLOCK):
            t = at + lane
            tl.store(out_ids + t, tl.zeros([BLOCK], tl.int32), mask=t < end)
            tl.store(out_positions + t, tl.zeros([BLOCK], tl.int64), mask=t < end)
        tl.store(out_starts + row + 1, end)
        tl.store(out_last + row, (end - 1).to(tl.int64))
        tl.store(out_seq_lens + row, 0)
        tl.store(out_idx + row, -1)
        tl.store(out_temperature + row, 0.0)
        tl.store(out_seeds + row, 0)


def launch(written: Sequence[Tensor], read: Sequence[Tensor], rows: int, capacity: int, query_len: int) -> None:
    """Launch on checked arguments; no sync, no allocation. Without ``read`` only rows behind ``rows`` are written."""
    first, live = (0, rows) if read else (rows, 0)
    count = max(rows, capacity) - first
    if count > 0:
        sources = read or (*written, written[0])  # never read where no row is live
        _load_rows[(count,)](*written, *sources, first, live, query_len, BLOCK=BLOCK, num_warps=2)
