"""A linear layer for few rows, with what stands around it in a decoder: norm in front, SwiGLU or residual behind.

Shape letters: M rows (1 to 4), K inputs, N outputs of the matrix product, F features returned (N, or N / 2 for SwiGLU).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from draftfuse.lowering.ops._library import (
    check_floating,
    check_same_device,
    check_same_dtype,
    check_size,
    define,
    fail,
    fake,
    implement,
    require_triton,
)

MAX_ROWS = 4


def _check(
    x: Tensor, weight: Tensor, gain: Tensor | None, epsilon: float, swiglu: bool, residual: Tensor | None
) -> None:
    check_floating("small_linear", "x", x, "M, K")
    check_floating("small_linear", "weight", weight, "N, K")
    check_same_dtype("small_linear", "weight", weight, "x", x)
    for name, tensor, dims in (("gain", gain, 1), ("residual", residual, 2)):
        if tensor is not None and tensor.dim() != dims:
            shape = tuple(tensor.shape)
            fail("small_linear", f"{name} has {tensor.dim()} dims", shape, f"{dims} dims", f"Reshape {name}.")


def _check_sizes(x: Tensor, weight: Tensor, gain: Tensor | None, swiglu: bool, residual: Tensor | None) -> None:
    check_same_device("small_linear", x=x, weight=weight, gain=gain, residual=residual)
    todo = "Pass weight as [N, K], and x as [M, K]."
    check_size("small_linear", "x and weight differ in K", x.shape[1], weight.shape[1], todo)
    if gain is not None:
        check_size("small_linear", "gain does not fit x", gain.shape[0], x.shape[1], "Pass one gain an input.")
    if swiglu:
        check_size("small_linear", "weight has no two halves", weight.shape[0] % 2, 0, "Stack gate over up.")
    if residual is not None:
        expected = (x.shape[0], features(weight, swiglu))
        check_size("small_linear", "residual does not fit", tuple(residual.shape), expected, "Pass one a feature.")


def rms_norm(x: Tensor, gain: Tensor, epsilon: float) -> Tensor:
    """RMS norm in float32, rounded once to the dtype of ``x``, times the gain."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)).to(x.dtype) * gain


def features(weight: Tensor, swiglu: bool) -> int:
    """How many values a row has in the result."""
    return weight.shape[0] // 2 if swiglu else weight.shape[0]


def reference(
    x: Tensor, weight: Tensor, gain: Tensor | None, epsilon: float, swiglu: bool, residual: Tensor | None
) -> Tensor:
    """``act(rms_norm(x) @ weight.T) + residual``; the norm runs in float32 and rounds once to the dtype of ``x``."""
    if gain is not None:
        x = rms_norm(x, gain, epsilon)
    out = F.linear(x, weight)
    if swiglu:
        gate, up = out.chunk(2, dim=-1)
        out = F.silu(gate) * up
    return out if residual is None else residual + out


def _cpu(
    x: Tensor, weight: Tensor, gain: Tensor | None, epsilon: float, swiglu: bool, residual: Tensor | None
) -> Tensor:
    _check(x, weight, gain, epsilon, swiglu, residual)
    _check_sizes(x, weight, gain, swiglu, residual)
    return reference(x, weight, gain, epsilon, swiglu, residual).contiguous()


def _cuda(
    x: Tensor, weight: Tensor, gain: Tensor | None, epsilon: float, swiglu: bool, residual: Tensor | None
) -> Tensor:
    require_triton("small_linear")
    _check(x, weight, gain, epsilon, swiglu, residual)
    _check_sizes(x, weight, gain, swiglu, residual)
    from draftfuse.lowering.ops._small_linear_triton import launch

    return launch(x, weight, gain, epsilon, swiglu, residual)


def _fake(
    x: Tensor, weight: Tensor, gain: Tensor | None, epsilon: float, swiglu: bool, residual: Tensor | None
) -> Tensor:
    _check(x, weight, gain, epsilon, swiglu, residual)
    return x.new_empty(x.shape[0], features(weight, swiglu))


define("small_linear(Tensor x, Tensor weight, Tensor? gain, float epsilon, bool swiglu, Tensor? residual) -> Tensor")
implement("small_linear", _cpu, "CPU")
implement("small_linear", _cuda, "CUDA")
fake("small_linear", _fake)


def small_linear(
    x: Tensor,
    weight: Tensor,
    gain: Tensor | None = None,
    epsilon: float = 1e-6,
    swiglu: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """One kernel for RMS norm, matrix-vector product and SwiGLU or residual; memory-bound, so made for few rows.

    Args:
        x: [M, K].
        weight: [N, K], contiguous; for SwiGLU the gate's rows stand over the up projection's.
        gain: [K], asks for the RMS norm of ``x``.
        epsilon: added to the mean square.
        swiglu: return ``silu(gate) * up``.
        residual: [M, F], added last.

    Returns:
        [M, F], contiguous, in the dtype of ``x``.

    Raises:
        OpArgumentError: shapes, dtypes or devices do not fit.
    """
    out: Tensor = torch.ops.draftfuse.small_linear(x, weight, gain, epsilon, swiglu, residual)
    return out
