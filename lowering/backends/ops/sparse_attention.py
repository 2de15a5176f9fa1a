"""Decode attention over an explicit list of KV slots for each token, dense rows or ragged.

Shape letters: T query tokens, Hq query heads, H KV heads, D head size, N blocks (pages), P slots a page,
W index columns, C capacity of the ragged list.
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

_OP = "sparse_attention"
TILE = 64  # slots that one iteration of the kernel attends; plans count in tiles


def plan_tiles(lens: Tensor) -> Tensor:
    """i32[T]: how many tiles of ``TILE`` slots each token attends. What a tile scheduler plans once a step."""
    return ((lens + (TILE - 1)) // TILE).to(torch.int32)


def _check(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, indices: Tensor, lens: Tensor, tiles: Tensor | None
) -> None:
    check_floating(_OP, "query", query, "T, Hq, D")
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        check_floating(_OP, name, cache, "N, P, H, D")
        check_same_dtype(_OP, name, cache, "query", query)
    if indices.dim() not in (1, 2):
        fail(_OP, "indices has a wrong number of dims", indices.dim(), "1 (ragged) or 2 (a row a token)", "Reshape it.")
    check_tensor(_OP, "indices", indices, "C" if indices.dim() == 1 else "T, W", torch.int32)
    check_tensor(_OP, "lens", lens, "T + 1" if indices.dim() == 1 else "T", torch.int32)
    if tiles is not None:
        check_tensor(_OP, "tiles", tiles, "T", torch.int32)


def _check_sizes(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, indices: Tensor, lens: Tensor, tiles: Tensor | None
) -> None:
    tokens, heads, head_size = query.shape
    expected = tokens + 1 if indices.dim() == 1 else tokens
    todo = "Pass indptr of T + 1 entries beside ragged indices, one length a token beside indices of two dims."
    check_size(_OP, "lens does not fit query", lens.shape[0], expected, todo)
    if indices.dim() == 2:
        check_size(_OP, "indices has other rows than query", indices.shape[0], tokens, "Slice indices[:T].")
    if tiles is not None:
        check_size(_OP, "tiles has other rows than query", tiles.shape[0], tokens, "Plan anew for this batch.")
    check_size(_OP, "query has another head size than the caches", head_size, key_cache.shape[3], "Pass [T, Hq, D].")
    check_size(_OP, "caches differ in shape", tuple(value_cache.shape), tuple(key_cache.shape), "Allocate both alike.")
    if heads % key_cache.shape[2]:
        fail(_OP, "query heads do not group", heads, f"a multiple of {key_cache.shape[2]}", "Pass one group a KV head.")
    check_same_device(_OP, query=query, key_cache=key_cache, value_cache=value_cache, indices=indices, lens=lens)


def rows_of(indices: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
    """(i64[T, W] slots, i64[T] lengths) of either layout."""
    if indices.dim() == 2:
        return indices.to(torch.int64), lens.to(torch.int64)
    begin, counts = lens[:-1].to(torch.int64), lens.diff().to(torch.int64)
    at = begin.unsqueeze(1) + torch.arange(int(counts.max()) if counts.numel() else 0, device=lens.device)
    return indices[at.clamp(max=indices.shape[0] - 1)].to(torch.int64), counts


def reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    indices: Tensor,
    lens: Tensor,
    tiles: Tensor | None,
    scale: float,
) -> Tensor:
    """The meaning, a token at a time, in float32."""
    page, group = key_cache.shape[1], query.shape[1] // key_cache.shape[2]
    slots, counts = rows_of(indices, lens)
    out = torch.zeros_like(query)
    for token, count in enumerate(counts.tolist()):
        used = min(count, int(tiles[token]) * TILE) if tiles is not None else count
        mine = slots[token, :used]
        mine = mine[mine >= 0]
        if len(mine):
            keys = key_cache[mine // page, mine % page].float().repeat_interleave(group, 1)
            values = value_cache[mine // page, mine % page].float().repeat_interleave(group, 1)
            weights = (torch.einsum("hd,lhd->hl", query[token].float(), keys) * scale).softmax(-1)
            out[token] = torch.einsum("hl,lhd->hd", weights, values).to(out.dtype)
    return out


def _cpu(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    indices: Tensor,
    lens: Tensor,
    tiles: Tensor | None,
    scale: float,
) -> Tensor:
    _check(query, key_cache, value_cache, indices, lens, tiles)
    _check_sizes(query, key_cache, value_cache, indices, lens, tiles)
    page, (tokens, heads, size) = key_cache.shape[1], query.shape
    slots, counts = rows_of(indices, lens)
    used = counts if tiles is None else torch.minimum(counts, tiles.to(torch.int64) * TILE)
    mask = (torch.arange(slots.shape[1]) < used.unsqueeze(1)) & (slots >= 0)
    slots = torch.where(mask, slots, 0)
    keys, values = (c[slots // page, slots % page].float().transpose(1, 2) for c in (key_cache, value_cache))
    grouped = query.float().view(tokens, key_cache.shape[2], -1, size)
    drop = ~mask[:, None, None, :]
    scores = (grouped @ keys.transpose(2, 3) * scale).masked_fill(drop, float("-inf"))
    weights = scores.softmax(-1).masked_fill(drop, 0.0)
    values = values.masked_fill(~mask[:, None, :, None], 0.0)  # a slot that nobody wrote may hold NaN
    return (weights @ values).view(tokens, heads, size).to(query.dtype)


def _cuda(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    indices: Tensor,
    lens: Tensor,
    tiles: Tensor | None,
    scale: float,
) -> Tensor:
    _check(query, key_cache, value_cache, indices, lens, tiles)
    _check_sizes(query, key_cache, value_cache, indices, lens, tiles)
    require_triton(_OP)
    from draftfuse.lowering.backends.ops._sparse_attention_triton import launch

    return launch(query, key_cache, value_cache, indices, lens, tiles, scale)


def _fake(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    indices: Tensor,
    lens: Tensor,
    tiles: Tensor | None,
    scale: float,
) -> Tensor:
    _check(query, key_cache, value_cache, indices, lens, tiles)
    return query.new_empty(query.shape)


define(
    "sparse_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor indices, Tensor lens, "
    "Tensor? tiles, float scale) -> Tensor"
)
implement(_OP, _cpu, "CPU")
implement(_OP, _cuda, "CUDA")
fake(_OP, _fake)


def sparse_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    indices: Tensor,
    lens: Tensor,
    scale: float,
    tiles: Tensor | None = None,
) -> Tensor:
    """Attend, for each token, the KV slots that its list names.

    Args:
        query: floating[T, Hq, D], Hq a multiple of H.
        key_cache, value_cache: [N, P, H, D] of the same dtype, any strides.
        indices: i32[T, W], a list a token; or i32[C], the lists one behind the other. Negative entries are skipped.
        lens: i32[T], how many entries of its row a token attends; or, for ragged indices, i32[T + 1], where its list
            begins and the next one's.
        scale: factor of the scores.
        tiles: i32[T], an upper bound of tiles that a token attends (:func:`plan_tiles`), as tile schedulers plan it.

    Returns:
        [T, Hq, D], contiguous; zeros for a token without slots.

    Raises:
        OpArgumentError: a dtype, dim, size or device is wrong.
    """
    out: Tensor = torch.ops.draftfuse.sparse_attention(query, key_cache, value_cache, indices, lens, tiles, scale)
    return out
