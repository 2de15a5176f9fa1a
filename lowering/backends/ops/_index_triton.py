"""Triton kernels of the indexer: its refresh (one program a token and processor), and its scheduled logits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftfuse.lowering.backends.ops._swa_refresh_triton import _row_of_token
from draftfuse.lowering.backends.ops.index_logits import SPLIT
from draftfuse.lowering.ops._paged_attention_plan import next_power_of_2


@triton.jit(do_not_specialize=["num_reqs", "num_tokens", "processors"])  # type: ignore[untyped-decorator]
def _refresh(
    slot_mapping: tl.tensor,
    positions: tl.tensor,
    seq_lens: tl.tensor,
    query_start_loc: tl.tensor,
    slots: tl.tensor,
    request_ids: tl.tensor,
    lens: tl.tensor,
    schedule: tl.tensor,
    num_reqs: tl.tensor,
    num_tokens: tl.tensor,
    processors: tl.tensor,
    RATIO: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_R: tl.constexpr,
) -> None:
    i = tl.program_id(0)
    if i < num_tokens:
        slot = tl.load(slot_mapping + i)
        completes = (slot >= 0) & ((tl.load(positions + i) + 1) % RATIO == 0)
        tl.store(slots + i, tl.where(completes, slot // RATIO, -1))
        tl.store(request_ids + i, _row_of_token(query_start_loc, num_reqs, i))
    if i < num_reqs:
        tl.store(lens + i, tl.load(seq_lens + i) // RATIO)
    if i <= processors:
        row = tl.arange(0, BLOCK_R)
        length = tl.load(seq_lens + row, mask=row < num_reqs, other=0) // RATIO
        units = tl.cdiv(length, UNIT).to(tl.int64)
        ends = tl.cumsum(units, 0)
        begin = i.to(tl.int64) * tl.sum(units, 0) // processors
        done = (ends <= begin) & (row < num_reqs)
        first = tl.sum(done.to(tl.int32), 0)
        tl.store(schedule + 2 * i, first)
        tl.store(schedule + 2 * i + 1, (begin - tl.sum(tl.where(done, units, 0), 0)).to(tl.int32))


def launch_refresh(
    slot_mapping: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    slots: Tensor,
    request_ids: Tensor,
    lens: Tensor,
    schedule: Tensor,
    ratio: int,
) -> None:
    """Launch on checked, dense arguments; no sync, so safe in capture."""
    tokens, rows, processors = slot_mapping.shape[0], seq_lens.shape[0], schedule.shape[0] - 1
    _refresh[(max(tokens, rows, processors + 1),)](
        slot_mapping,
        positions,
        seq_lens,
        query_start_loc,
        slots,
        request_ids,
        lens,
        schedule,
        rows,
        tokens,
        processors,
        RATIO=ratio,
        UNIT=SPLIT,
        BLOCK_R=next_power_of_2(rows),
        num_warps=2,
    )


@triton.jit(do_not_specialize=["num_reqs", "capacity"])  # type: ignore[untyped-decorator]
def _logits(
    query: tl.tensor,
    weights: tl.tensor,
    key_cache: tl.tensor,
    block_table: tl.tensor,
    lens: tl.tensor,
    schedule: tl.tensor,
    out: tl.tensor,
    num_reqs: tl.tensor,
    capacity: tl.tensor,
    table_r: tl.tensor,
    k_n: tl.tensor,
    k_p: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """One processor of the schedule: its units in order. ``out`` [R, L] starts as -inf."""
    line = schedule + 2 * tl.program_id(0)
    row, unit = tl.load(line), tl.load(line + 1)
    end_row, end_unit = tl.load(line + 2), tl.load(line + 3)
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    head_mask = (m < HEADS)[:, None] & (d < HEAD_SIZE)[None, :]
    while ((row < end_row) | ((row == end_row) & (unit < end_unit))) & (row < num_reqs):
        length = tl.minimum(tl.load(lens + row), capacity)
        if unit * UNIT < length:
            base = row.to(tl.int64) * HEADS
            q = tl.load(query + (base + m[:, None]) * HEAD_SIZE + d[None, :], mask=head_mask, other=0.0)
            weight = tl.load(weights + base + m, mask=m < HEADS, other=0.0).to(tl.float32)
            at = unit * UNIT + tl.arange(0, UNIT)
            used = at < length
            page = tl.load(block_table + row.to(tl.int64) * table_r + at // PAGE, mask=used, other=0).to(tl.int64)
            k_at = (page * k_n + (at % PAGE) * k_p)[None, :] + d[:, None]
            k = tl.load(key_cache + k_at, mask=used[None, :] & (d < HEAD_SIZE)[:, None], other=0.0)
            scores = tl.maximum(tl.dot(q, k, input_precision=PRECISION), 0.0)
            tl.store(out + row.to(tl.int64) * capacity + at, tl.sum(scores * weight[:, None], 0), mask=used)
            unit += 1
        else:
            row += 1
            unit = tl.zeros_like(unit)


def launch_logits(
    query: Tensor, weights: Tensor, key_cache: Tensor, block_table: Tensor, lens: Tensor, schedule: Tensor
) -> Tensor:
    """Launch on checked arguments; no sync, so safe in capture."""
    rows, heads, size = query.shape
    capacity = block_table.shape[1] * key_cache.shape[1]
    out = torch.full((rows, capacity), float("-inf"), dtype=torch.float32, device=query.device)
    key_cache = key_cache if key_cache.stride(2) == 1 else key_cache.contiguous()
    _logits[(schedule.shape[0] - 1,)](
        query.contiguous(),
        weights.contiguous(),
        key_cache,
        block_table,
        lens.contiguous(),
        schedule.contiguous(),
        out,
        rows,
        capacity,
        block_table.stride(0),
        key_cache.stride(0),
        key_cache.stride(1),
        HEADS=heads,
        HEAD_SIZE=size,
        PAGE=key_cache.shape[1],
        UNIT=SPLIT,
        BLOCK_M=max(16, next_power_of_2(heads)),
        BLOCK_D=max(16, next_power_of_2(size)),
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=4,
    )
    return out
