"""PyTorch's sort as one opaque operator, for sizes at which generated code is slower.

Shape letters: ``...`` any shape.
"""

from __future__ import annotations

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


def _fake(x: Tensor, dim: int, descending: bool, stable: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape, dtype=torch.int64)


define("sort(Tensor x, int dim, bool descending, bool stable) -> (Tensor, Tensor)")
implement("sort", _sort, "CPU", "CUDA")
fake("sort", _fake)


def sort(x: Tensor, dim: int = -1, descending: bool = False, stable: bool = False) -> tuple[Tensor, Tensor]:
    """``torch.sort`` that no compiler looks into.

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
