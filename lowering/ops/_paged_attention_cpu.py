"""ATen implementation of ``paged_attention`` for the CPU, on checked arguments with at least one live row.

Shape letters: R requests (rows), T query tokens, Q query tokens of a row, Hq query heads, H KV heads, D head size,
P slots a page, L gathered KV positions of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _gather(cache: Tensor, pages: Tensor) -> Tensor:
    """Slots of ``pages`` [R, n] as float32 [R, H, L = n * P, D]: a fresh tensor, laid out for matrix products."""
    heads = torch.arange(cache.shape[2]).view(-1, 1, 1)
    return cache[pages[:, None, :, None], torch.arange(cache.shape[1]), heads].flatten(2, 3).float()


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Dense float32 attention: query [R, Q, Hq, D], key and value [R, H, L, D] (value is scratch), mask [R, Q, L]."""
    rows, queries, heads, head_size = query.shape
    kv_heads = key.shape[1]
    grouped = query.float().view(rows, queries, kv_heads, -1, head_size).permute(0, 2, 3, 1, 4).flatten(2, 3)
    unused = ~mask[:, None, None].expand(-1, -1, heads // kv_heads, -1, -1).flatten(2, 3)
    scores = (grouped @ key.transpose(2, 3)).mul_(scale).masked_fill_(unused, float("-inf"))
    weights = scores.softmax(-1).masked_fill_(unused, 0.0)  # a row that attends nothing gives 0, not NaN
    value.masked_fill_(~mask.any(1)[:, None, :, None], 0.0)  # unwritten slots may hold NaN, and 0 * NaN is NaN
    out = (weights @ value).view(rows, kv_heads, -1, queries, head_size)
    return out.permute(0, 3, 1, 2, 4).reshape(query.shape)


def attend_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int,
) -> Tensor:
    """All rows at once, over the pages that the longest row needs."""
    page = key_cache.shape[1]
    lens = seq_lens.to(torch.int64).unsqueeze(1)
    first = (lens - window).clamp(min=0) if window else torch.zeros_like(lens)
    first_page = first // page
    pages = int(((lens + page - 1) // page - first_page).max())
    columns = first_page + torch.arange(pages)
    table = block_table.gather(1, columns.clamp(max=block_table.shape[1] - 1))
    table = torch.where(columns * page < lens, table, 0)
    at = (columns.unsqueeze(2) * page + torch.arange(page)).flatten(1)
    mask = (at >= first) & (at < lens)
    keys, values = _gather(key_cache, table), _gather(value_cache, table)
    return _attend(query.unsqueeze(1), keys, values, mask.unsqueeze(1), scale).squeeze(1).to(query.dtype)


def _row_mask(first: int, stop: int, length: int, queries: int, window: int) -> Tensor:
    """[Q, L]: which of the positions from ``first`` to ``stop`` the last ``queries`` tokens of ``length`` attend."""
    at, last = torch.arange(first, stop), torch.arange(length - queries, length).unsqueeze(1)
    return (at <= last) & (at > last - window) if window else at <= last


def attend_ragged(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    window: int,
) -> Tensor:
    """A row at a time, so that one long prompt pads no other row."""
    page, out = key_cache.shape[1], query.new_zeros(query.shape)
    starts = query_start_loc.tolist()
    for row, length in enumerate(seq_lens.tolist()):
        begin, end = starts[row], starts[row + 1]
        if begin == end or length == 0:
            continue
        first_page = max(0, length - (end - begin) + 1 - window) // page if window else 0
        end_page = -(-length // page)
        table = block_table[row : row + 1, first_page:end_page]
        mask = _row_mask(first_page * page, end_page * page, length, end - begin, window)
        keys, values = _gather(key_cache, table), _gather(value_cache, table)
        out[begin:end] = _attend(query[None, begin:end], keys, values, mask[None], scale)[0].to(out.dtype)
    return out
