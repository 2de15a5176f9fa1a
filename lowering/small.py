"""Where a matrix product of a few rows goes to draftfuse's own kernel."""

from __future__ import annotations

import torch
from torch import fx

from draftfuse.lowering.ops.small_linear import MAX_ROWS
from draftfuse.passes import ir

ALIGNED = 16  # bytes: the kernel streams weights in 16-byte loads


def has_own_kernel(product: fx.Node) -> bool:
    """Whether ``product`` (``aten.mm``) has at most four rows, known when it is compiled, and lies on a Hopper GPU."""
    left, out = ir.value(product.args[0]), ir.value(product)
    if out.device.type != "cuda" or torch.cuda.get_device_capability(out.device) < (9, 0):
        return False
    return fits(left)


def fits(left: torch.Tensor) -> bool:
    """Whether the kernel takes these rows: few, half precision, of a length that keeps loads aligned."""
    rows, inputs = left.shape
    if not isinstance(rows, int) or not isinstance(inputs, int) or left.dtype not in (torch.bfloat16, torch.float16):
        return False
    return rows <= MAX_ROWS and inputs * left.element_size() % ALIGNED == 0
