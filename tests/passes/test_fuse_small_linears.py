"""fuse_small_linears: what models write around a product of few rows becomes one operator."""

from __future__ import annotations

import pytest
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

    def changed(x: Tensor, weight: Tensor, out: Tensor) -> None:
        weight[:2].mul_(2)  # the kernel may read weights before an earlier write to them is done
        out.copy_(F.linear(x, weight))

    for function in (plain, made, changed):
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


def eagle(
    ids: Tensor, tokens: Tensor, table: Tensor, hidden: Tensor, a: Tensor, b: Tensor, fc: Tensor, head: Tensor
) -> None:
    x = torch.cat([norm(F.embedding(ids.int(), table), a), norm(hidden, b)], dim=-1)
    tokens.copy_(F.linear(norm(F.linear(x, fc), a), head).argmax(dim=-1))


def eagle_inputs(half: int = 128, rows: int = 2, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    ids, tokens = torch.randint(20, (rows,)), torch.zeros(rows, dtype=torch.int64)
    shapes = ((20, half), (rows, half), (half,), (half,), (half, 2 * half), (9, half))
    return [ids, tokens, *tensors(*shapes, dtype=dtype)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reads_an_embedding_beside_a_hidden_state_and_picks_tokens(dtype: torch.dtype) -> None:
    given = eagle_inputs(dtype=dtype)
    graph = build(eagle, *given)
    assert fuse_small_linears(graph, applies=always) == 2
    names = targets(graph)
    assert [n for n in names if "small" in n] == [
        "draftfuse.small_linear_pair.default",
        "draftfuse.small_linear_argmax.default",
    ]
    assert "aten.embedding.default" not in names
    pair = next(n for n in graph.nodes if "small_linear_pair" in str(n.target))
    assert pair.args[1].op == "placeholder", "the index is read before it is narrowed to int32"
    assert_close_eager(eagle, graph, *given)


def test_halves_that_no_tile_divides_are_put_side_by_side_first() -> None:
    graph = build(eagle, *eagle_inputs(half=96))
    fuse_small_linears(graph, applies=always)
    assert "draftfuse.small_linear.default" in targets(graph)
    assert "aten.cat.default" in targets(graph)


def test_logits_that_somebody_reads_stay() -> None:
    def both(x: Tensor, weight: Tensor, logits: Tensor, tokens: Tensor) -> None:
        found = F.linear(x, weight)
        logits.copy_(found)
        tokens.copy_(found.argmax(dim=-1))

    def kept(x: Tensor, weight: Tensor, tokens: Tensor) -> None:
        tokens.copy_(F.linear(x, weight).argmax(dim=-1, keepdim=True))

    def first_axis(x: Tensor, weight: Tensor, tokens: Tensor) -> None:
        tokens.copy_(F.linear(x, weight).argmax(dim=0))

    x, weight, logits = tensors((2, 8), (6, 8), (2, 6))
    cases = [(both, [logits, torch.zeros(2, dtype=torch.int64)]), (kept, [torch.zeros(2, 1, dtype=torch.int64)])]
    for function, rest in [*cases, (first_axis, [torch.zeros(6, dtype=torch.int64)])]:
        graph = build(function, x, weight, *rest)
        fuse_small_linears(graph, applies=always)
        assert "aten.argmax.default" in targets(graph)
        assert_close_eager(function, graph, x, weight, *rest)
