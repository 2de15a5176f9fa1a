"""fuse_small_linears: what models write around a product of few rows becomes one operator."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from draftfuse.passes.fuse_small_linears import fuse_small_linears, never
from draftfuse.passes.render import render
from tests.passes.helpers import assert_close_eager, build, targets


def always(product: fx.Node) -> bool:
    return True


def norm(x: Tensor, gain: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * gain


def residual(x: Tensor, weight: Tensor, out: Tensor) -> None:
    out.copy_(x + F.linear(x, weight))


def mlp(x: Tensor, gain: Tensor, gate_up: Tensor, down: Tensor, out: Tensor) -> None:
    gate, up = F.linear(norm(x, gain), gate_up).chunk(2, dim=-1)
    out.copy_(x + F.linear(F.silu(gate) * up, down))


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(s).to(dtype) for s in shapes]


def test_golden() -> None:
    graph = build(residual, *tensors((2, 4), (4, 4), (2, 4)))
    assert fuse_small_linears(graph, applies=always) == 1
    assert render(graph) == (
        "%x_1: f32[2, 4] = input('x')\n"
        "%weight_1: f32[4, 4] = input('weight')\n"
        "%out_1: f32[2, 4] = input('out')\n"
        "%small_linear_default: f32[2, 4] = draftfuse.small_linear.default(%x_1, %weight_1, None, 0.0, False, %x_1)\n"
        "%copy_: f32[2, 4] = aten.copy_.default(%out_1, %small_linear_default)\n"
        "return []\n"
    )


def test_takes_norm_swiglu_and_residual_along() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        graph = build(mlp, *tensors((2, 8), (8,), (12, 8), (8, 6), (2, 8), dtype=dtype))
        assert fuse_small_linears(graph, applies=always) == 2
        assert targets(graph) == ["draftfuse.small_linear.default"] * 2 + ["aten.copy_.default"]


def test_leaves_products_alone_that_do_not_apply() -> None:
    def plain(x: Tensor, weight: Tensor, out: Tensor) -> None:
        out.copy_(x @ weight)  # columns of a weight: another kernel's work

    def made(x: Tensor, weight: Tensor, out: Tensor) -> None:
        out.copy_(F.linear(x, weight * 2))

    for function in (plain, made):
        graph = build(function, *tensors((2, 4), (4, 4), (2, 4)))
        before = render(graph)
        assert fuse_small_linears(graph, applies=always) == 0
        assert render(graph) == before
    graph = build(residual, *tensors((2, 4), (4, 4), (2, 4)))
    assert fuse_small_linears(graph, applies=never) == 0


def test_idempotent() -> None:
    graph = build(mlp, *tensors((2, 8), (8,), (12, 8), (8, 6), (2, 8)))
    fuse_small_linears(graph, applies=always)
    before = render(graph)
    assert fuse_small_linears(graph, applies=always) == 0
    assert render(graph) == before


def test_values_equal_eager() -> None:
    for function, shapes in ((residual, ((2, 4), (4, 4), (2, 4))), (mlp, ((2, 8), (8,), (12, 8), (8, 6), (2, 8)))):
        given = tensors(*shapes)
        graph = build(function, *given)
        fuse_small_linears(graph, applies=always)
        assert_close_eager(function, graph, *given)


def test_a_value_with_several_users_is_not_swallowed() -> None:
    def shared(x: Tensor, gain: Tensor, weight: Tensor, out: Tensor, normed: Tensor, raw: Tensor) -> None:
        inner = norm(x, gain)
        product = F.linear(inner, weight)
        normed.copy_(inner)
        raw.copy_(product)
        out.copy_(x + product)

    given = tensors((2, 4), (4,), (4, 4), (2, 4), (2, 4), (2, 4))
    graph = build(shared, *given)
    assert fuse_small_linears(graph, applies=always) == 1
    assert "aten.rsqrt.default" in targets(graph)
    assert "aten.add.Tensor" in targets(graph)[targets(graph).index("draftfuse.small_linear.default") :]
    assert_close_eager(shared, graph, *given)
