"""FlashAttention without a schedule made ahead: version 2, or 3 which then plans inside; else draftfuse's own kernel.

Shape letters: R requests (rows), T query tokens, Hq query heads, H KV heads, D head size, N blocks (pages),
P slots a page, B blocks a row of the block table.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftfuse.lowering.backends.ops import _vendors
from draftfuse.lowering.backends.ops.fa3 import Configuration, window_sides
from draftfuse.lowering.backends.ops.fa3_attention import vendor_attention
from draftfuse.lowering.ops._library import check_floating, check_tensor, define, fake, implement
from draftfuse.lowering.ops.paged_attention import paged_attention

_OP = "flash_attention"


def _check(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    window: int = 0,
) -> None:
    check_floating(_OP, "query", query, "T, Hq, D")
    check_floating(_OP, "key_cache", key_cache, "N, P, H, D")
    check_floating(_OP, "value_cache", value_cache, "N, P, H, D")
    check_tensor(_OP, "block_table", block_table, "R, B", torch.int32)
    check_tensor(_OP, "seq_lens", seq_lens, "R", torch.int32)
    check_tensor(_OP, "query_start_loc", query_start_loc, "R+1", torch.int32)


def library() -> str:
    """What attends on CUDA here: ``fa2``, ``fa3`` (without a schedule made ahead) or ``own``."""
    if _vendors.find_namespace(2) is not None:
        return "fa2"
    return "fa3" if _vendors.find_namespace(3) is not None else "own"


def _own(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    window: int = 0,
) -> Tensor:
    _check(query, key_cache, value_cache, block_table, seq_lens, query_start_loc, scale, max_query_len, max_seq_len)
    starts = None if max_query_len == 1 else query_start_loc
    return paged_attention(query, key_cache, value_cache, block_table, seq_lens, starts, scale, window)


def _fa2(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    window: int = 0,
) -> Tensor:
    left, right = window_sides(window)
    out: Tensor = _vendors.call(
        torch.ops._vllm_fa2_C.varlen_fwd.default,
        {
            "q": query,
            "k": key_cache,
            "v": value_cache,
            "cu_seqlens_q": query_start_loc,
            "cu_seqlens_k": torch.empty_like(query_start_loc),  # asked for, not read beside seqused_k
            "seqused_k": seq_lens,
            "block_table": block_table,
            "max_seqlen_q": max_query_len,
            "max_seqlen_k": max_seq_len,
            "softmax_scale": scale,
            "is_causal": True,
            "window_size_left": left,
            "window_size_right": right,
        },
    )[0]
    return out


def _cuda(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    window: int = 0,
) -> Tensor:
    tensors = (query, key_cache, value_cache, block_table, seq_lens, query_start_loc)
    found = library()
    if found == "own":
        return _own(*tensors, scale, max_query_len, max_seq_len, window)
    _check(*tensors, scale, max_query_len, max_seq_len, window)
    if found == "fa2":
        return _fa2(*tensors, scale, max_query_len, max_seq_len, window)
    _, page, kv_heads, size = key_cache.shape
    sizes = (seq_lens.shape[0], max_query_len, max_seq_len, query.shape[1], kv_heads, size, page, 0, window)
    out = torch.empty_like(query)
    vendor_attention(*tensors, out, scale, Configuration(*sizes, query.dtype), None)
    return out


def _fake(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    window: int = 0,
) -> Tensor:
    _check(query, key_cache, value_cache, block_table, seq_lens, query_start_loc, scale, max_query_len, max_seq_len)
    return query.new_empty(query.shape)


define(
    "flash_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor seq_lens, "
    "Tensor query_start_loc, float scale, int max_query_len, int max_seq_len, int window=0) -> Tensor"
)
implement(_OP, _own, "CPU")
implement(_OP, _cuda, "CUDA")
fake(_OP, _fake)


def flash_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    window: int = 0,
) -> Tensor:
    """Causal attention of the last tokens of each row over its paged KV; see ``draftfuse.ops.paged_attention``.

    Args:
        query: floating[T, Hq, D]; key_cache, value_cache: [N, P, H, D]; block_table: i32[R, B].
        seq_lens: i32[R]; query_start_loc: i32[R+1].
        scale: factor of the scores.
        max_query_len, max_seq_len: host upper bounds, frozen at capture.
        window: sliding window, 0 for none.

    Returns:
        [T, Hq, D].

    Raises:
        OpArgumentError: a dtype or dim is wrong.
    """
    out: Tensor = torch.ops.draftfuse.flash_attention(
        query,
        key_cache,
        value_cache,
        block_table,
        seq_lens,
        query_start_loc,
        scale,
        max_query_len,
        max_seq_len,
        window,
    )
    return out
