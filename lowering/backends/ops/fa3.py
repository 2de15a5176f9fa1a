"""FlashAttention 3 with its schedule made ahead of time: the plan into a persistent buffer, and the attention by it.

The length of a plan depends on the library's configuration and version, so it is asked of the library when the
operator runs, and is no part of any graph. On the CPU both operators have stand-ins: a schedule of splits, and an
attention that attends what the schedule says, so that a stale schedule shows.

Shape letters: R requests (rows), T query tokens, Hq query heads, H KV heads, D head size, N blocks (pages),
P slots a page, B blocks a row of the block table, S capacity of the schedule.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from draftfuse.lowering.backends.ops._vendors import call, require_fa3
from draftfuse.lowering.ops._library import check_floating, check_tensor, define, fail, fake, implement
from draftfuse.lowering.ops.paged_attention import paged_attention

CPU_SPLIT = 8  # tokens of one split of the CPU stand-in


class Configuration(NamedTuple):
    """What the length of a plan depends on; all of it is known on the host."""

    rows: int
    max_query_len: int
    max_seq_len: int
    heads: int
    kv_heads: int
    head_size: int
    page_size: int
    num_splits: int
    window: int
    dtype: torch.dtype


_LENGTHS: dict[Configuration, int] = {}  # what was asked of the library so far; begun anew when it gets long
_MAX_LENGTHS = 4096


def schedule_capacity(max_num_reqs: int) -> int:
    """Entries that hold every plan for up to ``max_num_reqs`` rows: four vectors of whole 16-byte words, a counter."""
    return 1 + 4 * (-(-max_num_reqs // 4) * 4)


def vendor_plan(config: Configuration, seq_lens: Tensor, query_start_loc: Tensor) -> Tensor:
    """A fresh plan of the library."""
    operator = getattr(torch.ops, require_fa3()).get_scheduler_metadata.default
    left, right = window_sides(config.window)
    plan: Tensor = call(
        operator,
        {
            "batch_size": config.rows,
            "max_seqlen_q": config.max_query_len,
            "max_seqlen_k": config.max_seq_len,
            "num_heads": config.heads,
            "num_heads_k": config.kv_heads,
            "headdim": config.head_size,
            "headdim_v": config.head_size,
            "qkv_dtype": config.dtype,
            "seqused_k": seq_lens,
            "cu_seqlens_q": query_start_loc,
            "page_size": config.page_size,
            "is_causal": True,
            "window_size_left": left,
            "window_size_right": right,
            "num_splits": config.num_splits,
        },
    )
    if len(_LENGTHS) >= _MAX_LENGTHS:
        _LENGTHS.clear()
    _LENGTHS[config] = plan.numel()
    return plan


def window_sides(window: int) -> tuple[int, int]:
    """The library's (left, right) window; ``window`` counts the token itself, 0 is none."""
    return (window - 1, 0) if window else (-1, -1)


def _check_schedule(
    seq_lens: Tensor,
    query_start_loc: Tensor,
    schedule: Tensor,
    max_query_len: int,
    max_seq_len: int,
    heads: int,
    kv_heads: int,
    head_size: int,
    page_size: int,
    num_splits: int,
    window: int,
    dtype: torch.dtype,
) -> None:
    op = "fa3_schedule"
    for name, tensor, shape in (
        ("seq_lens", seq_lens, "R"),
        ("query_start_loc", query_start_loc, "R+1"),
        ("schedule", schedule, "S"),
    ):
        check_tensor(op, name, tensor, shape, torch.int32)
    if heads % kv_heads:
        fail(op, "query heads do not group over KV heads", heads, f"a multiple of {kv_heads}", "Pass the draft's own.")


def _store_plan(plan: Tensor, schedule: Tensor) -> None:
    length = plan.numel()
    if length > schedule.numel():
        todo = "Allocate schedule_capacity(max_num_reqs) entries for the largest batch."
        fail("fa3_schedule", "the plan does not fit its buffer", length, f"at most {schedule.numel()}", todo)
    schedule[:length].copy_(plan)
    schedule[length:].zero_()


