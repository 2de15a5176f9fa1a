"""Logits of a sparse-attention indexer over a paged cache of compressed keys, in the order of a precomputed schedule.

Shape letters: R requests (rows, one query token each), I indexer heads, D indexer head size, N blocks (pages),
P compressed slots a page, B blocks a row of the block table, S processors in the schedule, L = B * P.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftfuse.lowering.ops._library import (
    check_floating,
    check_same_device,
    check_size,
    check_tensor,
    define,
    fake,
    implement,
    require_triton,
)

_OP = "index_logits"
SPLIT = 64  # compressed entries in one unit of work


def plan_schedule(lens: Tensor, processors: int) -> Tensor:
    """i32[S + 1, 2]: (row, unit in the row) where each processor begins; the last line is where the work ends."""
    units = (lens.to(torch.int64) + (SPLIT - 1)) // SPLIT
    ends = units.cumsum(0)
    begins = torch.arange(processors + 1, device=lens.device) * ends[-1] // processors
    row = torch.searchsorted(ends, begins, right=True)
    before = torch.cat([ends.new_zeros(1), ends])
    return torch.stack([row, begins - before[row]], dim=1).to(torch.int32)


def _check(
    query: Tensor, weights: Tensor, key_cache: Tensor, block_table: Tensor, lens: Tensor, schedule: Tensor
) -> None:
    check_floating(_OP, "query", query, "R, I, D")
    check_floating(_OP, "weights", weights, "R, I")
    check_floating(_OP, "key_cache", key_cache, "N, P, D")
    check_tensor(_OP, "block_table", block_table, "R, B", torch.int32)
    check_tensor(_OP, "lens", lens, "R", torch.int32)
    check_tensor(_OP, "schedule", schedule, "S+1, 2", torch.int32)


def _check_sizes(
    query: Tensor, weights: Tensor, key_cache: Tensor, block_table: Tensor, lens: Tensor, schedule: Tensor
) -> None:
    rows = lens.shape[0]
    for name, tensor in (("query", query), ("weights", weights), ("block_table", block_table)):
        check_size(_OP, f"{name} has other rows than lens", tensor.shape[0], rows, f"Slice {name}[:R].")
    check_size(_OP, "query has another head size than the cache", query.shape[2], key_cache.shape[2], "Pass one size.")
    check_same_device(_OP, query=query, key_cache=key_cache, block_table=block_table, lens=lens, schedule=schedule)


def reference(
    query: Tensor, weights: Tensor, key_cache: Tensor, block_table: Tensor, lens: Tensor, schedule: Tensor
) -> Tensor:
    """The meaning: ``sum_i weights[i] * relu(query[i] . key)`` of every entry that the schedule covers, else -inf."""
    page = key_cache.shape[1]
    logits = query.new_full((lens.shape[0], block_table.shape[1] * page), float("-inf"), dtype=torch.float32)
    (row, unit), (last_row, last_unit) = schedule[0].tolist(), schedule[-1].tolist()
    while (row, unit) < (last_row, last_unit) and row < lens.shape[0]:
        begin, end = unit * SPLIT, min(int(lens[row]), (unit + 1) * SPLIT)
        if begin < end:
            entries = torch.arange(begin, end)
            keys = key_cache[block_table[row, entries // page].to(torch.int64), entries % page].float()
            logits[row, entries] = weights[row].float() @ torch.relu(query[row].float() @ keys.T)
            unit += 1
        else:
            row, unit = row + 1, 0
    return logits


def _cpu(
    query: Tensor, weights: Tensor, key_cache: Tensor, block_table: Tensor, lens: Tensor, schedule: Tensor
) -> Tensor:
    _check(query, weights, key_cache, block_table, lens, schedule)
    _check_sizes(query, weights, key_cache, block_table, lens, schedule)
    return reference(query, weights, key_cache, block_table, lens, schedule)


def _cuda(
    query: Tensor, weights: Tensor, key_cache: Tensor, block_table: Tensor, lens: Tensor, schedule: Tensor
) -> Tensor:
    _check(query, weights, key_cache, block_table, lens, schedule)
    _check_sizes(query, weights, key_cache, block_table, lens, schedule)
    require_triton(_OP)
    from draftfuse.lowering.backends.ops._index_triton import launch_logits

    return launch_logits(query, weights, key_cache, block_table, lens, schedule)


def _fake(
    query: Tensor, weights: Tensor, key_cache: Tensor, block_table: Tensor, lens: Tensor, schedule: Tensor
) -> Tensor:
    _check(query, weights, key_cache, block_table, lens, schedule)
    shape = (lens.shape[0], block_table.shape[1] * key_cache.shape[1])
    return query.new_empty(shape, dtype=torch.float32)


define(
    "index_logits(Tensor query, Tensor weights, Tensor key_cache, Tensor block_table, Tensor lens, Tensor schedule) "
    "-> Tensor"
)
implement(_OP, _cpu, "CPU")
implement(_OP, _cuda, "CUDA")
fake(_OP, _fake)


def index_logits(
    query: Tensor, weights: Tensor, key_cache: Tensor, block_table: Tensor, lens: Tensor, schedule: Tensor
) -> Tensor:
    """Score the compressed entries of each row.

    Args:
        query: floating[R, I, D]; weights: floating[R, I]; key_cache: floating[N, P, D].
        block_table: i32[R, B]; lens: i32[R], compressed entries of a row, 0 for a padded one.
        schedule: i32[S+1, 2], from :func:`plan_schedule` for exactly these ``lens``.

    Returns:
        f32[R, B * P]; -inf where a row has no entry.

    Raises:
        OpArgumentError: a dtype, dim, size or device is wrong.
    """
    out: Tensor = torch.ops.draftfuse.index_logits(query, weights, key_cache, block_table, lens, schedule)
    return out


def index_topk(logits: Tensor, block_table: Tensor, lens: Tensor, page_size: int, topk: int) -> tuple[Tensor, Tensor]:
    """(i32[R, k] compressed slots of the best entries, i32[R] how many there are); a composite, made to be fused."""
    best = logits.topk(min(topk, logits.shape[1]), dim=1).indices
    block = block_table.gather(1, best // page_size).to(torch.int64)
    counts = lens.clamp(max=best.shape[1]).to(torch.int32)
    used = torch.arange(best.shape[1], device=best.device) < counts.unsqueeze(1)
    return torch.where(used, block * page_size + best % page_size, -1).to(torch.int32), counts
