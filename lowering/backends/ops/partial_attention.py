"""Decode attention over a part of each row's KV, with its log-sum-exp, and the merge of such parts.

Shape letters: R requests (rows), Hq query heads, H KV heads, D head size, N blocks (pages), P slots a page,
B blocks a row of the block table, L = B * P, W parts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftfuse.lowering.ops._library import check_floating, check_tensor, define, fake, implement, known

_OP = "partial_attention"


def _check(query: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor, seq_lens: Tensor) -> None:
    check_floating(_OP, "query", query, "R, Hq, D")
    check_floating(_OP, "key_cache", key_cache, "N, P, H, D")
    check_floating(_OP, "value_cache", value_cache, "N, P, H, D")
    check_tensor(_OP, "block_table", block_table, "R, B", torch.int32)
    check_tensor(_OP, "seq_lens", seq_lens, "R", torch.int32)


def _attend(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor, seq_lens: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Dense over the whole table, so that shapes depend on nothing but host sizes; entries past a row are not used."""
    _check(query, key_cache, value_cache, block_table, seq_lens)
    rows, heads, size = query.shape
    page, kv_heads = key_cache.shape[1], key_cache.shape[2]
    at = torch.arange(block_table.shape[1] * page, device=query.device)
    used = at < seq_lens.unsqueeze(1)
    block = torch.where(used, block_table.to(torch.int64).repeat_interleave(page, dim=1), 0)
    keys, values = (cache[block, at % page].float().transpose(1, 2) for cache in (key_cache, value_cache))
    drop = ~used[:, None, None]
    values = values.masked_fill(~used[:, None, :, None], 0.0)  # a slot that nobody wrote may hold NaN
    grouped = query.float().view(rows, kv_heads, heads // kv_heads, size)
    scores = (grouped @ keys.transpose(2, 3) * scale).masked_fill(drop, float("-inf"))
    lse = scores.logsumexp(-1)
    weights = (scores - lse.unsqueeze(-1)).exp().masked_fill(drop, 0.0)
    return (weights @ values).view(rows, heads, size), lse.view(rows, heads).contiguous()


def _fake(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor, seq_lens: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    _check(query, key_cache, value_cache, block_table, seq_lens)
    out = query.new_empty(query.shape, dtype=torch.float32)
    return out, query.new_empty(query.shape[:2], dtype=torch.float32)


define(
    "partial_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor seq_lens, "
    "float scale) -> (Tensor, Tensor)"
)
implement(_OP, _attend, "CPU", "CUDA")
fake(_OP, _fake)


def partial_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor, seq_lens: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend one query token a row to all ``seq_lens`` entries of this part.

    Args:
        query: floating[R, Hq, D]; key_cache, value_cache: [N, P, H, D]; block_table: i32[R, B].
        seq_lens: i32[R], entries of this part; 0 where it holds none.
        scale: factor of the scores.

    Returns:
        (f32[R, Hq, D], f32[R, Hq]): the normalised result, and the log-sum-exp (-inf where a part is empty).

    Raises:
        OpArgumentError: a dtype or dim is wrong.
    """
    out, lse = torch.ops.draftfuse.partial_attention(query, key_cache, value_cache, block_table, seq_lens, scale)
    return out, lse


def merge_partials(outs: Tensor, lses: Tensor) -> Tensor:
    """One result of [W, R, Hq, D] parts and their [W, R, Hq] log-sum-exps; zeros where all parts are empty."""
    assert not known(outs.shape[0]) or outs.shape[:3] == lses.shape
    top = lses.max(0).values
    weights = (lses - torch.where(top == float("-inf"), 0.0, top)).exp()
    total = weights.sum(0)
    merged = (outs * weights.unsqueeze(-1)).sum(0)
    return merged / torch.where(total > 0, total, 1.0).unsqueeze(-1)
