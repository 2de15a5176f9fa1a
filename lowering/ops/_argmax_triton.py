"""Triton kernels of ``argmax``: parts of a row in programs of their own, then the best part of each row.

Imported only by the CUDA implementation, and by tests under Triton's interpreter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftfuse.lowering.ops._dependent_launch import dependent_launch
from draftfuse.lowering.ops._small_linear_triton import PICK_WARPS, _keys, pick

BLOCK = 4096


@triton.jit  # type: ignore[untyped-decorator]
def _best_of_parts(
    x: tl.tensor, keys: tl.tensor, size: tl.tensor, stride: tl.tensor, BLOCK: tl.constexpr, PDL: tl.constexpr
) -> None:
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(1).to(tl.int64)
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + row * stride + lane, mask=lane < size, other=0.0)
    best = tl.max(_keys(value, lane, lane < size))
    tl.store(keys + row * tl.num_programs(0) + tl.program_id(0), best)


def launch(x: Tensor) -> Tensor:
    """Launch on checked arguments; no sync, so safe in capture."""
    rows, size = x.shape
    if rows == 0:
        return torch.empty(rows, dtype=torch.int64, device=x.device)
    x = x if x.stride(1) == 1 else x.contiguous()
    parts = triton.cdiv(size, BLOCK)
    keys = torch.empty(rows, parts, dtype=torch.int64, device=x.device)
    _best_of_parts[(parts, rows)](x, keys, size, x.stride(0), BLOCK=BLOCK, num_warps=8, **dependent_launch(x.device))
    return pick(keys, max(1, min(PICK_WARPS, triton.next_power_of_2(parts) // 128)))
