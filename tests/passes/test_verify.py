"""verify: each broken invariant is found, and the pass that broke it is named."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, fx

from draftfuse.lowering.generated import register_refresh
from draftfuse.passes import ir, run
from draftfuse.passes.lower_metadata_refresh import lower_metadata_refresh
from draftfuse.passes.verify import verify
from tests.passes.helpers import at, build, log, numbers

A, OUT = numbers(4), torch.zeros(4)


def loop(a: Tensor, out: Tensor) -> None:
    for step in (1, 2):
        with at("refresh", step):
            start = (a + out).clamp(min=0)
        with at("forward", step):
            log(start * 2, out)


def lowered() -> fx.Graph:
    graph = build(loop, A, OUT)
    lower_metadata_refresh(graph, register=register_refresh)
    return graph


def expect(graph: fx.Graph, message: str) -> None:
    with pytest.raises(AssertionError, match=f"^after some_pass: {message}"):
        verify(graph, after="some_pass")


def test_sound_graphs_pass() -> None:
    verify(build(loop, A, OUT))
    verify(lowered())


def test_placeholders_come_first() -> None:
    graph = build(loop, A, OUT)
    call = next(n for n in graph.nodes if n.op == "call_function")
    with graph.inserting_after(call):
        graph.placeholder("late").meta["val"] = ir.value(call)
    expect(graph, "placeholders come first and one output comes last")


def test_the_output_comes_last() -> None:
    graph = build(loop, A, OUT)
    graph.output_node().append(next(n for n in graph.nodes if n.op == "call_function"))
    expect(graph, "placeholders come first and one output comes last")


def test_every_placeholder_has_a_fake_value() -> None:
    graph = build(loop, A, OUT)
    del ir.placeholders(graph)[0].meta["val"]
    expect(graph, r"no fake value: \['a_1'\]")


def test_nobody_uses_the_result_of_a_mutation() -> None:
    def adds(a: Tensor, out: Tensor) -> None:
        out.add_(a)
        out.mul_(out.clone())

    graph = build(adds, A, OUT)
    written = next(n for n in graph.nodes if n.target is torch.ops.aten.add_.Tensor)
    clone = next(n for n in graph.nodes if n.target is torch.ops.aten.clone.default)
    clone.args = (written,)
    expect(graph, r"the result of a mutation is used: \['add_'\]")


def test_a_view_is_of_the_memory_of_its_argument() -> None:
    def views(a: Tensor, out: Tensor) -> None:
        out[1:].copy_(a[1:])

    graph = build(views, A, OUT)
    a, out = ir.placeholders(graph)
    next(n for n in a.users if ir.is_view(n)).args = (out, 0, 1, 4)
    expect(graph, "the fake value is of other memory than that of the argument: ")


def test_a_row_is_written_before_it_is_read() -> None:
    graph = lowered()
    call = next(n for n in graph.nodes if "body" in n.meta)
    reader = next(n for n in graph.nodes if n.target is torch.ops.aten.mul.Tensor)
    reader.append(call)
    expect(graph, "row_clamp is read before it is written")


def test_a_row_is_not_read_through_a_view_before_it_is_written() -> None:
    graph = lowered()
    row = next(n for n in ir.placeholders(graph) if n.meta.get("owned"))
    reader = next(n for n in graph.nodes if n.target is torch.ops.aten.mul.Tensor)
    with graph.inserting_after(ir.placeholders(graph)[-1]):
        view = ir.call(graph, torch.ops.aten.alias.default, (row,), {}, reader)
    reader.args = (view, 2)
    view.append(reader)
    expect(graph, "row_clamp is read before it is written")


def test_a_row_is_written_once() -> None:
    graph = lowered()
    row = next(n for n in ir.placeholders(graph) if n.meta.get("owned"))
    with graph.inserting_before(graph.output_node()):
        again = graph.call_function(torch.ops.aten.copy_.default, (row, ir.placeholders(graph)[0]))
    again.meta["val"] = ir.value(row)
    expect(graph, "row_clamp is written more than once")


def test_run_checks_after_each_pass_and_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks_views(graph: fx.Graph) -> int:
        del ir.placeholders(graph)[0].meta["val"]
        return 1

    monkeypatch.setenv("DRAFTFUSE_CHECK", "1")
    with pytest.raises(AssertionError, match=r"^after breaks_views: no fake value"):
        run(build(loop, A, OUT), [partial(breaks_views)])
    monkeypatch.setenv("DRAFTFUSE_CHECK", "0")
    assert [report.name for report in run(build(loop, A, OUT), [partial(breaks_views)])] == ["breaks_views"]
