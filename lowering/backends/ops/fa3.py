"""The schedule of FlashAttention 3, made ahead of time into a persistent buffer (``fa3_attention`` attends by it).

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
from draftfuse.lowering.ops._library import check_tensor, define, fail, fake, implement

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


def plan_length(config: Configuration, like: Tensor, query_start_loc: Tensor) -> int:
    """How long the library's plans are; asked of it once, with lengths of zero shaped like ``like``."""
    if config not in _LENGTHS:
        vendor_plan(config, torch.zeros_like(like), query_start_loc)
    return _LENGTHS[config]


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
