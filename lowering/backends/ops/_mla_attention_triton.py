"""Triton kernel of ``mla_attention``: a block of query heads of one row over one split of its latent cache.

All heads share one latent row, so heads fill the rows of the matrix product, and a tile is read once for keys and
values. Split sizes come from ``seq_lens`` on the device; their number from host sizes alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftfuse.lowering.ops._paged_attention_plan import MAX_SPLITS, hardware, next_power_of_2
from draftfuse.lowering.ops._paged_attention_triton import _reduce

BLOCK_H = 16
TILE_BYTES = 32768  # of one latent tile: 32 tokens of 512 bf16 elements


@triton.jit(do_not_specialize=["capacity", "splits"])  # type: ignore[untyped-decorator]
def _attend_latent(
    q_nope: tl.tensor,
    q_rope: tl.tensor,
    cache: tl.tensor,
    block_table: tl.tensor,
    seq_lens: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    capacity: tl.tensor,
    splits: tl.tensor,
    scale: tl.tensor,
    n_r: tl.tensor,
    n_h: tl.tensor,
    n_c: tl.tensor,
    e_r: tl.tensor,
    e_h: tl.tensor,
    e_c: tl.tensor,
    c_n: tl.tensor,
    c_p: tl.tensor,
    c_d: tl.tensor,
    table_r: tl.tensor,
    table_b: tl.tensor,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """``out`` is [R, Hq, S, C] with ``lse`` [R, Hq, S] (base 2) where SPLIT."""
    row = tl.program_id(0)
    split = tl.program_id(2)
    head = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.arange(0, BLOCK_C)
    e = tl.arange(0, BLOCK_E)
    is_head = head < HEADS
    nope_at = row.to(tl.int64) * n_r + head[:, None] * n_h + c[None, :] * n_c
    nope = tl.load(q_nope + nope_at, mask=is_head[:, None] & (c < LATENT)[None, :], other=0.0)
    rope_at = row.to(tl.int64) * e_r + head[:, None] * e_h + e[None, :] * e_c
    rope = tl.load(q_rope + rope_at, mask=is_head[:, None] & (e < ROPE)[None, :], other=0.0)

    length = tl.minimum(tl.load(seq_lens + row), capacity)
    span = tl.cdiv(tl.cdiv(length, BLOCK_N), splits) * BLOCK_N
    start = split * span
    stop = tl.minimum(start + span, length)
    table = block_table + row.to(tl.int64) * table_r
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    for n in range(start, stop, BLOCK_N):
        at = n + tl.arange(0, BLOCK_N)
        used = at < stop
        page = tl.load(table + (at // PAGE) * table_b, mask=used, other=0).to(tl.int64)
        token = cache + page * c_n + (at % PAGE) * c_p
        latent_mask = used[:, None] & (c < LATENT)[None, :]
        latent = tl.load(token[:, None] + c[None, :] * c_d, mask=latent_mask, other=0.0)
        key_mask = used[:, None] & (e < ROPE)[None, :]
        key = tl.load(token[:, None] + (LATENT + e)[None, :] * c_d, mask=key_mask, other=0.0)
        scores = tl.dot(nope, tl.trans(latent), input_precision=PRECISION)
        scores += tl.dot(rope, tl.trans(key), input_precision=PRECISION)
        scores = tl.where(used[None, :], scores * (scale * 1.4426950408889634), float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(top - shift)
        total = total * decay + tl.sum(p, 1)
        acc = acc * decay[:, None] + tl.dot(p.to(latent.dtype), latent, input_precision=PRECISION)
        top = new_top

    divisor = tl.where(total > 0, total, 1.0)
    place = (row.to(tl.int64) * HEADS + head) * splits + split
    stored = is_head[:, None] & (c < LATENT)[None, :]
    if SPLIT:
        tl.store(lse + place, tl.where(total > 0, top + tl.log2(divisor), float("-inf")), mask=is_head)
        stored = stored & (total > 0)[:, None]
    where = place[:, None] * LATENT + c[None, :]
    tl.store(out + where, (acc / divisor[:, None]).to(out.dtype.element_ty), mask=stored)


def launch(
    q_nope: Tensor,
    q_rope: Tensor,
    latent_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    splits: int | None = None,
) -> Tensor:
    """Launch on checked arguments; no sync, shapes from host sizes only, so safe in capture."""
    rows, heads, latent = q_nope.shape
    out = q_nope.new_empty(q_nope.shape)
    if out.numel() == 0:
        return out
    page, block_c = latent_cache.shape[1], max(16, next_power_of_2(latent))
    block_n = max(16, min(64, TILE_BYTES // (block_c * q_nope.element_size())))
    capacity, head_blocks = block_table.shape[1] * page, -(-heads // BLOCK_H)
    if splits is None:
        wanted = -(-hardware(q_nope.device)[0] // (rows * head_blocks))
        splits = max(1, min(wanted, -(-capacity // block_n), MAX_SPLITS))
    lse = q_nope.new_empty((rows, heads, splits), dtype=torch.float32)
    partial = q_nope.new_empty((rows, heads, splits, latent), dtype=torch.float32) if splits > 1 else out
    _attend_latent[(rows, head_blocks, splits)](
        q_nope,
        q_rope,
        latent_cache,
        block_table,
        seq_lens.contiguous(),
        partial,
        lse,
        capacity,
        splits,
        scale,
        *q_nope.stride(),
        *q_rope.stride(),
        *latent_cache.stride(),
        *block_table.stride(),
        HEADS=heads,
        LATENT=latent,
        ROPE=q_rope.shape[2],
        PAGE=page,
        SPLIT=splits > 1,
        BLOCK_M=BLOCK_H,
        BLOCK_N=block_n,
        BLOCK_C=block_c,
        BLOCK_E=max(16, next_power_of_2(q_rope.shape[2])),
        PRECISION="ieee" if q_nope.dtype == torch.float32 else "tf32",
        num_warps=8,
        num_stages=2,
    )
    if splits > 1:
        size = next_power_of_2(splits)
        _reduce[(rows * heads,)](
            partial, lse, out, splits, HEAD_SIZE=latent, BLOCK_S=size, BLOCK_D=block_c, PDL=False, num_warps=4
        )
    return out
