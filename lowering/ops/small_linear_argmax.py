"""The likeliest token of a few rows: norm, output head and argmax, without the logits ever being stored.

Shape letters: M rows (1 to 4), K inputs, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftfuse.lowering.ops._library import (
    check_floating,
    check_same_device,
    check_same_dtype,
    check_size,
    define,
    fake,
    implement,
    require_triton,
)
from draftfuse.lowering.ops.small_linear import reference as linear

NAME = "small_linear_argmax"


def _check(x: Tensor, weight: Tensor, gain: Tensor | None) -> None:
    check_floating(NAME, "x", x, "M, K")
    check_floating(NAME, "weight", weight, "V, K")
    check_same_dtype(NAME, "weight", weight, "x", x)
    if gain is not None:
        check_floating(NAME, "gain", gain, "K")


def _check_sizes(x: Tensor, weight: Tensor, gain: Tensor | None) -> None:
    check_same_device(NAME, x=x, weight=weight, gain=gain)
    check_size(NAME, "x and weight differ in K", x.shape[1], weight.shape[1], "Pass weight as [V, K], x as [M, K].")
    if gain is not None:
        check_size(NAME, "gain does not fit x", gain.shape[0], x.shape[1], "Pass one gain an input.")


def reference(x: Tensor, weight: Tensor, gain: Tensor | None, epsilon: float) -> Tensor:
    """``(rms_norm(x) @ weight.T).argmax(-1)``: of equal logits the first, NaN above all."""
    return linear(x, weight, gain, epsilon, False, None).argmax(dim=-1)


def _cpu(x: Tensor, weight: Tensor, gain: Tensor | None, epsilon: float) -> Tensor:
    _check(x, weight, gain)
    _check_sizes(x, weight, gain)
    return reference(x, weight, gain, epsilon)


def _cuda(x: Tensor, weight: Tensor, gain: Tensor | None, epsilon: float) -> Tensor:
    require_triton(NAME)
    _check(x, weight, gain)
    _check_sizes(x, weight, gain)
    from draftfuse.lowering.ops._small_linear_triton import launch_argmax

    return launch_argmax(x, weight, gain, epsilon)


def _fake(x: Tensor, weight: Tensor, gain: Tensor | None, epsilon: float) -> Tensor:
    _check(x, weight, gain)
    return x.new_empty(x.shape[0], dtype=torch.int64)


define("small_linear_argmax(Tensor x, Tensor weight, Tensor? gain, float epsilon) -> Tensor")
implement(NAME, _cpu, "CPU")
implement(NAME, _cuda, "CUDA")
fake(NAME, _fake)


def small_linear_argmax(x: Tensor, weight: Tensor, gain: Tensor | None = None, epsilon: float = 1e-6) -> Tensor:
    """Two kernels for RMS norm, matrix-vector product and argmax; memory-bound, so made for few rows.

    Args:
        x: [M, K].
        weight: [V, K], contiguous.
        gain: [K], asks for the RMS norm of ``x``.
        epsilon: added to the mean square.

    Returns:
        [M] int64: the index of the largest product, rounded to the dtype of ``x``; the first of equal ones.

    Raises:
        OpArgumentError: shapes, dtypes or devices do not fit.
    """
    out: Tensor = torch.ops.draftfuse.small_linear_argmax(x, weight, gain, epsilon)
    return out
