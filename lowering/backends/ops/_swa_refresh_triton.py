"""Triton kernel of ``swa_refresh``: one program a token."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from draftfuse.lowering.ops._paged_attention_plan import next_power_of_2


@triton.jit(do_not_specialize=["num_reqs"])  # type: ignore[untyped-decorator]
def _row_of_token(query_start_loc: tl.tensor, num_reqs: tl.tensor, token: tl.tensor) -> tl.tensor:
    """The smallest row whose end lies past ``token``, the last row at most."""
    low = 0
    high = num_reqs
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_start_loc + middle + 1) <= token:
            low = middle + 1
        else:
            high = middle
    return tl.minimum(low, num_reqs - 1)


@triton.jit(do_not_specialize=["num_reqs"])  # type: ignore[untyped-decorator]
def _refresh(
    slot_mapping: tl.tensor,
    seq_lens: tl.tensor,
    query_start_loc: tl.tensor,
    block_table: tl.tensor,
    is_valid: tl.tensor,
    token_to_req: tl.tensor,
    lens: tl.tensor,
    indices: tl.tensor,
    num_reqs: tl.tensor,
    columns: tl.tensor,
    table_r: tl.tensor,
    index_t: tl.tensor,
    WINDOW: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0)
    row = _row_of_token(query_start_loc, num_reqs, token)
    valid = tl.load(slot_mapping + token) >= 0
    position = tl.load(seq_lens + row) - tl.load(query_start_loc + row + 1) + token
    first = tl.maximum(position - WINDOW + 1, 0)
    length = tl.where(valid, position + 1 - first, 0)
    tl.store(is_valid + token, valid)
    tl.store(token_to_req + token, row)
    tl.store(lens + token, length)
    table = block_table + row.to(tl.int64) * table_r
    out = indices + token.to(tl.int64) * index_t
    for start in range(0, WIDTH, BLOCK):
        j = start + tl.arange(0, BLOCK)
        used = j < length
        at = first + j
        block = tl.load(table + tl.minimum(at // PAGE, columns - 1), mask=used, other=0)
        tl.store(out + j, tl.where(used, block * PAGE + at % PAGE, -1), mask=j < WIDTH)


def launch(
    slot_mapping: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    block_table: Tensor,
    is_valid: Tensor,
    token_to_req: Tensor,
    lens: Tensor,
    indices: Tensor,
    window: int,
    page_size: int,
) -> None:
    """Launch on checked arguments whose last dims are dense; no sync, so safe in capture."""
    if slot_mapping.shape[0] == 0:
        return
    width = indices.shape[1]
    _refresh[(slot_mapping.shape[0],)](
        slot_mapping,
        seq_lens,
        query_start_loc,
        block_table,
        is_valid,
        token_to_req,
        lens,
        indices,
        seq_lens.shape[0],
        block_table.shape[1],
        block_table.stride(0),
        indices.stride(0),
        WINDOW=window,
        WIDTH=width,
        PAGE=page_size,
        BLOCK=min(256, next_power_of_2(width)),
        num_warps=2,
    )
