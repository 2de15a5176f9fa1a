"""Metadata of a sparse-attention indexer at one step, written into persistent buffers by one kernel.

Shape letters: R requests (rows), T tokens, S processors in the schedule.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftfuse.lowering.backends.ops.index_logits import plan_schedule
from draftfuse.lowering.backends.windows import token_to_request
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

_OP = "indexer_refresh"
Fields = tuple[Tensor, Tensor, Tensor, Tensor]


def _check(
    slot_mapping: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    slots: Tensor,
    request_ids: Tensor,
    lens: Tensor,
    schedule: Tensor,
    ratio: int,
) -> None:
    for name, tensor in (("slot_mapping", slot_mapping), ("positions", positions), ("slots", slots)):
        check_tensor(_OP, name, tensor, "T", torch.int64)
    for name, tensor, shape in (
        ("seq_lens", seq_lens, "R"),
        ("query_start_loc", query_start_loc, "R+1"),
        ("request_ids", request_ids, "T"),
        ("lens", lens, "R"),
        ("schedule", schedule, "S+1, 2"),
    ):
        check_tensor(_OP, name, tensor, shape, torch.int32)
    if ratio < 1:
        fail(_OP, "ratio is no compression ratio", ratio, "ratio >= 1", "Pass the tokens of one compressed entry.")


def _check_sizes(slot_mapping: Tensor, positions: Tensor, seq_lens: Tensor, slots: Tensor, lens: Tensor) -> None:
    tokens, rows = slot_mapping.shape[0], seq_lens.shape[0]
    check_size(_OP, "positions has other rows than slot_mapping", positions.shape[0], tokens, "Slice both to [:T].")
    check_size(_OP, "slots has other rows than slot_mapping", slots.shape[0], tokens, "Slice it to [:T].")
    check_size(_OP, "lens has other rows than seq_lens", lens.shape[0], rows, "Slice it to [:R].")
    check_same_device(_OP, slot_mapping=slot_mapping, positions=positions, seq_lens=seq_lens, slots=slots, lens=lens)


def reference(
    slot_mapping: Tensor, positions: Tensor, seq_lens: Tensor, query_start_loc: Tensor, ratio: int, processors: int
) -> Fields:
    """What (slots, request_ids, lens, schedule) hold afterwards.

    The token that completes ``ratio`` tokens writes one compressed entry, at ``slot // ratio``; pages hold whole ones.
    """
    completes = (slot_mapping >= 0) & ((positions + 1) % ratio == 0)
    slots = torch.where(completes, slot_mapping // ratio, -1)
    lens = (seq_lens // ratio).to(torch.int32)
    rows = token_to_request(query_start_loc, slot_mapping.shape[0])
    return slots, rows, lens, plan_schedule(lens, processors)


def _cpu(
    slot_mapping: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    slots: Tensor,
    request_ids: Tensor,
    lens: Tensor,
    schedule: Tensor,
    ratio: int,
) -> None:
    outputs = (slots, request_ids, lens, schedule)
    _check(slot_mapping, positions, seq_lens, query_start_loc, *outputs, ratio)
    _check_sizes(slot_mapping, positions, seq_lens, slots, lens)
    values = reference(slot_mapping, positions, seq_lens, query_start_loc, ratio, schedule.shape[0] - 1)
    for out, value in zip(outputs, values, strict=True):
        out.copy_(value)


def _cuda(
    slot_mapping: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    slots: Tensor,
    request_ids: Tensor,
    lens: Tensor,
    schedule: Tensor,
    ratio: int,
) -> None:
    outputs = (slots, request_ids, lens, schedule)
    _check(slot_mapping, positions, seq_lens, query_start_loc, *outputs, ratio)
    _check_sizes(slot_mapping, positions, seq_lens, slots, lens)
    require_triton(_OP)
    from draftfuse.lowering.backends.ops._index_triton import launch_refresh

    launch_refresh(slot_mapping, positions, seq_lens, query_start_loc, *outputs, ratio)


define(
    "indexer_refresh(Tensor slot_mapping, Tensor positions, Tensor seq_lens, Tensor query_start_loc, "
    "Tensor(a!) slots, Tensor(b!) request_ids, Tensor(c!) lens, Tensor(d!) schedule, int ratio) -> ()"
)
implement(_OP, _cpu, "CPU")
implement(_OP, _cuda, "CUDA")
fake(_OP, _check)


def indexer_refresh(
    slot_mapping: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    slots: Tensor,
    request_ids: Tensor,
    lens: Tensor,
    schedule: Tensor,
    ratio: int,
) -> None:
    """Write compressed slots, request ids, compressed lengths and the schedule of :func:`index_logits`.

    Args:
        slot_mapping, positions: i64[T]; seq_lens: i32[R]; query_start_loc: i32[R+1].
        slots: i64[T], written; -1 for tokens that complete no entry. request_ids: i32[T], written.
        lens: i32[R], written. schedule: i32[S+1, 2], written.
        ratio: tokens of one compressed entry; divides the page size.

    Raises:
        OpArgumentError: a dtype, dim, size or device is wrong.
    """
    torch.ops.draftfuse.indexer_refresh(
        slot_mapping, positions, seq_lens, query_start_loc, slots, request_ids, lens, schedule, ratio
    )
