"""Triton kernels of :mod:`draftfuse.vllm.load`, and their launches.

Imported only on CUDA, and by tests under Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 128


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _load(
    out_last: tl.tensor,
    out_step: tl.tensor,
    out_ids: tl.tensor,
    out_positions: tl.tensor,
    out_starts: tl.tensor,
    out_lens: tl.tensor,
    out_idx: tl.tensor,
    out_temperature: tl.tensor,
    out_seeds: tl.tensor,
    out_rejected: tl.tensor,
    out_live: tl.tensor,
    ids: tl.tensor,
    positions: tl.tensor,
    idx: tl.tensor,
    last_sampled: tl.tensor,
    next_prefill: tl.tensor,
    num_sampled: tl.tensor,
    num_rejected: tl.tensor,
    starts: tl.tensor,
    lens: tl.tensor,
    temperature: tl.tensor,
    seeds: tl.tensor,
    rows: tl.tensor,
    capacity: tl.tensor,
    BLOCK: tl.constexpr,
    PADS: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    if row < rows:
        begin = tl.load(starts + row)
        state = tl.load(idx + row)
        rejected = tl.load(num_rejected + row)
        length = tl.load(starts + row + 1) - begin - rejected
        if tl.load(num_sampled + row) > 0:
            token = tl.load(last_sampled + state).to(tl.int32)
        else:
            token = tl.load(next_prefill + state).to(tl.int32)
        for at in range(0, length, BLOCK):
            t = at + lane
            shifted = tl.load(ids + begin + t + 1, mask=t + 1 < length, other=0).to(tl.int32)
            tl.store(out_ids + begin + t, tl.where(t + 1 == length, token, shifted), mask=t < length)
            position = tl.load(positions + begin + t, mask=t < length, other=0)
            tl.store(out_positions + begin + t, position, mask=t < length)
        tl.store(out_last + row, (begin + length - 1).to(tl.int64))
        tl.store(out_starts + row, begin)
        tl.store(out_lens + row, tl.load(lens + row))
        tl.store(out_idx + row, state)
        tl.store(out_rejected + row, rejected)
    else:
        tl.store(out_step, 0)
        tl.store(out_live, rows)
        end = tl.load(starts + rows)
        for at in range(0, capacity + 1, BLOCK):
            r = at + lane
            padded = (r >= rows) & (r < capacity)
            tl.store(out_starts + r, tl.zeros([BLOCK], tl.int32) + end, mask=(r >= rows) & (r <= capacity))
            tl.store(out_lens + r, tl.zeros([BLOCK], tl.int32), mask=padded)
            tl.store(out_last + r, tl.zeros([BLOCK], tl.int64), mask=padded)
            if PADS:
                tl.store(out_idx + r, tl.zeros([BLOCK], tl.int32) - 1, mask=padded)
            inside = r < capacity
            tl.store(out_temperature + r, tl.load(temperature + r, mask=inside, other=0.0), mask=inside)
            tl.store(out_seeds + r, tl.load(seeds + r, mask=inside, other=0), mask=inside)


def launch_load(
    written: tuple[Tensor, ...], read: tuple[Tensor, ...], rows: int, pads: bool
) -> Callable[[], None] | None:
    """Launch on checked arguments; no sync, no allocation.

    Returns:
        What launches the same on the same addresses again; None under the interpreter.
    """
    grid = (rows + 1, 1, 1)
    numbers = (rows, written[7].numel())
    compiled = _load[grid](*written, *read, *numbers, BLOCK=BLOCK, PADS=pads, num_warps=1)
    if compiled is None:
        return None
    return partial(compiled[grid], *(tensor.data_ptr() for tensor in (*written, *read)), *numbers, BLOCK, pads)


@triton.jit  # type: ignore[untyped-decorator]
def _turn(
    drafts: tl.tensor,
    rejected: tl.tensor,
    live: tl.tensor,
    ids: tl.tensor,
    positions: tl.tensor,
    starts: tl.tensor,
    lens: tl.tensor,
    stride: tl.tensor,
    capacity: tl.tensor,
    max_model_len: tl.tensor,
    BLOCK: tl.constexpr,
    ADVANCES: tl.constexpr,
) -> None:
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rows = tl.load(live)
    inside = row < capacity
    alive = inside & (row < rows)
    token = tl.load(drafts + row.to(tl.int64) * stride, mask=alive, other=0)
    tl.store(ids + row, token.to(tl.int32), mask=alive)
    length = tl.load(lens + row, mask=alive, other=0)
    if ADVANCES:
        position = tl.load(positions + row, mask=alive, other=0)
        tl.store(positions + row, tl.minimum(position + 1, max_model_len - 1), mask=alive)
        length = tl.minimum(length - tl.load(rejected + row, mask=alive, other=0) + 1, max_model_len)
    tl.store(lens + row, tl.where(alive, length, 0), mask=inside)
    tl.store(starts + row, tl.minimum(row, rows), mask=row <= capacity)


def launch_turn(tensors: tuple[Tensor, ...], max_model_len: int, advances: bool) -> None:
    """Launch; the number of live rows is read on the device."""
    drafts, lens = tensors[0], tensors[-1]
    capacity = lens.numel()
    grid = (triton.cdiv(capacity + 1, BLOCK),)
    numbers = (drafts.stride(0), capacity, max_model_len)
    _turn[grid](*tensors, *numbers, BLOCK=BLOCK, ADVANCES=advances, num_warps=1)
