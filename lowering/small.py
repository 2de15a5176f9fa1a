"""Where a matrix product of one row goes to draftfuse's own kernel: where it measures faster than the vendor's."""

from __future__ import annotations

import torch
from torch import fx

from draftfuse.lowering.tune import choose
from draftfuse.passes import ir

ALIGNED = 16  # bytes: the kernel streams weights in 16-byte loads


def has_own_kernel(product: fx.Node) -> bool:
    """Whether ``product`` (``aten.mm``) goes to draftfuse's kernel."""
    return is_faster(ir.value(product.all_input_nodes[0]), ir.value(product).shape[1])


def may_have_own_kernel(product: fx.Node) -> bool:
    """Whether ``product`` of any number of rows may come to draftfuse's kernel where it gets one."""
    left = ir.value(product.all_input_nodes[0])
    inputs = left.shape[1]
    if left.device.type != "cuda" or isinstance(left.shape[0], int) or not isinstance(inputs, int):
        return False
    return left.dtype in (torch.bfloat16, torch.float16) and inputs * left.element_size() % ALIGNED == 0


def is_faster(left: torch.Tensor, outputs: int | torch.SymInt) -> bool:
    """Whether ``left`` is one row on a Hopper GPU or later, for whose product draftfuse's kernel is faster."""
    device = left.device
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0) or not fits(left):
        return False
    return choose(int(outputs), int(left.shape[1]), left.dtype, device)


def fits(left: torch.Tensor) -> bool:
    """Whether the kernel is made for these rows: one, in half precision, of a length that keeps loads aligned."""
    rows, inputs = left.shape
    if not isinstance(rows, int) or not isinstance(inputs, int) or left.dtype not in (torch.bfloat16, torch.float16):
        return False
    return rows == 1 and inputs * left.element_size() % ALIGNED == 0
