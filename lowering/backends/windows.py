"""Index arithmetic that metadata builders share: plain PyTorch, made to be traced into a refresh.

Shape letters: R requests (rows), T tokens, B blocks a row of the block table, P slots a page, W index columns.
"""

from __future__ import annotations

import torch
from torch import Tensor


def token_to_request(query_start_loc: Tensor, num_tokens: int) -> Tensor:
    """i32[T]: the row of each token, the last row for tokens past ``query_start_loc[R]``."""
    tokens = torch.arange(num_tokens, dtype=query_start_loc.dtype, device=query_start_loc.device)
    rows = torch.searchsorted(query_start_loc[1:], tokens, right=True)
    return rows.clamp(max=query_start_loc.shape[0] - 2).to(torch.int32)


def token_positions(seq_lens: Tensor, query_start_loc: Tensor, rows: Tensor) -> Tensor:
    """i64[T]: the position of each token, ``seq_len - query_len + place in its query``."""
    rows = rows.to(torch.int64)
    tokens = torch.arange(rows.shape[0], device=rows.device)
    return seq_lens[rows].to(torch.int64) - query_start_loc[rows + 1] + tokens


def window_bounds(positions: Tensor, valid: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """(first, length) of the last ``window`` positions up to each token's own; length 0 where a token is not valid."""
    first = (positions - window + 1).clamp(min=0)
    return first, torch.where(valid, positions + 1 - first, 0)


def slots_through_table(block_table: Tensor, rows: Tensor, at: Tensor, page_size: int) -> Tensor:
    """Slot of position ``at`` (any shape) of row ``rows`` (same shape); columns past the table are clamped."""
    column = (at // page_size).clamp(min=0, max=block_table.shape[1] - 1)
    return block_table[rows.to(torch.int64), column].to(torch.int64) * page_size + at % page_size


def window_slots(block_table: Tensor, rows: Tensor, first: Tensor, lens: Tensor, width: int, page_size: int) -> Tensor:
    """i32[T, W]: slots of ``lens`` positions from ``first`` on, then -1."""
    column = torch.arange(width, device=rows.device)
    at = first.unsqueeze(1) + column
    slots = slots_through_table(block_table, rows.unsqueeze(1).expand(at.shape), at, page_size)
    return torch.where(column < lens.unsqueeze(1), slots, -1).to(torch.int32)


def ragged_window_slots(
    block_table: Tensor, rows: Tensor, first: Tensor, lens: Tensor, capacity: int, page_size: int
) -> tuple[Tensor, Tensor]:
    """(i32[capacity] slots of all tokens one behind the other, then -1; i32[T+1] where each token's begin)."""
    ends = lens.cumsum(0)
    places = torch.arange(capacity, device=rows.device)
    token = torch.searchsorted(ends, places, right=True).clamp(max=rows.shape[0] - 1)
    at = first[token] + places - (ends - lens)[token]
    slots = slots_through_table(block_table, rows[token], at, page_size)
    indices = torch.where(places < ends[-1], slots, -1).to(torch.int32)
    return indices, torch.cat([ends.new_zeros(1), ends]).to(torch.int32)
