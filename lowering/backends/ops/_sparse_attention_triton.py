"""Triton kernel of ``sparse_attention``: one program a token and KV head, which gathers its slots tile by tile."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftfuse.lowering.backends.ops.sparse_attention import TILE
from draftfuse.lowering.ops._paged_attention_plan import next_power_of_2


@triton.jit  # type: ignore[untyped-decorator]
def _attend_slots(
    query: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    indices: tl.tensor,
    lens: tl.tensor,
    tiles: tl.tensor,
    out: tl.tensor,
    scale: tl.tensor,
    i_t: tl.tensor,
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
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    RAGGED: tl.constexpr,
    PLANNED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    if RAGGED:
        begin = tl.load(lens + token)
        count = tl.load(lens + token + 1) - begin
        listed = indices + begin
    else:
        count = tl.load(lens + token)
        listed = indices + token * i_t
    if PLANNED:
        count = tl.minimum(count, tl.load(tiles + token) * BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + m
    in_head = d < HEAD_SIZE
    q_at = token * q_t + head[:, None] * q_h + d[None, :] * q_d
    q = tl.load(query + q_at, mask=(m < GROUP)[:, None] & in_head[None, :], other=0.0)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for n in range(0, count, BLOCK_N):
        at = n + tl.arange(0, BLOCK_N)
        slot = tl.load(listed + at, mask=at < count, other=-1)
        used = slot >= 0
        slot = tl.where(used, slot, 0).to(tl.int64)
        page = slot // PAGE
        k_at = page * k_n + (slot % PAGE) * k_p + kv_head * k_h
        k = tl.load(key_cache + k_at[None, :] + d[:, None] * k_d, mask=used[None, :] & in_head[:, None], other=0.0)
        v_at = page * v_n + (slot % PAGE) * v_p + kv_head * v_h
        v = tl.load(value_cache + v_at[:, None] + d[None, :] * v_d, mask=used[:, None] & in_head[None, :], other=0.0)
        scores = tl.dot(q, k, input_precision=PRECISION) * (scale * 1.4426950408889634)
        scores = tl.where(used[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(top - shift)
        total = total * decay + tl.sum(p, 1)
        acc = acc * decay[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        top = new_top
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    heads = tl.num_programs(1) * GROUP
    where = (token * heads + head)[:, None] * HEAD_SIZE + d[None, :]
    tl.store(out + where, acc.to(out.dtype.element_ty), mask=(m < GROUP)[:, None] & in_head[None, :])


def launch(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    indices: Tensor,
    lens: Tensor,
    tiles: Tensor | None,
    scale: float,
) -> Tensor:
    """Launch on checked arguments; no sync, shapes from host sizes only, so safe in capture."""
    tokens, heads, head_size = query.shape
    out = query.new_empty(query.shape)
    if out.numel() == 0:
        return out
    kv_heads = key_cache.shape[2]
    indices = indices if indices.stride(-1) == 1 else indices.contiguous()
    _attend_slots[(tokens, kv_heads)](
        query,
        key_cache,
        value_cache,
        indices,
        lens.contiguous(),
        lens if tiles is None else tiles.contiguous(),
        out,
        scale,
        indices.stride(0),
        *query.stride(),
        *key_cache.stride(),
        *value_cache.stride(),
        GROUP=heads // kv_heads,
        HEAD_SIZE=head_size,
        PAGE=key_cache.shape[1],
        RAGGED=indices.dim() == 1,
        PLANNED=tiles is not None,
        BLOCK_M=max(16, next_power_of_2(heads // kv_heads)),
        BLOCK_N=TILE,
        BLOCK_D=max(16, next_power_of_2(head_size)),
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=4,
        num_stages=2,
    )
    return out
