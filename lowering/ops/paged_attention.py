"""Causal attention of a few query tokens over a paged KV cache, grouped-query, with an optional sliding window.

Shape letters: R requests (rows), T query tokens, Q of them in a row, Hq query heads, H KV heads, D head size,
N blocks (pages), P slots a page, B blocks a row of the block table.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftfuse.lowering.ops._library import (
    check_floating,
    check_same_device,
    check_same_dtype,
    check_size,
    check_tensor,
    define,
    fail,
    fake,
    implement,
    require_triton,
)
from draftfuse.lowering.ops._paged_attention_cpu import attend_decode, attend_ragged

_OP = "paged_attention"


def _check(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor | None,
    window: int,
) -> None:
    check_floating(_OP, "query", query, "T, Hq, D")
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        check_floating(_OP, name, cache, "N, P, H, D")
        check_same_dtype(_OP, name, cache, "query", query)
    check_tensor(_OP, "block_table", block_table, "R, B", torch.int32)
    check_tensor(_OP, "seq_lens", seq_lens, "R", torch.int32)
    if query_start_loc is not None:
        check_tensor(_OP, "query_start_loc", query_start_loc, "R+1", torch.int32)
    if window < 0:
        fail(_OP, "window is negative", window, "window >= 0 (0: no window)", "Pass 0 for full attention.")


def _check_sizes(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor | None,
) -> None:
    rows, (tokens, heads, head_size) = seq_lens.shape[0], query.shape
    caches = "value_cache differs from key_cache in shape"
    check_size(_OP, caches, tuple(value_cache.shape), tuple(key_cache.shape), "Allocate both alike.")
    check_size(_OP, "query has another head size than the caches", head_size, key_cache.shape[3], "Pass [T, Hq, D].")
    kv_heads = key_cache.shape[2]
    if heads % kv_heads:
        todo = "Pass query heads in groups, one group a KV head."
        fail(_OP, "query heads do not group over KV heads", heads, f"a multiple of {kv_heads}", todo)
    check_size(_OP, "block_table has other rows than seq_lens", block_table.shape[0], rows, "Slice block_table[:R].")
    if query_start_loc is None:
        todo = "Slice query to one token a row, or pass query_start_loc."
        check_size(_OP, "query has other rows than seq_lens", tokens, rows, todo)
    else:
        todo = "Slice query_start_loc[:R + 1]."
        check_size(_OP, "query_start_loc does not fit seq_lens", query_start_loc.shape[0], rows + 1, todo)
    check_same_device(
        _OP,
        query=query,
        key_cache=key_cache,
        value_cache=value_cache,
        block_table=block_table,
        seq_lens=seq_lens,
        query_start_loc=query_start_loc,
    )


def reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor | None,
    scale: float,
    window: int = 0,
) -> Tensor:
    """The meaning, a token at a time, in float32."""
    page, group = key_cache.shape[1], query.shape[1] // key_cache.shape[2]
    rows = seq_lens.shape[0]
    starts = list(range(rows + 1)) if query_start_loc is None else query_start_loc.tolist()
    out = torch.zeros_like(query)
    for row, length in enumerate(seq_lens.tolist()):
        begin, end = starts[row], min(starts[row + 1], query.shape[0])
        for token in range(begin, end):
            last = length - (starts[row + 1] - token)
            at = range(max(0, last + 1 - window) if window else 0, last + 1)
            slots = torch.tensor([int(block_table[row, p // page]) * page + p % page for p in at], dtype=torch.int64)
            if not len(at):
                continue
            keys = key_cache[slots // page, slots % page].float().repeat_interleave(group, 1)
            values = value_cache[slots // page, slots % page].float().repeat_interleave(group, 1)
            weights = (torch.einsum("hd,lhd->hl", query[token].float(), keys) * scale).softmax(-1)
            out[token] = torch.einsum("hl,lhd->hd", weights, values).to(out.dtype)
    return out


def _cpu(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor | None,
    scale: float,
    window: int = 0,
) -> Tensor:
    _check(query, key_cache, value_cache, block_table, seq_lens, query_start_loc, window)
    _check_sizes(query, key_cache, value_cache, block_table, seq_lens, query_start_loc)
    longest = int(seq_lens.max()) if seq_lens.numel() else 0
    capacity = block_table.shape[1] * key_cache.shape[1]
    if longest > capacity:
        todo = "Widen the block table, or clamp seq_lens to max_model_len."
        fail(_OP, "a row is longer than its block table", longest, f"seq_lens <= B * P = {capacity}", todo)
    if longest == 0:
        return query.new_zeros(query.shape)
    if query_start_loc is None:
        return attend_decode(query, key_cache, value_cache, block_table, seq_lens, scale, window)
    return attend_ragged(query, key_cache, value_cache, block_table, seq_lens, query_start_loc, scale, window)


def _cuda(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor | None,
    scale: float,
    window: int = 0,
) -> Tensor:
    _check(query, key_cache, value_cache, block_table, seq_lens, query_start_loc, window)
    _check_sizes(query, key_cache, value_cache, block_table, seq_lens, query_start_loc)
    require_triton(_OP)
    from draftfuse.lowering.ops._paged_attention_triton import launch

    return launch(query, key_cache, value_cache, block_table, seq_lens, query_start_loc, scale, window)


def _fake(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor | None,
    scale: float,
    window: int = 0,
) -> Tensor:
    _check(query, key_cache, value_cache, block_table, seq_lens, query_start_loc, window)
    return query.new_empty(query.shape)


define(
    "paged_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor seq_lens, "
    "Tensor? query_start_loc, float scale, int window=0) -> Tensor"
)
implement(_OP, _cpu, "CPU")
implement(_OP, _cuda, "CUDA")
fake(_OP, _fake)


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor | None,
    scale: float,
    window: int = 0,
) -> Tensor:
    """Attend each query token to the KV positions up to its own, through the page table.

    Query i of a row of Q query tokens stands at position ``seq_len - Q + i`` (decode: ``seq_len - 1``) and attends the
    KV positions up to its own, the last ``window`` of them if ``window`` is not 0. Rows with ``seq_len`` 0 and tokens
    at or past ``query_start_loc[R]`` give zeros. Entries of the block table at or past ``ceil(seq_len / P)`` are not
    used; a row longer than its table raises on the CPU and attends what the table holds on CUDA. Scores and sums are
    float32. Another company of rows changes a row by rounding at most.

    Args:
        query: floating[T, Hq, D], Hq a multiple of H.
        key_cache, value_cache: [N, P, H, D] of the same dtype, any strides.
        block_table: i32[R, B].
        seq_lens: i32[R], the query tokens included; 0 for a padded row.
        query_start_loc: i32[R+1], or None for decode: one token a row, T == R.
        scale: factor of the scores, mostly ``D ** -0.5``.
        window: sliding window, 0 for none.

    Returns:
        [T, Hq, D] of the dtype of ``query``, contiguous.

    Raises:
        OpArgumentError: a dtype, dim, size, device or ``window`` is wrong, or (CPU) a row is longer than its table.
    """
    out: Tensor = torch.ops.draftfuse.paged_attention(
        query, key_cache, value_cache, block_table, seq_lens, query_start_loc, scale, window
    )
    return out
