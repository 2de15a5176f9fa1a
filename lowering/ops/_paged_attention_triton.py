"""Triton kernels of ``paged_attention``: split-KV attention for decode and ragged queries, and the split reduction.

A program attends BLOCK_Q query tokens of one row, packed with the GROUP query heads of one KV head into BLOCK_M rows of
a matrix product, over one split of the row's KV range. Split sizes come from ``seq_lens`` on the device; only their
number is chosen on the host, from sizes, so that nothing syncs and a captured graph serves every length. Imported only
by the CUDA implementation, and by tests under Triton's interpreter.

Shape letters: R requests, T query tokens, Hq query heads, H KV heads, D head size, P slots a page, S splits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftfuse.lowering.ops._dependent_launch import dependent_launch
from draftfuse.lowering.ops._paged_attention_plan import hardware, plan


@triton.jit  # type: ignore[untyped-decorator]
def _row_of_block(
    query_start_loc: tl.tensor, num_reqs: tl.tensor, q_block: tl.tensor, BLOCK_Q: tl.constexpr
) -> tl.tensor:
    """The row that owns query block ``q_block``, where row r owns blocks from ``query_start_loc[r] // BLOCK_Q + r``."""
    low = 0
    high = num_reqs
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_start_loc + middle) // BLOCK_Q + middle <= q_block:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit(do_not_specialize=["num_reqs", "num_tokens", "capacity", "splits"])  # type: ignore[untyped-decorator]
def _attend(
    query: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    block_table: tl.tensor,
    seq_lens: tl.tensor,
    query_start_loc: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    num_reqs: tl.tensor,
    num_tokens: tl.tensor,
    capacity: tl.tensor,
    splits: tl.tensor,
    scale: tl.tensor,
    q_t: tl.tensor,
    q_h: tl.tensor,
    q_d: tl.tensor,
    k_n: tl.tensor,
    k_p: tl.tensor,
    k_h: tl.tensor,
    k_d: tl.tensor,
    v_n: tl.tensor,
    v_p: tl.tensor,
    v_h: tl.tensor,
    v_d: tl.tensor,
    table_r: tl.tensor,
    table_b: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    RAGGED: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Attention of one query block over one split. ``out`` is [T, Hq, S, D] with ``lse`` [T, Hq, S] where SPLIT."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    q_block = tl.program_id(0) // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS
    split = tl.program_id(1)
    if RAGGED:
        row = _row_of_block(query_start_loc, num_reqs, q_block, BLOCK_Q)
        begin = tl.load(query_start_loc + row)
        row_end = tl.load(query_start_loc + row + 1)
        first_token = begin + (q_block - begin // BLOCK_Q - row) * BLOCK_Q
    else:
        row = q_block
        row_end = row + 1
        first_token = row
    end = tl.minimum(row_end, num_tokens)
    if first_token >= end:
        return

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    token = first_token + m // GROUP
    head = kv_head * GROUP + m % GROUP
    valid = (m < BLOCK_Q * GROUP) & (token < end)
    in_head = d < HEAD_SIZE
    q_at = token.to(tl.int64)[:, None] * q_t + head[:, None] * q_h + d[None, :] * q_d
    q = tl.load(query + q_at, mask=valid[:, None] & in_head[None, :], other=0.0)

    seq_len = tl.load(seq_lens + row)
    first_position = seq_len - (row_end - first_token)
    last = first_position + m // GROUP
    high = tl.minimum(tl.minimum(seq_len, first_position + BLOCK_Q), capacity)
    low = 0
    if WINDOW > 0:
        low = tl.maximum(0, first_position - WINDOW + 1)
    base = low // BLOCK_N * BLOCK_N
    span = tl.cdiv(tl.cdiv(tl.maximum(high - base, 0), BLOCK_N), splits) * BLOCK_N
    start = base + split * span
    stop = tl.minimum(start + span, high)

    table = block_table + row.to(tl.int64) * table_r
    keys = key_cache + kv_head * k_h + d[:, None] * k_d
    values = value_cache + kv_head * v_h + d[None, :] * v_d
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for n in range(start, stop, BLOCK_N):
        at = n + tl.arange(0, BLOCK_N)
        used = at < stop
        if WINDOW > 0:
            used = used & (at >= low)
        page = tl.load(table + (at // PAGE) * table_b, mask=used, other=0).to(tl.int64)
        slot = at % PAGE
        k_at = page * k_n + slot * k_p
        k = tl.load(keys + k_at[None, :], mask=used[None, :] & in_head[:, None], other=0.0)
        v_at = page * v_n + slot * v_p
        v = tl.load(values + v_at[:, None], mask=used[:, None] & in_head[None, :], other=0.0)
        scores = tl.dot(q, k, input_precision=PRECISION) * (scale * 1.4426950408889634)
        keep = used[None, :]
        if RAGGED:
            keep = keep & (at[None, :] <= last[:, None])
            if WINDOW > 0:
                keep = keep & (at[None, :] > last[:, None] - WINDOW)
        scores = tl.where(keep, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(top - shift)
        total = total * decay + tl.sum(p, 1)
        acc = acc * decay[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        top = new_top

    divisor = tl.where(total > 0, total, 1.0)
    acc = acc / divisor[:, None]
    place = (token.to(tl.int64) * (KV_HEADS * GROUP) + head) * splits + split
    where = place[:, None] * HEAD_SIZE + d[None, :]
    stored = valid[:, None] & in_head[None, :]
    if SPLIT:
        tl.store(lse + place, tl.where(total > 0, top + tl.log2(divisor), float("-inf")), mask=valid)
        stored = stored & (total > 0)[:, None]
    tl.store(out + where, acc.to(out.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["splits"])  # type: ignore[untyped-decorator]
def _reduce(
    partial: tl.tensor,
    lse: tl.tensor,
    out: tl.tensor,
    splits: tl.tensor,
    HEAD_SIZE: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Merge the splits of one token and head by their log-sum-exp (base 2); a split that saw nothing has -inf."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    place = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, BLOCK_S)
    d = tl.arange(0, BLOCK_D)
    weight = tl.load(lse + place * splits + s, mask=s < splits, other=float("-inf"))
    seen = weight > float("-inf")
    top = tl.max(weight, 0)
    weight = tl.exp2(weight - tl.where(top == float("-inf"), 0.0, top))
    at = (place * splits + s)[:, None] * HEAD_SIZE + d[None, :]
    parts = tl.load(partial + at, mask=seen[:, None] & (d < HEAD_SIZE)[None, :], other=0.0)
    total = tl.sum(weight, 0)
    merged = tl.sum(parts * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + place * HEAD_SIZE + d, merged.to(out.dtype.element_ty), mask=d < HEAD_SIZE)


def launch(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor | None,
    scale: float,
    window: int = 0,
    splits: int | None = None,
) -> Tensor:
    """Launch on checked arguments; no sync, shapes from host sizes only, so safe in capture."""
    ragged = query_start_loc is not None
    sms, stages = hardware(query.device)
    rows, width = block_table.shape
    chosen = plan(query, key_cache, width, rows, ragged, window, sms)
    splits = chosen.splits if splits is None else splits
    tokens, heads, head_size = query.shape
    kv_heads = key_cache.shape[2]
    # Tokens past query_start_loc[R] belong to no program, so a ragged batch starts from zeros.
    out = query.new_zeros(query.shape) if ragged and splits == 1 else query.new_empty(query.shape)
    if out.numel() == 0 or rows == 0:
        return out.zero_()
    lse = query.new_empty((tokens, heads, splits) if splits > 1 else 1, dtype=torch.float32)
    partial = query.new_empty((tokens, heads, splits, head_size), dtype=torch.float32) if splits > 1 else out
    if ragged and splits > 1:
        lse.fill_(float("-inf"))
    dependent = dependent_launch(query.device)
    _attend[(chosen.q_blocks * kv_heads, splits)](
        query,
        key_cache,
        value_cache,
        block_table,
        seq_lens.contiguous(),
        seq_lens if query_start_loc is None else query_start_loc.contiguous(),
        partial,
        lse,
        rows,
        tokens,
        width * key_cache.shape[1],
        splits,
        scale,
        *query.stride(),
        *key_cache.stride(),
        *value_cache.stride(),
        *block_table.stride(),
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        HEAD_SIZE=head_size,
        PAGE=key_cache.shape[1],
        WINDOW=window,
        RAGGED=ragged,
        SPLIT=splits > 1,
        BLOCK_Q=chosen.block_q,
        BLOCK_M=chosen.block_m,
        BLOCK_N=chosen.block_n,
        BLOCK_D=chosen.block_d,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=4,
        num_stages=stages,
        **(dependent if chosen.early else {**dependent, "launch_pdl": False}),
    )
    if splits > 1:
        sizes = {"HEAD_SIZE": head_size, "BLOCK_S": triton.next_power_of_2(splits), "BLOCK_D": chosen.block_d}
        _reduce[(tokens * heads,)](partial, lse, out, splits, **sizes, num_warps=4, **dependent)
    return out
