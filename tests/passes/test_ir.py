"""ir: what the passes ask of a graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator

from draftfuse.lowering.ops import tap
from draftfuse.passes import ir
from draftfuse.passes.verify import verify
from draftfuse.reference import eagle
from draftfuse.trace import trace
from tests.passes.helpers import add_in, at, build, log, numbers, peek, register, targets

A, OUT = numbers(8), torch.zeros(8)
aten = torch.ops.aten


def nodes(graph: fx.Graph, target: Any) -> list[fx.Node]:
    return [n for n in graph.nodes if n.target is target]


def aliases(a: Tensor, out: Tensor) -> None:
    left, right = a.split(4)
    best, where = torch.sort(a)
    part = a.view(2, 4)[1]
    out[:4].copy_(left + right + part)
    out[4:].copy_(best[:4] + where[:4])


def test_aliases_are_found_by_their_storage() -> None:
    graph = build(aliases, A, OUT)
    a = ir.placeholders(graph)[0]
    split, sort, select = (nodes(graph, t)[0] for t in (aten.split.Tensor, aten.sort.default, aten.select.int))
    assert ir.storage(select) == ir.storage(a) is not None
    assert ir.storage(split) is None
    assert ir.storages(split) == {ir.storage(a)}
    assert len(ir.storages(sort)) == 2
    assert ir.storage(a) not in ir.storages(sort)


def test_views_and_other_names_for_memory() -> None:
    graph = build(aliases, A, OUT)
    split, sort, select = (nodes(graph, t)[0] for t in (aten.split.Tensor, aten.sort.default, aten.select.int))
    assert ir.is_view(select)
    assert ir.root(select) is ir.placeholders(graph)[0]
    assert not ir.is_view(split)
    assert ir.is_alias(split)
    assert all(ir.is_alias(item) for item in split.users)
    assert not ir.is_alias(sort)
    assert not ir.is_alias(nodes(graph, aten.add.Tensor)[0])


def test_static_views_are_known_before_the_loop() -> None:
    def views(a: Tensor, out: Tensor) -> None:
        out[:4].copy_(a[4:])
        out[4:].copy_((a * 2)[:4])

    graph = build(views, A, OUT)
    static = [ir.is_static_view(n) for n in nodes(graph, aten.slice.Tensor)]
    assert static == [True, True, True, False]


@pytest.mark.parametrize(("start", "aligned"), [(0, True), (1, False), (2, False), (4, True), (5, False)])
def test_alignment_is_sixteen_bytes(start: int, aligned: bool) -> None:
    def view(a: Tensor, out: Tensor) -> None:
        out[:2].copy_(a[start : start + 2] * 1)

    graph = build(view, A, OUT)
    read = nodes(graph, aten.mul.Tensor)[0].args[0]
    assert ir.is_aligned(read) is aligned


def test_written_follows_the_schema() -> None:
    rows = register("rows(Tensor x, Tensor(a!)[] out) -> ()", lambda x, out: [o.copy_(x) for o in out])

    def writes(a: Tensor, out: Tensor) -> None:
        out.add_(a)
        log(a, out)
        rows(a[:4], [out[:4], out[4:]])
        torch.add(a, 1, out=out)
        peek(a)

    graph = build(writes, A, OUT)
    calls = [n for n in graph.nodes if n.op == "call_function" and not ir.is_view(n)]
    assert [len(ir.written(n)) for n in calls] == [1, 1, 2, 1, 0]
    assert all(ir.root(t).name == "out_1" for n in calls for t in ir.written(n))
    assert [ir.is_mutation(n) for n in calls] == [True, True, True, True, False]


def test_kinds_of_operators() -> None:
    def kinds(a: Tensor, out: Tensor) -> None:
        total = a * 2
        tap(total, "total", 1)
        noise = torch.rand(8)
        torch._assert_async((a > 0).all())
        out.copy_(peek(total) + noise)

    graph = build(kinds, A, OUT)
    named = {str(n.target): n for n in graph.nodes if n.op == "call_function"}
    pure = {name for name, n in named.items() if ir.is_pure(n)}
    assert pure == {"aten.mul.Tensor", "aten.gt.Scalar", "aten.all.default", "aten.add.Tensor"}
    assert [name for name, n in named.items() if ir.is_opaque(n)] == ["toy.peek.default"]
    assert [name for name, n in named.items() if ir.is_tap(n)] == ["draftfuse.tap.default"]


def test_an_operator_without_a_schema_may_do_anything() -> None:
    class Kernel(HigherOrderOperator):
        def __init__(self) -> None:
            super().__init__("draftfuse_test_kernel")

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs)

    graph = build(aliases, A, OUT)
    a, out = ir.placeholders(graph)
    with graph.inserting_before(graph.output_node()):
        launch = graph.call_function(Kernel(), (3,), {"kwargs": {"x": a, "y": out}})
    launch.meta["val"] = None
    assert ir.is_opaque(launch)
    assert not ir.is_pure(launch)
    assert ir.written(launch) == [a, out]
    ir.eliminate_dead_code(graph)
    assert launch in graph.nodes


def test_dead_code_goes_and_effects_stay() -> None:
    def dead(a: Tensor, out: Tensor) -> None:
        unused = (a * 2).view(2, 4)[1] + 1
        tap(unused, "unused", 1)
        add_in(out, a)
        torch.rand(2)

    graph = build(dead, A, OUT)
    for node in nodes(graph, torch.ops.draftfuse.tap.default):
        graph.erase_node(node)
    assert ir.eliminate_dead_code(graph) == 4
    assert targets(graph) == ["toy.add_in.default", "aten.rand.default"]
    assert ir.eliminate_dead_code(graph) == 0


def test_renames_of_make_fx_are_undone() -> None:
    counts = register(
        "counts(Tensor(a!) out) -> Tensor",
        lambda out: out.add_(1).sum().reshape(1),
        lambda out: out.new_empty(1),
    )

    def renamed(a: Tensor, out: Tensor) -> None:
        a.add_(1)
        a.mul_(2)
        total = counts(a)
        out.copy_(a + total)

    graph = build(renamed, A, OUT)
    verify(graph)
    a = ir.placeholders(graph)[0]
    add = nodes(graph, aten.add.Tensor)[0]
    assert nodes(graph, aten.mul_.Tensor)[0].args[0] is a
    assert add.args == (a, nodes(graph, counts)[0])  # the result of its own stays what it is


def test_operators_that_reshape_in_place_become_views() -> None:
    def reshaped(a: Tensor, out: Tensor) -> None:
        square = a.view(2, 4) * 1
        square.t_()
        out.copy_(square.unsqueeze_(0).reshape(8))

    graph = build(reshaped, A, OUT)
    verify(graph)
    assert nodes(graph, aten.t.default)
    assert nodes(graph, aten.unsqueeze.default)
    assert not [n for n in graph.nodes if ir.is_mutation(n) and n.target is not aten.copy_.default]


def test_a_call_that_fails_inserts_nothing() -> None:
    graph = build(aliases, A, OUT)
    a = ir.placeholders(graph)[0]
    before = len(graph.nodes)
    with graph.inserting_before(graph.output_node()):
        assert ir.try_call(graph, aten.view.default, (a, [3, 3]), {}, a) is None
        assert len(graph.nodes) == before
        assert ir.try_call(graph, aten.view.default, (a, [4, 2]), {}, a) is not None
    assert len(graph.nodes) == before + 1


def test_replaced_values_take_their_views_along() -> None:
    def views(a: Tensor, out: Tensor) -> None:
        first, second = a * 2, a * 3
        left, right = second.view(2, 4).unbind(0)
        out.copy_(first)
        out[:4].copy_(left * right)

    graph = build(views, A, OUT)
    first, second = nodes(graph, aten.mul.Tensor)[:2]
    ir.replace_value(second, first)
    verify(graph)
    named = [n for n in graph.nodes if n.op == "call_function" and ir.is_alias(n)]
    assert [ir.storages(n) for n in named].count({ir.storage(first)}) == 4


class Spec:
    """A loop in the user's own file."""

    def __init__(self) -> None:
        self.lens = torch.tensor([3, 4, 5])

    def advance(self) -> None:
        self.lens.copy_(self.lens + 17)  # the line that the test looks for


def loop(spec: Spec, num_reqs: int) -> None:
    with at("advance", 1):
        spec.advance()


def test_nodes_know_the_users_line_and_path() -> None:
    traced = trace(loop, (Spec(), 3))
    add = nodes(traced.graph, aten.add.Tensor)[0]
    line = ir.source_line(add)
    assert line is not None
    assert line.file == __file__
    assert line.text == "self.lens.copy_(self.lens + 17)  # the line that the test looks for"
    assert (ir.phase(add), ir.draft_step(add)) == ("advance", 1)
    assert [ir.path_of(n) for n in ir.placeholders(traced.graph)] == ["spec.lens"]
    assert ir.path_of(add) == add.name


def test_own_files_are_told_from_the_users() -> None:
    assert ir.is_own_file(torch.nn.functional.__file__)
    assert ir.is_own_file(ir.__file__)
    assert not ir.is_own_file(__file__)
    assert not ir.is_own_file(eagle.__file__)
