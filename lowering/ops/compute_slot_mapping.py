"""Where each token's key and value go in a paged KV cache.

Shape letters: R requests (rows), T tokens, B blocks a row of the block table, P slots a page.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftfuse.lowering.ops._library import check_size, check_tensor, fail


def _check(
    positions: Tensor, seq_lens: Tensor, block_table: Tensor, page_size: int, query_start_loc: Tensor | None
) -> None:
    op = "compute_slot_mapping"
    check_tensor(op, "positions", positions, "T", torch.int64)
    check_tensor(op, "seq_lens", seq_lens, "R", torch.int32)
    check_tensor(op, "block_table", block_table, "R, B", torch.int32)
    if page_size < 1:
        fail(op, "page_size is no page size", page_size, "page_size >= 1", "Pass the slots a page of this KV cache.")
    rows = seq_lens.shape[0]
    check_size(op, "block_table has other rows than seq_lens", block_table.shape[0], rows, "Slice block_table[:R].")
    if query_start_loc is None:
        todo = "Slice positions to one token a row, or pass query_start_loc."
        check_size(op, "positions has other rows than seq_lens", positions.shape[0], rows, todo)
    else:
        check_tensor(op, "query_start_loc", query_start_loc, "R+1", torch.int32)
        todo = "Slice query_start_loc[:R + 1]."
        check_size(op, "query_start_loc does not fit seq_lens", query_start_loc.shape[0], rows + 1, todo)


def reference(
    positions: Tensor, seq_lens: Tensor, block_table: Tensor, page_size: int, query_start_loc: Tensor | None = None
) -> Tensor:
    """The meaning, a token at a time."""
    rows = seq_lens.shape[0]
    starts = list(range(rows + 1)) if query_start_loc is None else query_start_loc.tolist()
    slots = torch.full_like(positions, -1)
    for row in range(rows):
        for token in range(starts[row], min(starts[row + 1], positions.shape[0])):
            position = int(positions[token])
            column, offset = divmod(position, page_size)
            if 0 <= position < int(seq_lens[row]) and column < block_table.shape[1]:
                slots[token] = int(block_table[row, column]) * page_size + offset
    return slots


def _rows_of_tokens(positions: Tensor, query_start_loc: Tensor) -> tuple[Tensor, Tensor]:
    """For each token its row, clamped, and whether it belongs to one."""
    tokens = torch.arange(positions.shape[0], dtype=query_start_loc.dtype, device=positions.device)
    rows = torch.searchsorted(query_start_loc[1:], tokens, right=True)
    return rows.clamp(max=query_start_loc.shape[0] - 2), tokens < query_start_loc[-1]


def compute_slot_mapping(
    positions: Tensor, seq_lens: Tensor, block_table: Tensor, page_size: int, query_start_loc: Tensor | None = None
) -> Tensor:
    """Slot ``block_table[r, position // P] * P + position % P`` of each token; -1 where nothing may be written.

    A composite: plain PyTorch without a registered op, made to be traced into the draft loop and fused with what
    stands around it. A token gets -1 if its row is not live (``position >= seq_len``: padded, or at the length limit),
    if its position lies past the block table, or if it lies past ``query_start_loc[R]``. A column past the table is
    clamped before the read, so the table is never read out of bounds, and what a dead row reads is discarded.

    Args:
        positions: i64[T].
        seq_lens: i32[R], the token being written included; 0 for a padded row.
        block_table: i32[R, B]; a negative entry gives a negative slot, which ``write_kv`` skips.
        page_size: P, a Python integer.
        query_start_loc: i32[R+1], or None for decode: one token a row, T == R.

    Returns:
        i64[T].

    Raises:
        OpArgumentError: a dtype, dim, size or ``page_size`` is wrong.
    """
    _check(positions, seq_lens, block_table, page_size, query_start_loc)
    column = positions // page_size
    live = (positions >= 0) & (column < block_table.shape[1])
    column = column.clamp(min=0, max=block_table.shape[1] - 1)
    if query_start_loc is None:
        live = live & (positions < seq_lens)
        block = block_table.gather(1, column.unsqueeze(1)).squeeze(1)
    else:
        rows, owned = _rows_of_tokens(positions, query_start_loc)
        live = live & owned & (positions < seq_lens[rows])
        block = block_table[rows, column]
    return torch.where(live, block.to(torch.int64) * page_size + positions % page_size, -1)
