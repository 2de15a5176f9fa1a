"""erase_taps: markers go, what they marked stays and remembers its names."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import Tensor

from draftfuse.lowering.ops import tap
from draftfuse.passes import ir
from draftfuse.passes.erase_taps import erase_taps
from draftfuse.passes.render import render
from tests.passes.helpers import assert_equal_eager, at, build, targets


def tapped(lens: Tensor, out: Tensor) -> None:
    with at("refresh", 1):
        start = lens - 4
        tap(start, "group0.metadata.start", 1)
        tap(lens, "inputs.seq_lens", 1)
    with at("refresh", 2):
        tap(start, "group0.metadata.start", 2)
    out.copy_(start * 2)


LENS, OUT = torch.tensor([5.0, 9.0]), torch.zeros(2)


def test_before_and_after() -> None:
    graph = build(tapped, LENS, OUT)
    assert erase_taps(graph) == 3
    assert_expected_inline(
        render(graph),
        """\
%lens_1: f32[2] = input('lens')
%out_1: f32[2] = input('out')
%sub: f32[2] = aten.sub.Tensor(%lens_1, 4)  # refresh 1
%mul: f32[2] = aten.mul.Tensor(%sub, 2)
%copy_: f32[2] = aten.copy_.default(%out_1, %mul)
return []
""",
    )


def test_leaves_other_graphs_alone() -> None:
    def plain(lens: Tensor, out: Tensor) -> None:
        out.copy_(lens - 4)

    graph = build(plain, LENS, OUT)
    before = render(graph)
    assert erase_taps(graph) == 0
    assert render(graph) == before


def test_is_idempotent() -> None:
    graph = build(tapped, LENS, OUT)
    erase_taps(graph)
    assert erase_taps(graph) == 0


def test_keeps_values() -> None:
    graph = build(tapped, LENS, OUT)
    erase_taps(graph)
    assert_equal_eager(tapped, graph, LENS, OUT)


def test_a_value_with_several_names_remembers_all() -> None:
    graph = build(tapped, LENS, OUT)
    erase_taps(graph)
    named = {node.name: node.meta["taps"] for node in graph.nodes if "taps" in node.meta}
    assert named == {
        "lens_1": ["inputs.seq_lens@1"],
        "sub": ["group0.metadata.start@1", "group0.metadata.start@2"],
    }


def test_a_value_that_was_only_named_is_dead_afterwards() -> None:
    def named(lens: Tensor, out: Tensor) -> None:
        tap(lens + 1, "unused", 1)
        out.copy_(lens)

    graph = build(named, LENS, OUT)
    ir.eliminate_dead_code(graph)
    assert "aten.add.Tensor" in targets(graph)
    erase_taps(graph)
    ir.eliminate_dead_code(graph)
    assert targets(graph) == ["aten.copy_.default"]
