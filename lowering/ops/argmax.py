"""The likeliest token of rows of logits that are already there.

Shape letters: M rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftfuse.lowering.ops._library import check_floating, define, fail, fake, implement, known, require_triton

NAME = "argmax"


def _check(x: Tensor) -> None:
    check_floating(NAME, "x", x, "M, V")
    if known(x.shape[1]) and x.shape[1] == 0:
        fail(NAME, "x has no columns", tuple(x.shape), "[M, V], V at least 1", "Pass logits of at least one token.")


def reference(x: Tensor) -> Tensor:
    """``x.argmax(-1)``: of equal logits the first, NaN above all."""
    return x.argmax(dim=-1)


def _cpu(x: Tensor) -> Tensor:
    _check(x)
    return reference(x)


def _cuda(x: Tensor) -> Tensor:
    require_triton(NAME)
    _check(x)
    if x.dtype == torch.float64 or x.shape[0] >= 1 << 16:
        return reference(x)  # keys hold 32 bits of a logit; a grid has 65,535 rows
    from draftfuse.lowering.ops._argmax_triton import launch

    return launch(x)


def _fake(x: Tensor) -> Tensor:
    _check(x)
    return x.new_empty(x.shape[0], dtype=torch.int64)


define("argmax(Tensor x) -> Tensor")
implement(NAME, _cpu, "CPU")
implement(NAME, _cuda, "CUDA")
fake(NAME, _fake)


def argmax(x: Tensor) -> Tensor:
    """Two kernels, in which a row is shared by many programs: rows of logits are few and long.

    Args:
        x: [M, V], V at least 1.

    Returns:
        [M] int64: the index of the largest value, the first of equal ones; NaN is the largest.

    Raises:
        OpArgumentError: shape or dtype do not fit.
    """
    out: Tensor = torch.ops.draftfuse.argmax(x)
    return out
