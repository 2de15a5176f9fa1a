"""Where a matrix product of one row goes to draftfuse's own kernel: where it measures faster than the vendor's."""

from __future__ import annotations

import torch
from torch import fx

from draftfuse.lowering.tune import choose
from draftfuse.passes import ir

ALIGNED = 16  # bytes: the kernel streams weights in 16-byte loads


def has_own_kernel(product: fx.Node) -> bool:
    """Whether ``product`` (``aten.mm``) has one row on a Hopper GPU or later, and draftfuse's kernel is faster."""
    left, out = ir.value(product.all_input_nodes[0]), ir.value(product)
    if out.device.type != "cuda" or torch.cuda.get_device_capability(out.device) < (9, 0) or not fits(left):
        return False
    return choose(int(out.shape[1]), int(left.shape[1]), left.dtype, out.device)


def fits(left: torch.Tensor) -> bool:
    """Whether the kernel is made for these rows: one, in half precision, of a length that keeps loads aligned."""
    rows, inputs = left.shape
    if not isinstance(rows, int) or not isinstance(inputs, int) or left.dtype not in (torch.bfloat16, torch.float16):
        return False
    return rows == 1 and inputs * left.element_size() % ALIGNED == 0
