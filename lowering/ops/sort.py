"""Sort as one opaque operator, for sizes at which generated code is slower.

Shape letters: ``...`` any shape.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from draftfuse.lowering.ops._library import define, fake, implement


def reference(x: Tensor, dim: int, descending: bool, stable: bool) -> tuple[Tensor, Tensor]:
    """Sorted values and where they stood."""
    values, indices = torch.sort(x, dim=dim, descending=descending, stable=stable)
    return values, indices


def _sort(x: Tensor, dim: int, descending: bool, stable: bool) -> tuple[Tensor, Tensor]:
    values, indices = reference(x, dim, descending, stable)
    return values.contiguous(), indices.contiguous()


def _cuda(x: Tensor, dim: int, descending: bool, stable: bool) -> tuple[Tensor, Tensor]:
    if find_spec("triton") is not None:
        from draftfuse.lowering.ops import _sort_triton

        if _sort_triton.takes(x, dim):
            return _sort_triton.launch(x, descending)
    return _sort(x, dim, descending, stable)


def _fake(x: Tensor, dim: int, descending: bool, stable: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape, dtype=torch.int64)


define("sort(Tensor x, int dim, bool descending, bool stable) -> (Tensor, Tensor)")
implement("sort", _sort, "CPU")
implement("sort", _cuda, "CUDA")
fake("sort", _fake)


def sort(x: Tensor, dim: int = -1, descending: bool = False, stable: bool = False) -> tuple[Tensor, Tensor]:
    """``torch.sort`` that no compiler looks into; short rows are one kernel on CUDA.

    Args:
        x: [...], not a scalar.
        dim: the dimension to sort along.
        descending: largest first.
        stable: equal elements keep their order.

    Returns:
        Values and int64 indices, both [...] and contiguous.
    """
    found: tuple[Tensor, Tensor] = torch.ops.draftfuse.sort(x, dim, descending, stable)
    return found
