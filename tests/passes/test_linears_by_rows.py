"""linears_by_rows: products with a weight that nobody writes choose their kernel where they run."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from draftfuse.passes.linears_by_rows import linears_by_rows
from draftfuse.passes.render import render
from tests.passes.helpers import assert_close_eager, build, targets


def always(product: fx.Node) -> bool:
    return True


def linear(x: Tensor, weight: Tensor, out: Tensor) -> None:
    out.copy_(F.linear(x, weight))


def tensors() -> list[Tensor]:
    return [torch.randn(s) for s in ((3, 4), (6, 4), (3, 6))]


def test_golden() -> None:
    graph = build(linear, *tensors())
    assert linears_by_rows(graph, applies=always) == 1
    assert render(graph) == (
        "%x_1: f32[3, 4] = input('x')\n"
        "%weight_1: f32[6, 4] = input('weight')\n"
        "%out_1: f32[3, 6] = input('out')\n"
        "%linear_by_rows_default: f32[3, 6] = draftfuse.linear_by_rows.default(%x_1, %weight_1)\n"
        "%copy_: f32[3, 6] = aten.copy_.default(%out_1, %linear_by_rows_default)\n"
        "return []\n"
    )


def test_leaves_products_alone_that_do_not_apply_or_whose_weight_is_made_or_written() -> None:
    def made(x: Tensor, weight: Tensor, out: Tensor) -> None:
        out.copy_(F.linear(x, weight * 2))

    def written(x: Tensor, weight: Tensor, out: Tensor) -> None:
        weight[:2].mul_(2)
        out.copy_(F.linear(x, weight))

    for function, applies in ((made, always), (written, always), (linear, lambda product: False)):
        graph = build(function, *tensors())
        assert linears_by_rows(graph, applies=applies) == 0
        assert "draftfuse.linear_by_rows.default" not in targets(graph)


def test_leaves_a_weight_alone_that_a_sub_graph_holds() -> None:
    graph = build(linear, *tensors())
    _x, weight, _ = graph.find_nodes(op="placeholder")
    with graph.inserting_after(list(graph.find_nodes(op="placeholder"))[-1]):
        held = graph.call_function(torch.ops.higher_order.auto_functionalized, (weight,))
        held.meta["val"] = weight.meta["val"]
    assert linears_by_rows(graph, applies=always) == 0


def test_idempotent() -> None:
    graph = build(linear, *tensors())
    linears_by_rows(graph, applies=always)
    before = render(graph)
    assert linears_by_rows(graph, applies=always) == 0
    assert render(graph) == before


def test_values_equal_eager() -> None:
    given = tensors()
    graph = build(linear, *given)
    linears_by_rows(graph, applies=always)
    assert_close_eager(linear, graph, *given)