def reference_plan(seq_lens: Tensor, query_start_loc: Tensor, num_splits: int) -> Tensor:
    """The stand-in's plan: a vector of query lengths, a vector of splits, each in whole 16-byte words; a counter."""
    rows = seq_lens.shape[0]
    plan = seq_lens.new_zeros(1 + 2 * (-(-rows // 4) * 4))
    second = (plan.shape[0] - 1) // 2
    splits = (seq_lens + (CPU_SPLIT - 1)) // CPU_SPLIT
    plan[:rows] = query_start_loc.diff() * (seq_lens > 0)
    plan[second : second + rows] = splits.clamp(max=num_splits) if num_splits else splits
    return plan


def _schedule_cpu(
    seq_lens: Tensor,
    query_start_loc: Tensor,
    schedule: Tensor,
    max_query_len: int,
    max_seq_len: int,
    heads: int,
    kv_heads: int,
    head_size: int,
    page_size: int,
    num_splits: int,
    window: int,
    dtype: torch.dtype,
) -> None:
    config = (max_query_len, max_seq_len, heads, kv_heads, head_size, page_size, num_splits, window, dtype)
    _check_schedule(seq_lens, query_start_loc, schedule, *config)
    _store_plan(reference_plan(seq_lens, query_start_loc, num_splits), schedule)


def _schedule_cuda(
    seq_lens: Tensor,
    query_start_loc: Tensor,
    schedule: Tensor,
    max_query_len: int,
    max_seq_len: int,
    heads: int,
    kv_heads: int,
    head_size: int,
    page_size: int,
    num_splits: int,
    window: int,
    dtype: torch.dtype,
) -> None:
    config = (max_query_len, max_seq_len, heads, kv_heads, head_size, page_size, num_splits, window, dtype)
    _check_schedule(seq_lens, query_start_loc, schedule, *config)
    _store_plan(vendor_plan(Configuration(seq_lens.shape[0], *config), seq_lens, query_start_loc), schedule)


define(
    "fa3_schedule(Tensor seq_lens, Tensor query_start_loc, Tensor(a!) schedule, int max_query_len, int max_seq_len, "
    "int heads, int kv_heads, int head_size, int page_size, int num_splits, int window, ScalarType dtype) -> ()"
)
implement("fa3_schedule", _schedule_cpu, "CPU")
implement("fa3_schedule", _schedule_cuda, "CUDA")
fake("fa3_schedule", _check_schedule)


def _check_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    schedule: Tensor,
    out: Tensor,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    num_splits: int,
    window: int,
) -> None:
    op = "fa3_attention"
    for name, tensor, shape in (
        ("query", query, "T, Hq, D"),
        ("out", out, "T, Hq, D"),
        ("key_cache", key_cache, "N, P, H, D"),
        ("value_cache", value_cache, "N, P, H, D"),
    ):
        check_floating(op, name, tensor, shape)
    check_tensor(op, "block_table", block_table, "R, B", torch.int32)
    for name, tensor, shape in (
        ("seq_lens", seq_lens, "R"),
        ("query_start_loc", query_start_loc, "R+1"),
        ("schedule", schedule, "S"),
    ):
        check_tensor(op, name, tensor, shape, torch.int32)


def _attention_cpu(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    schedule: Tensor,
    out: Tensor,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    num_splits: int,
    window: int,
) -> None:
    tensors = (query, key_cache, value_cache, block_table, seq_lens, query_start_loc, schedule, out)
    _check_attention(*tensors, scale, max_query_len, max_seq_len, num_splits, window)
    rows = seq_lens.shape[0]
    second = -(-rows // 4) * 4
    splits = schedule[second : second + rows]
    lens = seq_lens if num_splits else torch.minimum(seq_lens, splits * CPU_SPLIT)
    starts = None if max_query_len == 1 else query_start_loc
    out.copy_(paged_attention(query, key_cache, value_cache, block_table, lens, starts, scale, window))


def _attention_cuda(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    schedule: Tensor,
    out: Tensor,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    num_splits: int,
    window: int,
) -> None:
    tensors = (query, key_cache, value_cache, block_table, seq_lens, query_start_loc, schedule, out)
    _check_attention(*tensors, scale, max_query_len, max_seq_len, num_splits, window)
    _, page, kv_heads, size = key_cache.shape
    config = Configuration(
        seq_lens.shape[0],
        max_query_len,
        max_seq_len,
        query.shape[1],
        kv_heads,
        size,
        page,
        num_splits,
        window,
        query.dtype,
    )
    if config not in _LENGTHS:
        vendor_plan(config, torch.zeros_like(seq_lens), query_start_loc)
    vendor_attention(*tensors[:6], out, scale, config, schedule[: _LENGTHS[config]])


def vendor_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    out: Tensor,
    scale: float,
    config: Configuration,
    schedule: Tensor | None,
) -> None:
    """The library's forward; without a schedule it makes its own inside."""
    operator = getattr(torch.ops, require_fa3()).fwd.default
    left, right = window_sides(config.window)
    call(
        operator,
        {
            "q": query,
            "k": key_cache,
            "v": value_cache,
            "out": out,
            "cu_seqlens_q": query_start_loc,
            "seqused_k": seq_lens,
            "max_seqlen_q": config.max_query_len,
            "max_seqlen_k": config.max_seq_len,
            "page_table": block_table,
            "softmax_scale": scale,
            "is_causal": True,
            "window_size_left": left,
            "window_size_right": right,
            "scheduler_metadata": schedule,
            "num_splits": config.num_splits,
        },
    )


define(
    "fa3_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor seq_lens, "
    "Tensor query_start_loc, Tensor(a!) schedule, Tensor(b!) out, float scale, int max_query_len, int max_seq_len, "
    "int num_splits, int window) -> ()"
)
implement("fa3_attention", _attention_cpu, "CPU")
implement("fa3_attention", _attention_cuda, "CUDA")
fake("fa3_attention", _check_attention)
