"""Attention of FlashAttention 3 by a schedule that ``fa3_schedule`` made ahead.

On the CPU a stand-in attends what the stand-in's schedule says, so that a stale schedule shows.

Shape letters: R requests (rows), T query tokens, Hq query heads, H KV heads, D head size, N blocks (pages),
P slots a page, B blocks a row of the block table, S capacity of the schedule.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftfuse.lowering.backends.ops._vendors import call, require_fa3
from draftfuse.lowering.backends.ops.fa3 import CPU_SPLIT, Configuration, plan_length, window_sides
from draftfuse.lowering.ops._library import check_floating, check_tensor, define, fake, implement
from draftfuse.lowering.ops.paged_attention import paged_attention


def _check_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    schedule: Tensor,
    out: Tensor,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    num_splits: int,
    window: int,
) -> None:
    op = "fa3_attention"
    for name, tensor, shape in (
        ("query", query, "T, Hq, D"),
        ("out", out, "T, Hq, D"),
        ("key_cache", key_cache, "N, P, H, D"),
        ("value_cache", value_cache, "N, P, H, D"),
    ):
        check_floating(op, name, tensor, shape)
    check_tensor(op, "block_table", block_table, "R, B", torch.int32)
    for name, tensor, shape in (
        ("seq_lens", seq_lens, "R"),
        ("query_start_loc", query_start_loc, "R+1"),
        ("schedule", schedule, "S"),
    ):
        check_tensor(op, name, tensor, shape, torch.int32)


def _attention_cpu(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    schedule: Tensor,
    out: Tensor,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    num_splits: int,
    window: int,
) -> None:
    tensors = (query, key_cache, value_cache, block_table, seq_lens, query_start_loc, schedule, out)
    _check_attention(*tensors, scale, max_query_len, max_seq_len, num_splits, window)
    rows = seq_lens.shape[0]
    second = -(-rows // 4) * 4
    splits = schedule[second : second + rows]
    lens = seq_lens if num_splits else torch.minimum(seq_lens, splits * CPU_SPLIT)
    starts = None if max_query_len == 1 else query_start_loc
    out.copy_(paged_attention(query, key_cache, value_cache, block_table, lens, starts, scale, window))


def _attention_cuda(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    schedule: Tensor,
    out: Tensor,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    num_splits: int,
    window: int,
) -> None:
    tensors = (query, key_cache, value_cache, block_table, seq_lens, query_start_loc, schedule, out)
    _check_attention(*tensors, scale, max_query_len, max_seq_len, num_splits, window)
    _, page, kv_heads, size = key_cache.shape
    config = Configuration(
        seq_lens.shape[0],
        max_query_len,
        max_seq_len,
        query.shape[1],
        kv_heads,
        size,
        page,
        num_splits,
        window,
        query.dtype,
    )
    length = plan_length(config, seq_lens, query_start_loc)
    vendor_attention(*tensors[:6], out, scale, config, schedule[:length])


def vendor_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    out: Tensor,
    scale: float,
    config: Configuration,
    schedule: Tensor | None,
) -> None:
    """The library's forward; without a schedule it makes its own inside."""
    operator = getattr(torch.ops, require_fa3()).fwd.default
    left, right = window_sides(config.window)
    call(
        operator,
        {
            "q": query,
            "k": key_cache,
            "v": value_cache,
            "out": out,
            "cu_seqlens_q": query_start_loc,
            "seqused_k": seq_lens,
            "max_seqlen_q": config.max_query_len,
            "max_seqlen_k": config.max_seq_len,
            "page_table": block_table,
            "softmax_scale": scale,
            "is_causal": True,
            "window_size_left": left,
            "window_size_right": right,
            "scheduler_metadata": schedule,
            "num_splits": config.num_splits,
        },
    )


define(
    "fa3_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor seq_lens, "
    "Tensor query_start_loc, Tensor(a!) schedule, Tensor(b!) out, float scale, int max_query_len, int max_seq_len, "
    "int num_splits, int window) -> ()"
)
implement("fa3_attention", _attention_cpu, "CPU")
implement("fa3_attention", _attention_cuda, "CUDA")
fake("fa3_attention", _check_attention)
