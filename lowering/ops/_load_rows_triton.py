"""Triton kernel of ``load_rows``: one program a row walks over the row's tokens, further ones copy hidden states.

Imported only by the CUDA implementation, and by tests under Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256
HIDDEN_BLOCK = 4096  # elements of hidden states that one program copies


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
    out_hidden: tl.tensor,
    ids: tl.tensor,
    positions: tl.tensor,
    seq_lens: tl.tensor,
    starts: tl.tensor,
    idx: tl.tensor,
    rejected: tl.tensor,
    sampled: tl.tensor,
    temperature: tl.tensor,
    seeds: tl.tensor,
    hidden: tl.tensor,
    first: tl.tensor,
    rows: tl.tensor,
    stop: tl.tensor,
    query_len: tl.tensor,
    elements: tl.tensor,
    BLOCK: tl.constexpr,
    HIDDEN_BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0) + first
    lane = tl.arange(0, BLOCK)
    if row >= stop:
        element = (row - stop).to(tl.int64) * HIDDEN_BLOCK + tl.arange(0, HIDDEN_BLOCK)
        copied = element < elements
        tl.store(out_hidden + element, tl.load(hidden + element, mask=copied), mask=copied)
    elif row < rows:
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


def launch(
    written: Sequence[Tensor], read: Sequence[Tensor], rows: int, tokens: int, capacity: int, query_len: int
) -> Callable[[], None] | None:
    """Launch on checked arguments; no sync, no allocation. Without ``read`` only rows behind ``rows`` are written.

    Returns:
        What launches the same on the same addresses again, without looking at tensors; None where nothing was launched.
    """
    first, live = (0, rows) if read else (rows, 0)
    stop = max(rows, capacity)
    sources = read or (*written[:-1], written[0], written[-1])  # never read where no row is live
    hidden, out = sources[-1], written[-1]
    elements = tokens * out.shape[1] if read else 0
    copies = elements > 0 and hidden.dtype == out.dtype and hidden.is_contiguous() and out.is_contiguous()
    if elements and not copies:
        out[:tokens].copy_(hidden[:tokens])
        elements = 0
    grid = (stop - first + triton.cdiv(elements, HIDDEN_BLOCK), 1, 1)
    if grid[0] == 0:
        return None
    numbers = (first, live, stop, query_len, elements)
    blocks = {"BLOCK": BLOCK, "HIDDEN_BLOCK": HIDDEN_BLOCK}
    compiled = _load_rows[grid](*written, *sources, *numbers, **blocks, num_warps=2)
    if compiled is None or elements != (tokens * out.shape[1] if read else 0):
        return None
    pointers = [tensor.data_ptr() for tensor in (*written, *sources)]
    return partial(compiled[grid], *pointers, *numbers, *blocks.values())
