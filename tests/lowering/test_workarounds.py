"""Faults of Inductor that no graph may meet."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from draftfuse.errors import OpArgumentError
from draftfuse.lowering.ops import argmax, sort
from draftfuse.lowering.workarounds import LONG, keep_wide_sorts_eager, materialise_boundaries, share_long_rows
from draftfuse.passes import ir
from tests.passes.helpers import assert_equal_eager, build, targets


def search(starts: Tensor, tokens: Tensor, out: Tensor) -> None:
    out.copy_(torch.searchsorted(starts[1:], tokens, right=True))


def test_a_view_to_search_in_becomes_a_tensor_of_its_own() -> None:
    given = [torch.tensor([0, 2, 5, 9]), torch.arange(9), torch.zeros(9, dtype=torch.int64)]
    graph = build(search, *given)
    assert materialise_boundaries(graph) == 1
    names = targets(graph)
    assert names[names.index("aten.searchsorted.Tensor") - 1] == "aten.clone.default"
    assert_equal_eager(search, graph, *given)
    assert materialise_boundaries(graph) == 0


def test_whole_tensors_and_values_are_left_alone() -> None:
    def whole(starts: Tensor, tokens: Tensor, out: Tensor) -> None:
        out.copy_(torch.bucketize(tokens, starts) + torch.searchsorted(starts + 1, tokens))

    graph = build(whole, torch.tensor([0, 2, 5, 9]), torch.arange(9), torch.zeros(9, dtype=torch.int64))
    assert materialise_boundaries(graph) == 0


def test_every_segment_goes_through_it() -> None:
    from draftfuse.lowering.partition import Segment
    from draftfuse.lowering.segment import decompose, extract
    from draftfuse.passes import ir

    graph = build(search, torch.tensor([0, 2, 5, 9]), torch.arange(9), torch.zeros(9, dtype=torch.int64))
    calls = [n for n in graph.nodes if n.op == "call_function" and not ir.is_mutation(n)]
    stores = [n for n in graph.nodes if ir.is_mutation(n)]
    flat = decompose(extract(Segment(calls, stores), None), ir.fake_mode_of(graph))
    assert "aten.clone.default" in targets(flat.graph)


def by_expert(ids: Tensor, out: Tensor) -> None:
    out.copy_(ids.argsort(descending=True))


def on_a_gpu(x: Tensor) -> Any:
    """A symbolic sort as a GPU would meet it, as far as the workaround asks."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    size = mode.from_tensor(x, symbolic_context=context).shape[0]
    with mode:
        return torch.empty(size, dtype=x.dtype, device="cuda")


def test_a_sort_along_a_symbol_stays_pytorchs_on_a_gpu() -> None:
    graph = fx.Graph()
    ids = graph.placeholder("ids")
    ids.meta["val"] = on_a_gpu(torch.arange(6))
    with ids.meta["val"].fake_mode:
        found = ir.call(graph, torch.ops.aten.sort.default, (ids, -1, True), {}, ids)
        item = ir.call(graph, operator.getitem, (found, 1), {}, ids)
    graph.output((item,))
    assert keep_wide_sorts_eager(graph) == 1
    assert targets(graph) == ["draftfuse.sort.default", "getitem"]
    assert item.args[0].args == (ids, -1, True, False)
    assert keep_wide_sorts_eager(graph) == 0


def test_other_sorts_are_left_to_inductor() -> None:
    graph = build(by_expert, torch.tensor([3, 1, 2]), torch.zeros(3, dtype=torch.int64))
    assert keep_wide_sorts_eager(graph) == 0


@pytest.mark.parametrize("stable", [False, True])
def test_the_operator_sorts(stable: bool) -> None:
    x = torch.randn(4, 6).T
    values, indices = sort(x, 0, True, stable)
    expected = torch.sort(x, dim=0, descending=True, stable=stable)
    assert torch.equal(values, expected.values)
    assert torch.equal(indices, expected.indices)
    torch.library.opcheck(torch.ops.draftfuse.sort.default, (x, 0, True, stable))


def logits_of(columns: int, device: str, scaled: bool = False) -> fx.Graph:
    """Product, perhaps a scale, and argmax."""
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    with FakeTensorMode(allow_non_fake_inputs=True):
        x.meta["val"] = torch.empty(4, 8, device=device)
        weight.meta["val"] = torch.empty(8, columns, device=device)
        logits = ir.call(graph, torch.ops.aten.mm.default, (x, weight), {}, x)
        if scaled:
            logits = ir.call(graph, torch.ops.aten.mul.Tensor, (logits, 2.0), {}, x)
        graph.output((ir.call(graph, torch.ops.aten.argmax.default, (logits, -1), {}, x),))
    return graph


def test_the_argmax_of_long_rows_of_a_product_is_shared_on_a_gpu() -> None:
    graph = logits_of(LONG, "cuda")
    assert share_long_rows(graph) == 1
    assert targets(graph) == ["aten.mm.default", "draftfuse.argmax.default"]


def test_logits_from_outside_are_in_memory_too() -> None:
    graph = fx.Graph()
    logits = graph.placeholder("logits")
    with FakeTensorMode():
        logits.meta["val"] = torch.empty(4, LONG, device="cuda")
        graph.output((ir.call(graph, torch.ops.aten.argmax.default, (logits, -1), {}, logits),))
    assert share_long_rows(graph) == 1


@pytest.mark.parametrize("case", [(LONG - 1, "cuda", False), (LONG, "cpu", False), (LONG, "cuda", True)])
def test_other_argmaxes_are_left_to_inductor(case: tuple[int, str, bool]) -> None:
    assert share_long_rows(logits_of(*case)) == 0


def test_the_operator_picks_the_first_of_the_largest() -> None:
    x = torch.tensor([[1.0, 3.0, 3.0], [-1.0, float("nan"), 9.0]])
    assert argmax(x).tolist() == [1, 1]
    torch.library.opcheck(torch.ops.draftfuse.argmax.default, (x,))
    with pytest.raises(OpArgumentError, match="x has no columns"):
        argmax(torch.empty(2, 0))
    with pytest.raises(OpArgumentError, match="1 dims"):
        argmax(torch.empty(2))
