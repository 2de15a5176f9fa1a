"""The linear layer that opens an EAGLE-3 head or an MTP block: a normed embedding beside a normed hidden state.

Shape letters: M rows (1 to 4), V vocabulary, H inputs of either half, N outputs.
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
    check_tensor,
    define,
    fake,
    implement,
    require_triton,
)
from draftfuse.lowering.ops.small_linear import rms_norm

NAME = "small_linear_pair"


def _check(x: Tensor, index: Tensor | None, second: Tensor, weight: Tensor, gain: Tensor, second_gain: Tensor) -> None:
    for name, tensor, shape in (("x", x, "V, H"), ("second", second, "M, H"), ("weight", weight, "N, 2 H")):
        check_floating(NAME, name, tensor, shape)
        check_same_dtype(NAME, name, tensor, "x", x)
    if index is not None:
        check_tensor(NAME, "index", index, "M", torch.int32, torch.int64)
    for name, tensor in (("gain", gain), ("second_gain", second_gain)):
        check_floating(NAME, name, tensor, "H")


def _check_sizes(
    x: Tensor, index: Tensor | None, second: Tensor, weight: Tensor, gain: Tensor, second_gain: Tensor
) -> None:
    check_same_device(NAME, x=x, index=index, second=second, weight=weight, gain=gain, second_gain=second_gain)
    rows = x.shape[0] if index is None else index.shape[0]
    check_size(NAME, "the halves differ in M", rows, second.shape[0], "Pass one row of each.")
    check_size(NAME, "the halves differ in H", x.shape[1], second.shape[1], "Pass halves of one width.")
    check_size(NAME, "weight does not fit", weight.shape[1], 2 * x.shape[1], "Pass weight as [N, 2 H].")
    for name, tensor in (("gain", gain), ("second_gain", second_gain)):
        check_size(NAME, f"{name} does not fit", tensor.shape[0], x.shape[1], "Pass one gain an input.")


def reference(
    x: Tensor, index: Tensor | None, second: Tensor, weight: Tensor, gain: Tensor, second_gain: Tensor, epsilon: float
) -> Tensor:
    """``cat([rms_norm(x[index]), rms_norm(second)], -1) @ weight.T``."""
    rows = x if index is None else F.embedding(index, x)
    return F.linear(torch.cat([rms_norm(rows, gain, epsilon), rms_norm(second, second_gain, epsilon)], -1), weight)


def _cpu(
    x: Tensor, index: Tensor | None, second: Tensor, weight: Tensor, gain: Tensor, second_gain: Tensor, epsilon: float
) -> Tensor:
    _check(x, index, second, weight, gain, second_gain)
    _check_sizes(x, index, second, weight, gain, second_gain)
    return reference(x, index, second, weight, gain, second_gain, epsilon)


def _cuda(
    x: Tensor, index: Tensor | None, second: Tensor, weight: Tensor, gain: Tensor, second_gain: Tensor, epsilon: float
) -> Tensor:
    require_triton(NAME)
    _check(x, index, second, weight, gain, second_gain)
    _check_sizes(x, index, second, weight, gain, second_gain)
    from draftfuse.lowering.ops._small_linear_triton import launch_pair

    return launch_pair(x, index, second, weight, gain, second_gain, epsilon)


def _fake(
    x: Tensor, index: Tensor | None, second: Tensor, weight: Tensor, gain: Tensor, second_gain: Tensor, epsilon: float
) -> Tensor:
    _check(x, index, second, weight, gain, second_gain)
    return x.new_empty(second.shape[0], weight.shape[0])


define(
    "small_linear_pair(Tensor x, Tensor? index, Tensor second, Tensor weight, Tensor gain, Tensor second_gain, "
    "float epsilon) -> Tensor"
)
implement(NAME, _cpu, "CPU")
implement(NAME, _cuda, "CUDA")
fake(NAME, _fake)


def small_linear_pair(
    x: Tensor,
    index: Tensor | None,
    second: Tensor,
    weight: Tensor,
    gain: Tensor,
    second_gain: Tensor,
    epsilon: float = 1e-6,
) -> Tensor:
    """One kernel for an embedding lookup, two RMS norms and a matrix-vector product; made for few rows.

    Args:
        x: [V, H], a table of which ``index`` names rows; [M, H] without an index.
        index: [M] int32 or int64. On CUDA an index outside the table reads its nearest row.
        second: [M, H].
        weight: [N, 2 H], contiguous: the first H columns multiply the rows of ``x``.
        gain: [H], of the RMS norm of those rows.
        second_gain: [H], of the RMS norm of ``second``.
        epsilon: added to both mean squares.

    Returns:
        [M, N], contiguous, in the dtype of ``x``.

    Raises:
        OpArgumentError: shapes, dtypes or devices do not fit.
    """
    out: Tensor = torch.ops.draftfuse.small_linear_pair(x, index, second, weight, gain, second_gain, epsilon)
    return out
