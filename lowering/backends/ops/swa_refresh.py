"""Sparse sliding-window metadata of one step, written into persistent buffers by one kernel.

Shape letters: R requests (rows), T tokens, B blocks a row of the block table, P slots a page, W index columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftfuse.lowering.backends.windows import token_positions, token_to_request, window_bounds, window_slots
from draftfuse.lowering.ops._library import (
    check_same_device,
    check_size,
    check_tensor,
    define,
    fail,
    fake,
    implement,
    require_triton,
)

_OP = "swa_refresh"
Fields = tuple[Tensor, Tensor, Tensor, Tensor]


def _check(
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
    check_tensor(_OP, "slot_mapping", slot_mapping, "T", torch.int64)
    check_tensor(_OP, "seq_lens", seq_lens, "R", torch.int32)
    check_tensor(_OP, "query_start_loc", query_start_loc, "R+1", torch.int32)
    check_tensor(_OP, "block_table", block_table, "R, B", torch.int32)
    check_tensor(_OP, "is_valid", is_valid, "T", torch.bool)
    for name, tensor in (("token_to_req", token_to_req), ("lens", lens)):
        check_tensor(_OP, name, tensor, "T", torch.int32)
    check_tensor(_OP, "indices", indices, "T, W", torch.int32)
    if window < 1 or page_size < 1:
        fail(_OP, "window or page_size is no size", (window, page_size), "both >= 1", "Pass the model's own.")


def _check_sizes(slot_mapping: Tensor, seq_lens: Tensor, starts: Tensor, table: Tensor, *outputs: Tensor) -> None:
    tokens, rows = slot_mapping.shape[0], seq_lens.shape[0]
    check_size(_OP, "query_start_loc does not fit seq_lens", starts.shape[0], rows + 1, "Slice it to [:R + 1].")
    check_size(_OP, "block_table has other rows than seq_lens", table.shape[0], rows, "Slice block_table[:R].")
    for out in outputs:
        check_size(_OP, "an output has other rows than slot_mapping", out.shape[0], tokens, "Slice it to [:T].")
    check_same_device(_OP, slot_mapping=slot_mapping, seq_lens=seq_lens, block_table=table, indices=outputs[-1])


def reference(
    slot_mapping: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    block_table: Tensor,
    width: int,
    window: int,
    page_size: int,
) -> Fields:
    """What (is_valid, token_to_req, lens, indices) hold afterwards."""
    is_valid = slot_mapping >= 0
    rows = token_to_request(query_start_loc, slot_mapping.shape[0])
    first, lens = window_bounds(token_positions(seq_lens, query_start_loc, rows), is_valid, window)
    indices = window_slots(block_table, rows, first, lens, width, page_size)
    return is_valid, rows, lens.to(torch.int32), indices


def _cpu(
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
    outputs = (is_valid, token_to_req, lens, indices)
    _check(slot_mapping, seq_lens, query_start_loc, block_table, *outputs, window, page_size)
    _check_sizes(slot_mapping, seq_lens, query_start_loc, block_table, *outputs)
    values = reference(slot_mapping, seq_lens, query_start_loc, block_table, indices.shape[1], window, page_size)
    for out, value in zip(outputs, values, strict=True):
        out.copy_(value)


def _cuda(
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
    outputs = (is_valid, token_to_req, lens, indices)
    _check(slot_mapping, seq_lens, query_start_loc, block_table, *outputs, window, page_size)
    _check_sizes(slot_mapping, seq_lens, query_start_loc, block_table, *outputs)
    require_triton(_OP)
    from draftfuse.lowering.backends.ops._swa_refresh_triton import launch

    launch(slot_mapping, seq_lens, query_start_loc, block_table, *outputs, window, page_size)


define(
    "swa_refresh(Tensor slot_mapping, Tensor seq_lens, Tensor query_start_loc, Tensor block_table, "
    "Tensor(a!) is_valid, Tensor(b!) token_to_req, Tensor(c!) lens, Tensor(d!) indices, "
    "int window, int page_size) -> ()"
)
implement(_OP, _cpu, "CPU")
implement(_OP, _cuda, "CUDA")
fake(_OP, _check)


def swa_refresh(
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
    """Write which tokens are valid, their rows, and the lengths and slots of their windows.

    Args:
        slot_mapping: i64[T]; a negative slot makes a token invalid: length 0, all its indices -1.
        seq_lens: i32[R]; query_start_loc: i32[R+1]; block_table: i32[R, B].
        is_valid: bool[T], written. token_to_req, lens: i32[T], written. indices: i32[T, W], written; W >= window.
        window: how many positions a token attends, its own included.
        page_size: P.

    Raises:
        OpArgumentError: a dtype, dim, size or device is wrong.
    """
    torch.ops.draftfuse.swa_refresh(
        slot_mapping, seq_lens, query_start_loc, block_table, is_valid, token_to_req, lens, indices, window, page_size
    )
