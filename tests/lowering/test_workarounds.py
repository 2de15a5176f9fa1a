"""Faults of Inductor that no graph may meet."""

from __future__ import annotations

import torch
from torch import Tensor

from draftfuse.lowering.workarounds import materialise_boundaries
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
