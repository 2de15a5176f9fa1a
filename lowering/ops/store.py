"""Store a value into a persistent buffer, opaque to compilers.

Shape letters: ``...`` any shape, the same for value and buffer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftfuse.lowering.ops._library import check_same_device, check_size, define, fail, fake, implement


def _check(value: Tensor, out: Tensor) -> None:
    if value.dim() != out.dim():
        todo = "Pass a value of the buffer's shape; store does not broadcast."
        fail("store", "value and out differ in dims", tuple(value.shape), tuple(out.shape), todo)
    check_same_device("store", out=out, value=value)


def reference(value: Tensor, out: Tensor) -> Tensor:
    """What ``out`` holds afterwards: ``value`` in the dtype of ``out``."""
    return value.to(out.dtype)


def _store(value: Tensor, out: Tensor) -> None:
    _check(value, out)
    todo = "Slice the buffer or the value; store does not broadcast."
    check_size("store", "value and out differ in shape", tuple(value.shape), tuple(out.shape), todo)
    out.copy_(value)


define("store(Tensor value, Tensor(a!) out) -> ()")
implement("store", _store, "CPU", "CUDA")
fake("store", _check)


def store(value: Tensor, out: Tensor) -> None:
    """``out.copy_(value)`` as one opaque op: the write happens where the program says, into ``out`` itself.

    Args:
        value: any shape and dtype; converted to the dtype of ``out``.
        out: the persistent buffer or a view of it, same shape and device as ``value``.

    Raises:
        OpArgumentError: shapes or devices differ.
    """
    torch.ops.draftfuse.store(value, out)
