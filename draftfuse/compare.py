"""Where two tensors of a padded batch differ: integers exactly, floats within a tolerance, live rows only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Rows:
    """How many rows of a batch are live, how many there are, and whether floats must be equal to the bit."""

    live: int
    capacity: int
    exact: bool

    def of(self, tensor: Tensor) -> Tensor:
        """The live part of a tensor with one row a request; any other tensor whole."""
        if not self.has_rows(tensor):
            return tensor[: self.live + 1] if tensor.dim() and tensor.shape[0] == self.capacity + 1 else tensor
        return tensor[: self.live]

    def has_rows(self, tensor: Tensor) -> bool:
        """Whether the first dim counts requests."""
        return tensor.dim() > 0 and tensor.shape[0] == self.capacity


def differences(expected: Tensor, got: Tensor | None, rows: Rows) -> Iterator[tuple[int | None, object, object]]:
    """(request, expected, got) of the first element that differs in each row."""
    if got is None or got.shape != expected.shape or got.dtype != expected.dtype:
        yield None, _layout(expected), "nothing" if got is None else _layout(got)
        return
    per_row = rows.has_rows(expected)
    expected, got = rows.of(expected), rows.of(got)
    wrong = ~_close(expected, got, rows.exact)
    if not bool(wrong.any()):
        return
    if not per_row:
        yield None, *_first(expected, got, wrong)
        return
    for row in range(expected.shape[0]):
        if bool(wrong[row].any()):
            yield row, *_first(expected[row], got[row], wrong[row])


def _layout(tensor: Tensor) -> str:
    return f"{tensor.dtype}{list(tensor.shape)}"


def _close(expected: Tensor, got: Tensor, exact: bool) -> Tensor:
    if exact or not expected.is_floating_point():
        return (expected == got) | (expected.isnan() & got.isnan())
    tolerance = _TOLERANCE.get(expected.dtype, 1e-2)
    return torch.isclose(expected.double(), got.double(), rtol=tolerance, atol=tolerance, equal_nan=True)


def _first(expected: Tensor, got: Tensor, wrong: Tensor) -> tuple[object, object]:
    index = int(wrong.flatten().to(torch.int8).argmax())
    return expected.flatten()[index].item(), got.flatten()[index].item()
