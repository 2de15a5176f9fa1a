"""linear_by_rows: a linear layer whose kernel is chosen by the rows that it gets."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftfuse.errors import OpArgumentError
from draftfuse.lowering import small
from draftfuse.lowering.ops.linear_by_rows import linear_by_rows, own_kernels

OP = torch.ops.draftfuse.linear_by_rows.default


@pytest.mark.parametrize("rows", [1, 3])
def test_is_a_linear_layer(rows: int) -> None:
    x, weight = torch.randn(rows, 12), torch.randn(6, 12)
    torch.testing.assert_close(linear_by_rows(x, weight), x @ weight.T)


def test_opcheck() -> None:
    torch.library.opcheck(OP, (torch.randn(2, 8), torch.randn(6, 8)))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((torch.randn(12), torch.randn(6, 12)), "x has 1 dims"),
        ((torch.randn(2, 12), torch.randn(6, 11)), "x and weight differ in K: got 12, expected 11"),
        ((torch.randn(2, 12), torch.randn(6, 12).half()), "weight and x differ in dtype"),
    ],
)
def test_errors(args: tuple[Tensor, Tensor], words: str) -> None:
    with pytest.raises(OpArgumentError, match=words):
        linear_by_rows(*args)


@pytest.mark.cuda
def test_one_row_takes_our_kernel_only_where_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(small, "is_faster", lambda x, outputs: asked.append(tuple(x.shape)) or True)
    x, weight = torch.randn(2, 64, device="cuda").half(), torch.randn(32, 64, device="cuda").half()
    linear_by_rows(x[:1], weight)
    with own_kernels():
        torch.testing.assert_close(linear_by_rows(x, weight), x @ weight.T)
        assert asked == []
        torch.testing.assert_close(linear_by_rows(x[:1], weight), x[:1] @ weight.T, atol=1e-2, rtol=1e-2)
    assert asked == [(1, 64)]
