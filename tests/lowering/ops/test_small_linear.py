"""small_linear: a linear layer for few rows with its norm, SwiGLU and residual."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from draftfuse.errors import OpArgumentError
from draftfuse.lowering.ops.small_linear import small_linear

SMALL = torch.ops.draftfuse.small_linear.default


def rms_norm(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * gain


@pytest.mark.parametrize("rows", [1, 4])
def test_is_a_linear_layer(rows: int) -> None:
    x, weight = torch.randn(rows, 12), torch.randn(6, 12)
    torch.testing.assert_close(small_linear(x, weight), x @ weight.T)


def test_takes_norm_swiglu_and_residual_along() -> None:
    x, weight, gain, residual = torch.randn(2, 12), torch.randn(8, 12), torch.rand(12), torch.randn(2, 4)
    gate, up = (rms_norm(x, gain) @ weight.T).chunk(2, dim=-1)
    expected = F.silu(gate) * up + residual
    torch.testing.assert_close(small_linear(x, weight, gain, 1e-5, True, residual), expected)


def test_result_is_new_and_contiguous() -> None:
    x, weight = torch.randn(2, 3, 12)[:, 1], torch.randn(6, 12)
    out = small_linear(x, weight)
    assert out.is_contiguous()
    assert out.untyped_storage().data_ptr() not in (x.untyped_storage().data_ptr(), weight.untyped_storage().data_ptr())


@pytest.mark.parametrize("swiglu", [False, True])
def test_opcheck(swiglu: bool) -> None:
    residual = torch.randn(2, 3 if swiglu else 6)
    torch.library.opcheck(SMALL, (torch.randn(2, 8), torch.randn(6, 8), torch.rand(8), 1e-5, swiglu, residual))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((torch.randn(12), torch.randn(6, 12)), "x has 1 dims"),
        ((torch.randn(2, 12), torch.randn(6, 11)), "x and weight differ in K: got 12, expected 11"),
        ((torch.randn(2, 12), torch.randn(6, 12).half()), "weight and x differ in dtype"),
        ((torch.randn(2, 12), torch.randn(5, 12), None, 0.0, True), "weight has no two halves"),
        ((torch.randn(2, 12), torch.randn(6, 12), torch.rand(11)), "gain does not fit x: got 11, expected 12"),
        ((torch.randn(2, 12), torch.randn(6, 12), None, 0.0, False, torch.randn(2, 5)), "residual does not fit"),
    ],
)
def test_errors(args: tuple[object, ...], words: str) -> None:
    with pytest.raises(OpArgumentError, match=words):
        small_linear(*args)  # type: ignore[arg-type]
