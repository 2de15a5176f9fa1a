"""Move live rows one token on; padded rows and rows at the length limit stay.

Shape letters: R requests (rows).
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftfuse.lowering.ops._library import check_size, check_tensor, fail


def _check(positions: Tensor, seq_lens: Tensor, max_model_len: int) -> None:
    op = "advance_positions"
    check_tensor(op, "positions", positions, "R", torch.int64)
    check_tensor(op, "seq_lens", seq_lens, "R", torch.int32)
    todo = "Slice both to the rows of the batch."
    check_size(op, "positions has other rows than seq_lens", positions.shape[0], seq_lens.shape[0], todo)
    if max_model_len < 1:
        fail(op, "max_model_len is no length", max_model_len, "max_model_len >= 1", "Pass the model's length limit.")


def reference(positions: Tensor, seq_lens: Tensor, max_model_len: int) -> tuple[Tensor, Tensor]:
    """What ``positions`` and ``seq_lens`` hold afterwards, a row at a time."""
    new_positions, new_lens = positions.clone(), seq_lens.clone()
    for row, (position, length) in enumerate(zip(positions.tolist(), seq_lens.tolist(), strict=True)):
        if position < length and position + 1 < max_model_len:
            new_positions[row], new_lens[row] = position + 1, length + 1
        elif position < length:
            new_lens[row] = position
    return new_positions, new_lens


def advance_positions(positions: Tensor, seq_lens: Tensor, max_model_len: int) -> None:
    """Add one to both, in place, for rows that are live (``position < seq_len``) and fit ``max_model_len``.

    A live row whose next position would be ``max_model_len`` gets ``seq_len = position`` instead: from then on it is
    dead like a padded row, so its slot is -1 and it moves no more. Dead rows are left alone.

    A composite: plain PyTorch without a registered op, made to be traced into the draft loop and fused.

    Args:
        positions: i64[R], one token a row, written in place.
        seq_lens: i32[R], written in place.
        max_model_len: the length limit, a Python integer.

    Raises:
        OpArgumentError: a dtype, dim, size or ``max_model_len`` is wrong.
    """
    _check(positions, seq_lens, max_model_len)
    live = positions < seq_lens
    moves = live & (positions + 1 < max_model_len)
    seq_lens.copy_(torch.where(live & ~moves, positions, seq_lens + moves))
    positions.add_(moves)
