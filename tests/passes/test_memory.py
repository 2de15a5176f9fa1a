"""memory: what part of a storage a view covers, in which order, and what must stay where it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from draftfuse.passes import ir, memory
from tests.passes.helpers import add_in, build, numbers

A, OUT = numbers(8), torch.zeros(8)
aten = torch.ops.aten


def nodes(graph: fx.Graph, target: Any) -> list[fx.Node]:
    return [n for n in graph.nodes if n.target is target]


def test_geometry_tells_what_part_and_how() -> None:
    base = torch.zeros(8, dtype=torch.complex64)
    views = [
        base,
        base[:4],
        base[4:],
        base[::2],
        base.conj(),
        torch.view_as_real(base),
        base.view(2, 4),
        base.view(4, 2),
    ]
    geometries = [memory.geometry(v) for v in views]
    assert len(set(geometries)) == len(views)
    assert memory.geometry(base[2:6]) == memory.geometry(base[1:][1:5])


def test_pinned_storages_are_written_or_named_by_place() -> None:
    def pins(a: Tensor, out: Tensor) -> None:
        free, named, filled = a * 2, a * 3, a * 4
        add_in(filled, a)
        out.copy_(free + named.as_strided((8,), (1,)) + filled)

    graph = build(pins, A, OUT)
    pinned = memory.pinned_storages(graph)
    assert [ir.storage(n) in pinned for n in nodes(graph, aten.mul.Tensor)] == [False, True, True]


def test_expanded_tensors_are_found() -> None:
    def expands(a: Tensor, out: Tensor) -> None:
        out.copy_(a[:1].expand(8) + a[:1].expand(1))

    graph = build(expands, A, OUT)
    assert [memory.is_expanded(n) for n in nodes(graph, aten.expand.default)] == [True, False]


@pytest.mark.parametrize(
    ("view", "order"),
    [
        (torch.zeros(2, 3, 4), [0, 1, 2]),
        (torch.zeros(2, 3, 4).permute(2, 0, 1), [1, 2, 0]),
        (torch.zeros(2, 3).t(), [1, 0]),
        (torch.zeros(2, 9)[:, 2:5], [0, 1]),
        (torch.zeros(2, 1, 3).transpose(1, 2), [0, 1]),
        (torch.zeros(3).expand(4, 3), [1]),
        (torch.zeros(()), []),
    ],
)
def test_memory_order_leaves_out_what_no_stride_places(view: Tensor, order: list[int]) -> None:
    assert memory.memory_order(view) == order


@pytest.mark.parametrize(
    ("first", "second", "overlap"),
    [
        (slice(0, 4), slice(4, 8), False),
        (slice(0, 5), slice(4, 8), True),
        (slice(0, 8, 2), slice(1, 8, 2), True),  # interleaved: the spans meet, which is what is looked at
        (slice(2, 2), slice(0, 8), True),
    ],
)
def test_overlap_is_of_spans(first: slice, second: slice, overlap: bool) -> None:
    def views(a: Tensor, out: Tensor) -> None:
        out[:1].copy_(a[first].sum() + a[second].sum())

    graph = build(views, A, OUT)
    read = [n.args[0] for n in nodes(graph, aten.sum.default)]
    assert memory.may_overlap(*read) is overlap
    assert not memory.may_overlap(read[0], ir.placeholders(graph)[1])


def test_buffers_in_one_storage_overlap_where_they_do() -> None:
    def sums(left: Tensor, right: Tensor, out: Tensor) -> None:
        out.copy_(left.sum() + right.sum())

    whole = numbers(8)
    for first, second, overlap in ((whole[:4], whole[4:], False), (whole[:6], whole[4:], True)):
        graph = build(sums, first, second, torch.zeros(1))
        left, right, out = ir.placeholders(graph)
        assert memory.may_overlap(left, right) is overlap
        assert not memory.may_overlap(left, out)
