"""Emission: where the IR is cut, what may be stored by generated code, and what comes out of Inductor."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from draftfuse import loop, passes
from draftfuse.lowering import emit as emission
from draftfuse.lowering.effects import hidden_reads
from draftfuse.lowering.emit import Emission, emit
from draftfuse.lowering.generated import register_refresh
from draftfuse.lowering.partition import Partition, Segment, partition
from draftfuse.lowering.workspace import ROW_ALIGNMENT, Workspace
from draftfuse.passes import ir
from draftfuse.trace import trace
from tests.draftfuse.toy import Toy, small
from tests.passes.helpers import add_in, all_passes, assert_equal_eager, build, log, numbers, peek, run_emitted

A, B, M = numbers(16), numbers(16, first=30), numbers(16).view(4, 4)
aten = torch.ops.aten


def shape_of(program: Partition) -> list[str]:
    """A segment as ``segment(nodes, stores)``, a call as its operator."""
    return [
        f"segment({len(i.nodes)}, {len(i.stores)})" if isinstance(i, Segment) else str(i.target) for i in program.items
    ]


def segments(graph: fx.Graph) -> list[Segment]:
    return [i for i in partition(graph).items if isinstance(i, Segment)]


# Where the IR is cut


def test_pure_runs_between_opaque_operators_are_segments() -> None:
    def function(a: Tensor, b: Tensor, m: Tensor) -> None:
        x = a * 2 + b
        log(x, a)
        y = peek(a - x)
        b.copy_(y.view(4, 4).t().reshape(16) + 1)

    program = partition(build(function, A, B, M))
    assert shape_of(program)[:4] == ["segment(2, 0)", "toy.log.default", "segment(1, 0)", "toy.peek.default"]
    assert shape_of(program)[4].endswith(", 1)")


def test_views_of_buffers_are_taken_once() -> None:
    def function(a: Tensor, b: Tensor, m: Tensor) -> None:
        log(a[:4], b[4:8])
        log(m.t()[1], b.view(4, 4)[2])

    program = partition(build(function, A, B, M))
    assert shape_of(program) == ["toy.log.default"] * 2
    assert [str(n.target) for n in program.static] == [
        "aten.slice.Tensor",
        "aten.slice.Tensor",
        "aten.t.default",
        "aten.select.int",
        "aten.view.default",
        "aten.select.int",
    ]


def several_results(a: Tensor, b: Tensor, m: Tensor) -> None:
    for _ in range(2):
        best, where = torch.topk(a, 4)
        left, right = b.split(8)
        add_in(a[:4], best + where)
        log(left + right, b[8:])


def test_operators_with_several_results_run_each_time() -> None:
    graph = build(several_results, A, B, M)
    assert all(ir.is_view(n) for n in partition(graph).static)
    assert_equal_eager(several_results, graph, A, B, M, run=run_emitted)


def test_several_views_of_memory_that_an_operator_writes_stay_views() -> None:
    def function(a: Tensor, b: Tensor, m: Tensor) -> None:
        local = a * 1
        left, right = local.split(8)
        add_in(left, b[:8])
        log(right + left, b[:8])
        add_in(right, left)
        a.copy_(local)

    graph = build(function, A, B, M)
    made = next(n for n in graph.nodes if n.target is aten.mul.Tensor)
    assert not any(made in s.nodes for s in segments(graph))
    assert_equal_eager(function, graph, A, B, M, run=run_emitted)


# What a segment may store


def stores_in_order(a: Tensor, b: Tensor, m: Tensor) -> None:
    x = a * 2
    tail, square = x[8:], x.view(4, 4)
    a.copy_(x)
    b[:8].copy_(tail)
    m.copy_(square)


def test_aligned_stores_belong_to_the_segment_before() -> None:
    graph = build(stores_in_order, A, B, M)
    assert [len(s.stores) for s in segments(graph)] == [3]


def misaligned(a: Tensor, b: Tensor, m: Tensor) -> None:
    b[1:9].copy_(a[:8] * 2)


def reads_the_target_through_another_view(a: Tensor, b: Tensor, m: Tensor) -> None:
    a[4:].copy_(a[:-4] + 1)


def stores_what_an_earlier_store_overwrote(a: Tensor, b: Tensor, m: Tensor) -> None:
    first, second = a.clone(), b.clone()
    a.copy_(second)
    b.copy_(first)


def stores_a_view_that_an_earlier_store_overwrote(a: Tensor, b: Tensor, m: Tensor) -> None:
    x, square = b * 2, a.clone().view(4, 4)[:, :]
    a.copy_(x)
    m.copy_(square)


def writes_one_buffer_twice(a: Tensor, b: Tensor, m: Tensor) -> None:
    x = b * 2
    head, tail = x[:8], x[8:]
    a[:8].copy_(tail)
    a[8:].copy_(head)


def reads_what_it_stored(a: Tensor, b: Tensor, m: Tensor) -> None:
    a.copy_(b * 2)
    b.copy_(a + 1)


def converts(a: Tensor, b: Tensor, m: Tensor) -> None:
    a.copy_((b * 2).to(torch.int64))


NOT_FOLDED = [
    (misaligned, 0),
    (reads_the_target_through_another_view, 0),
    (stores_what_an_earlier_store_overwrote, 1),
    (stores_a_view_that_an_earlier_store_overwrote, 1),
    (writes_one_buffer_twice, 1),
    (reads_what_it_stored, 2),
    (converts, 0),
]


@pytest.mark.parametrize(("function", "stores"), NOT_FOLDED, ids=lambda v: getattr(v, "__name__", ""))
def test_a_store_that_generated_code_could_get_wrong_is_a_call(function: Callable[..., None], stores: int) -> None:
    graph = build(function, A, B, M)
    items = partition(graph).items
    assert sum(len(i.stores) for i in items if isinstance(i, Segment)) == stores
    left = [i for i in items if isinstance(i, fx.Node) and i.target is aten.copy_.default]
    assert len(left) + stores == sum(n.target is aten.copy_.default for n in graph.nodes)
    assert_equal_eager(function, graph, A, B, M, run=run_emitted)


def writes_back_its_start(a: Tensor, b: Tensor, m: Tensor) -> None:
    m.copy_(torch.cat([m[:, :1], a[:12].view(4, 3) * 2], dim=1))


def reads_its_start_twice(a: Tensor, b: Tensor, m: Tensor) -> None:
    first = m[:, :1]
    m.copy_(torch.cat([first, (a[:12].view(4, 3) * first)], dim=1))


def moves_its_start(a: Tensor, b: Tensor, m: Tensor) -> None:
    m.copy_(torch.cat([a[:12].view(4, 3) * 2, m[:, :1]], dim=1))


@pytest.mark.parametrize(
    ("function", "stores"), [(writes_back_its_start, 1), (reads_its_start_twice, 0), (moves_its_start, 0)]
)
def test_only_what_is_written_back_where_it_was_may_be_read_beside(function: Callable[..., None], stores: int) -> None:
    graph = build(function, A, B, M)
    assert sum(len(s.stores) for s in segments(graph)) == stores
    assert_equal_eager(function, graph, A, B, M, run=run_emitted)


def test_separate_buffers_of_one_storage_are_stored_like_others() -> None:
    def function(a: Tensor, b: Tensor, m: Tensor) -> None:
        a.copy_(b * 2)

    whole = numbers(32)
    assert [len(s.stores) for s in segments(build(function, whole[:16], whole[16:], M))] == [1]
    assert [len(s.stores) for s in segments(build(function, whole[:16], whole[8:24], M))] == [0]


# What comes out of Inductor


def everything(a: Tensor, b: Tensor, m: Tensor) -> None:
    """The patterns above, one behind the other, on one set of buffers."""
    for function in (
        several_results,
        stores_in_order,
        misaligned,
        reads_the_target_through_another_view,
        stores_what_an_earlier_store_overwrote,
        stores_a_view_that_an_earlier_store_overwrote,
        writes_one_buffer_twice,
        reads_what_it_stored,
        writes_back_its_start,
        reads_its_start_twice,
        moves_its_start,
        converts,
    ):
        function(a, b, m)
        log(a, b)
        a.remainder_(97)


@pytest.mark.slow
@pytest.mark.parametrize("through_passes", [False, True], ids=["as written", "through the passes"])
def test_inductor_keeps_program_order(through_passes: bool) -> None:
    graph = build(everything, A, B, M)
    if through_passes:
        passes.run(graph, all_passes())
    made: list[Emission] = []
    assert_equal_eager(
        everything, graph, A, B, M, run=lambda g, tensors: made.append(run_emitted(g, tensors, "inductor"))
    )
    assert all(not c.findings for c in made[0].calls.values())


@pytest.mark.slow
def test_a_scatter_into_a_fresh_tensor_compiles() -> None:
    def function(a: Tensor, b: Tensor, m: Tensor) -> None:
        rows = torch.zeros(4, 8)
        rows.scatter_(1, torch.arange(4).view(4, 1), m[:, :1])
        log(rows.sum(1), a[:4])

    graph = build(function, A, B, M)
    passes.run(graph, all_passes())
    assert_equal_eager(function, graph, A, B, M, run=lambda g, tensors: run_emitted(g, tensors, "inductor"))


def built(k: int) -> Emission:
    """The loop of a toy after all passes, not compiled."""
    spec = Toy(small(k=k, fields=("step", "invariant")))
    traced = trace(loop.decode_loop, (spec, 3, k, loop.graph_tap), "num_reqs")
    passes.run(traced.graph, passes.pipeline(register=register_refresh, hidden_reads=hidden_reads))
    return emit(traced.graph, traced.fake_mode, traced.tensors, compiler="none")


def keys(made: Emission) -> list[str]:
    found = [emission._extract_item(item, made.symbol) for item in made.program.items]
    return [e.key for e in found if e is not None]


def test_distinct_segments_do_not_grow_with_k() -> None:
    few, many = keys(built(5)), keys(built(8))  # five: a first, a middle, a last but one and a last step
    assert len(many) > len(few)
    assert len(set(many)) == len(set(few))


def test_rows_start_on_cache_lines_and_do_not_meet() -> None:
    made = built(4)
    names = [n.name for n in ir.placeholders(made.graph) if n.meta.get("owned")]
    assert len(names) >= 3
    workspace = Workspace()
    workspace.memory(torch.device("cpu"), 1 << 16)
    for rows in (1, 3, 4):
        environment = made._environment(rows, workspace)
        owned = [value for node, value in environment.items() if node.name in names]
        base = owned[0].untyped_storage().data_ptr()
        spans = sorted((t.data_ptr() - base, t.data_ptr() - base + t.numel() * t.element_size()) for t in owned)
        assert all(begin % ROW_ALIGNMENT == 0 for begin, _ in spans)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))


def test_a_workspace_that_grows_keeps_the_rows_that_it_gave() -> None:
    workspace = Workspace()
    rows = workspace.start()
    first = rows.take((4,), torch.int64, torch.device("cpu")).fill_(7)
    second = rows.take((1 << 16,), torch.int64, torch.device("cpu")).fill_(8)
    assert first.tolist() == [7] * 4
    assert (second == 8).all()
    assert workspace.num_bytes >= second.numel() * 8


# A whole loop through Inductor, compiled once a session


@pytest.mark.slow
def test_a_compiled_loop_drafts_the_same_tokens(compiled_toy: Any) -> None:
    assert [t.tolist() for t in compiled_toy.fused.tokens] == [t.tolist() for t in compiled_toy.eager.tokens]
    drafted = torch.cat([t.flatten() for t in compiled_toy.eager.tokens])
    assert len(drafted.unique()) > 5


@pytest.mark.slow
def test_a_compiled_loop_leaves_the_same_state(compiled_toy: Any) -> None:
    for eager, fused in zip(compiled_toy.eager.states, compiled_toy.fused.states, strict=True):
        for name, tensor in eager.items():
            if tensor.is_floating_point():
                torch.testing.assert_close(
                    fused[name], tensor, rtol=1e-5, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
                )
            else:
                assert torch.equal(fused[name], tensor), name
    assert torch.equal(compiled_toy.fused.fused.spec.notes, compiled_toy.eager.fused.spec.notes)


@pytest.mark.slow
def test_a_buffer_written_twice_a_step_is_read_in_program_order(compiled_toy: Any) -> None:
    assert torch.equal(compiled_toy.fused.tokens[0], compiled_toy.eager.tokens[0])
    assert not torch.equal(compiled_toy.fused.tokens[0], compiled_toy.stale())  # the tokens would show a late read
    items = [i for e in compiled_toy.fused.fused.runners._emissions.values() for i in e.program.items]
    assert sum(isinstance(i, fx.Node) and "toy_log" in str(i.target) for i in items) >= 2 * 3


@pytest.mark.slow
def test_generated_code_writes_in_place(compiled_toy: Any) -> None:
    assert compiled_toy.after == compiled_toy.before
    emissions = compiled_toy.fused.fused.runners._emissions.values()
    compiled = [c for e in emissions for c in e.calls.values()]
    assert compiled
    assert [c.findings for c in compiled if c.findings] == []
    assert any(e.stored for made in emissions for e in made.extracted.values())


@pytest.mark.slow
def test_equal_segments_are_compiled_once(compiled_toy: Any) -> None:
    for build_report in compiled_toy.fused.fused.report.builds:
        assert build_report.unique_segments < build_report.segments
