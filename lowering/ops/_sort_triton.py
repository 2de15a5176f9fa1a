"""Triton kernel of ``sort`` for rows of a few hundred elements: each element counts those in front of it.

That is quadratic, and one launch: PyTorch's own kernels are three for such a row. Imported only by the CUDA
implementation, and by tests under Triton's interpreter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftfuse.lowering.ops._dependent_launch import dependent_launch

LONGEST = 1024  # elements of a row; PyTorch's kernels are no slower from about there
BLOCK = 32
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64)


@triton.jit  # type: ignore[untyped-decorator]
def _sort(
    x: tl.tensor,
    values: tl.tensor,
    indices: tl.tensor,
    length: tl.tensor,
    DESCENDING: tl.constexpr,
    BLOCK: tl.constexpr,
    OTHERS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64) * length
    mine = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + row + mine, mask=mine < length, other=0)
    above = (a != a)[:, None]  # NaN is the largest
    rank = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, length, OTHERS):
        other = start + tl.arange(0, OTHERS)
        b = tl.load(x + row + other, mask=other < length, other=0)
        over = (b != b)[None, :]
        before = (b[None, :] > a[:, None]) if DESCENDING else (b[None, :] < a[:, None])
        before = before | ((over & ~above) if DESCENDING else (above & ~over))
        tied = (b[None, :] == a[:, None]) | (above & over)
        before = before | (tied & (other[None, :] < mine[:, None]))
        rank += tl.sum((before & (other < length)[None, :]).to(tl.int32), axis=1)
    tl.store(values + row + rank, a, mask=mine < length)
    tl.store(indices + row + rank, mine.to(tl.int64), mask=mine < length)


def takes(x: Tensor, dim: int) -> bool:
    """Whether the kernel sorts ``x`` along ``dim``."""
    last = x.dim() > 0 and dim % x.dim() == x.dim() - 1
    return last and x.is_contiguous() and x.dtype in DTYPES and 0 < x.shape[-1] <= LONGEST and x.numel() < 2**31


def launch(x: Tensor, descending: bool) -> tuple[Tensor, Tensor]:
    """Launch on what :func:`takes` accepts; equal elements keep their order. No sync, so safe in capture."""
    size = x.shape[-1]
    values, indices = torch.empty_like(x), torch.empty_like(x, dtype=torch.int64)
    if x.numel() == 0:
        return values, indices
    _sort[(x.numel() // size, triton.cdiv(size, BLOCK))](
        x,
        values,
        indices,
        size,
        DESCENDING=descending,
        BLOCK=BLOCK,
        OTHERS=128,
        num_warps=4,
        **dependent_launch(x.device),
    )
    return values, indices
