"""Decode attention in FlashInfer's layouts: by a host plan (pages behind pages), and planner-free (block table).

The planned form attends with draftfuse's own kernel over the plan's pages. The planner-free form is FlashInfer's
``trtllm_batch_decode_with_kv_cache`` on CUDA, and draftfuse's own kernel where that is missing.

Shape letters: R requests (rows), Hq query heads, H KV heads, D head size, N blocks (pages), P slots a page,
C capacity of the page list, B blocks a row of the block table.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from draftfuse.lowering.ops._library import check_floating, check_tensor, define, fake, implement
from draftfuse.lowering.ops.paged_attention import paged_attention

WORKSPACE_BYTES = 128 << 20
_workspaces: dict[torch.device, Tensor] = {}


def _check(query: Tensor, key_cache: Tensor, value_cache: Tensor, op: str) -> None:
    check_floating(op, "query", query, "R, Hq, D")
    check_floating(op, "key_cache", key_cache, "N, P, H, D")
    check_floating(op, "value_cache", value_cache, "N, P, H, D")


def _planned(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_len: Tensor,
    scale: float,
) -> Tensor:
    """Rows of pages cut out of the list into a block table."""
    _check_planned(query, key_cache, value_cache, kv_indptr, kv_indices, kv_last_page_len, scale)
    pages = kv_indptr.diff()
    rows = max(1, pages.shape[0])
    width = kv_indices.shape[0] // rows  # a plan of R rows of the table has room for R * B pages
    at = kv_indptr[:-1].unsqueeze(1) + torch.arange(width, device=query.device)
    table = kv_indices[at.clamp(max=kv_indices.shape[0] - 1)]
    lens = torch.where(pages > 0, (pages - 1) * key_cache.shape[1] + kv_last_page_len, 0).to(torch.int32)
    return paged_attention(query, key_cache, value_cache, table, lens, None, scale)


def _check_planned(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_len: Tensor,
    scale: float,
) -> Tensor:
    _check(query, key_cache, value_cache, "planned_decode")
    check_tensor("planned_decode", "kv_indptr", kv_indptr, "R+1", torch.int32)
    check_tensor("planned_decode", "kv_indices", kv_indices, "C", torch.int32)
    check_tensor("planned_decode", "kv_last_page_len", kv_last_page_len, "R", torch.int32)
    return query.new_empty(query.shape)


define(
    "planned_decode(Tensor query, Tensor key_cache, Tensor value_cache, Tensor kv_indptr, Tensor kv_indices, "
    "Tensor kv_last_page_len, float scale) -> Tensor"
)
implement("planned_decode", _planned, "CPU", "CUDA")
fake("planned_decode", _check_planned)


def _check_free(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    max_seq_len: int,
) -> Tensor:
    _check(query, key_cache, value_cache, "planner_free_decode")
    check_tensor("planner_free_decode", "block_table", block_table, "R, B", torch.int32)
    check_tensor("planner_free_decode", "seq_lens", seq_lens, "R", torch.int32)
    return query.new_empty(query.shape)


def _free_own(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    max_seq_len: int,
) -> Tensor:
    _check_free(query, key_cache, value_cache, block_table, seq_lens, scale, max_seq_len)
    return paged_attention(query, key_cache, value_cache, block_table, seq_lens, None, scale)


def _free_cuda(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    max_seq_len: int,
) -> Tensor:
    if find_spec("flashinfer") is None or torch.cuda.get_device_capability(query.device) != (10, 0):
        return _free_own(query, key_cache, value_cache, block_table, seq_lens, scale, max_seq_len)
    from flashinfer.decode import trtllm_batch_decode_with_kv_cache

    if query.device not in _workspaces:
        _workspaces[query.device] = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=query.device)
    out: Tensor = trtllm_batch_decode_with_kv_cache(
        query=query,
        kv_cache=(key_cache, value_cache),
        workspace_buffer=_workspaces[query.device],
        block_tables=block_table,
        seq_lens=seq_lens,
        max_seq_len=max_seq_len,
        bmm1_scale=scale,
        bmm2_scale=1.0,
        kv_layout="NHD",
    )
    return out


define(
    "planner_free_decode(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor seq_lens, "
    "float scale, int max_seq_len) -> Tensor"
)
implement("planner_free_decode", _free_own, "CPU")
implement("planner_free_decode", _free_cuda, "CUDA")
fake("planner_free_decode", _check_free)


def planned_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_len: Tensor,
    scale: float,
) -> Tensor:
    """Attend one query token a row by a host plan: [R, Hq, D] -> [R, Hq, D]."""
    out: Tensor = torch.ops.draftfuse.planned_decode(
        query, key_cache, value_cache, kv_indptr, kv_indices, kv_last_page_len, scale
    )
    return out


def planner_free_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    max_seq_len: int,
) -> Tensor:
    """Attend one query token a row without a plan: [R, Hq, D] -> [R, Hq, D]."""
    out: Tensor = torch.ops.draftfuse.planner_free_decode(
        query, key_cache, value_cache, block_table, seq_lens, scale, max_seq_len
    )
    return out
