"""``linear_by_rows(x, weight)``: a linear layer of any number of rows, whose kernel is chosen where it is called.

For a graph that is compiled once for every number of rows, vLLM's of a draft model: draftfuse's kernel serves a single
row inside :func:`own_kernels`, where it measures faster; anything else goes to the vendor's product.
Shape letters: M rows, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import torch.nn.functional as F
from torch import Tensor

from draftfuse.lowering.ops._library import (
    check_floating,
    check_same_device,
    check_same_dtype,
    check_size,
    define,
    fake,
    implement,
)

_OWN: ContextVar[bool] = ContextVar("draftfuse_own_kernels", default=False)


@contextmanager
def own_kernels() -> Iterator[None]:
    """Calls in this block may take draftfuse's kernel, and measure it on the first call of a shape."""
    token = _OWN.set(True)
    try:
        yield
    finally:
        _OWN.reset(token)


def _check(x: Tensor, weight: Tensor) -> None:
    check_floating("linear_by_rows", "x", x, "M, K")
    check_floating("linear_by_rows", "weight", weight, "N, K")
    check_same_dtype("linear_by_rows", "weight", weight, "x", x)
    check_size("linear_by_rows", "x and weight differ in K", x.shape[1], weight.shape[1], "Pass weight as [N, K].")


def reference(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.T``."""
    return F.linear(x, weight)


def _cpu(x: Tensor, weight: Tensor) -> Tensor:
    _check(x, weight)
    return reference(x, weight)


def _cuda(x: Tensor, weight: Tensor) -> Tensor:
    _check(x, weight)
    check_same_device("linear_by_rows", x=x, weight=weight)
    if _OWN.get() and x.shape[0] == 1 and weight.is_contiguous() and x.is_contiguous():
        from draftfuse.lowering.small import is_faster

        if is_faster(x, weight.shape[0]):
            out: Tensor = torch.ops.draftfuse.small_linear(x, weight, None, 0.0, False, None)
            return out
    return reference(x, weight)


def _fake(x: Tensor, weight: Tensor) -> Tensor:
    _check(x, weight)
    return x.new_empty(x.shape[0], weight.shape[0])


define("linear_by_rows(Tensor x, Tensor weight) -> Tensor")
implement("linear_by_rows", _cpu, "CPU")
implement("linear_by_rows", _cuda, "CUDA")
fake("linear_by_rows", _fake)


def linear_by_rows(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.T``, [M, N].

    Args:
        x: [M, K].
        weight: [N, K], of the dtype of ``x``.

    Raises:
        OpArgumentError: shapes, dtypes or devices do not fit.
    """
    out: Tensor = torch.ops.draftfuse.linear_by_rows(x, weight)
    return out
