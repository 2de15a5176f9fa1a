"""lower_metadata_refresh: a refresh becomes one operator that writes rows of draftfuse's own."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx

from draftfuse.lowering.generated import register_refresh
from draftfuse.passes import ir
from draftfuse.passes.lower_metadata_refresh import lower_metadata_refresh
from draftfuse.passes.refresh_ahead import refresh_ahead
from draftfuse.passes.render import render
from draftfuse.passes.verify import verify
from tests.passes.helpers import add_in, assert_equal_eager, at, build, log, numbers, peek, run_emitted, targets

lower = partial(lower_metadata_refresh, register=register_refresh)
LENS, TABLE, HIDDEN = numbers(4), numbers(8, first=11), numbers(4, first=30)
ARGS = (LENS, TABLE, HIDDEN)


def loop(lens: Tensor, table: Tensor, hidden: Tensor) -> None:
    for step in (1, 2):
        with at("refresh", step):
            start = (lens + hidden - 4).clamp(min=0)
            width = start * 2
        with at("forward", step):
            log(start * width, hidden)


def text(graph: fx.Graph) -> str:
    return re.sub(r"refresh_[0-9a-f]{12}", "refresh_hash", render(graph))


def test_before_and_after() -> None:
    graph = build(loop, *ARGS)
    assert lower(graph) == 2
    assert_expected_inline(
        text(graph),
        """\
%lens_1: f32[4] = input('lens')
%table_1: f32[8] = input('table')
%hidden_1: f32[4] = input('hidden')
%row_clamp: f32[4] = input('draftfuse.rows[1].clamp')  # refresh 1
%row_mul: f32[4] = input('draftfuse.rows[1].mul')  # refresh 1
%row_clamp_1: f32[4] = input('draftfuse.rows[2].clamp_1')  # refresh 2
%row_mul_2: f32[4] = input('draftfuse.rows[2].mul_2')  # refresh 2
%refresh_hash_default = draftfuse_gen.refresh_hash.default([%lens_1, %hidden_1], [], [%row_clamp, %row_mul])  # refresh 1
%mul_1: f32[4] = aten.mul.Tensor(%row_clamp, %row_mul)  # forward 1
%log = toy.log.default(%mul_1, %hidden_1)  # forward 1
%refresh_hash_default_1 = draftfuse_gen.refresh_hash.default([%lens_1, %hidden_1], [], [%row_clamp_1, %row_mul_2])  # refresh 2
%mul_3: f32[4] = aten.mul.Tensor(%row_clamp_1, %row_mul_2)  # forward 2
%log_1 = toy.log.default(%mul_3, %hidden_1)  # forward 2
return []
""",
    )


def test_the_operator_holds_the_refresh() -> None:
    graph = build(loop, *ARGS)
    lower(graph)
    call = next(n for n in graph.nodes if "body" in n.meta)
    assert_expected_inline(
        render(call.meta["body"].graph),
        """\
%arg0: f32[4] = input()
%arg1: f32[4] = input()
%add: f32[4] = aten.add.Tensor(%arg0, %arg1)
%sub: f32[4] = aten.sub.Tensor(%add, 4)
%clamp: f32[4] = aten.clamp.default(%sub, 0)
%mul: f32[4] = aten.mul.Tensor(%clamp, 2)
return [%clamp, %mul]
""",
    )
    assert str(call.target._schema).endswith("(Tensor[] reads, SymInt[] sizes, Tensor(a!)[] rows) -> ()")


def test_equal_regions_share_one_operator() -> None:
    graph = build(loop, *ARGS)
    lower(graph)
    names = [name for name in targets(graph) if name.startswith("draftfuse_gen.")]
    assert len(names) == 2
    assert len(set(names)) == 1


def test_different_regions_do_not() -> None:
    def different(lens: Tensor, table: Tensor, hidden: Tensor) -> None:
        for step in (1, 2):
            with at("refresh", step):
                start = lens + hidden - step
            with at("forward", step):
                log(start, hidden)

    graph = build(different, *ARGS)
    assert lower(graph) == 2
    assert len({name for name in targets(graph) if name.startswith("draftfuse_gen.")}) == 2
    assert_equal_eager(different, graph, *ARGS)


def test_is_idempotent() -> None:
    graph = build(loop, *ARGS)
    lower(graph)
    before = render(graph)
    assert lower(graph) == 0
    assert render(graph) == before


def several_results(lens: Tensor, table: Tensor, hidden: Tensor) -> None:
    for step in (1, 2):
        with at("refresh", step):
            best, order = torch.topk(table[:4] * hidden, 3)
            low, high = (best + order).split([1, 2])
        with at("forward", step):
            log(torch.cat([high, low, low]), hidden)


def reordered_result(lens: Tensor, table: Tensor, hidden: Tensor) -> None:
    for step in (1, 2):
        with at("refresh", step):
            square = (table[:4] * hidden).view(2, 2).t() + 0
        with at("forward", step):
            log(square.t().view(4) + square[1, 0], hidden)


def expanded_result(lens: Tensor, table: Tensor, hidden: Tensor) -> None:
    for step in (1, 2):
        with at("refresh", step):
            same = (hidden[:1] + step).expand(4)
            flags = hidden > 31
        with at("forward", step):
            log(torch.where(flags, same, lens), hidden)


def views_of_results(lens: Tensor, table: Tensor, hidden: Tensor) -> None:
    for step in (1, 2):
        with at("refresh", step):
            both = torch.cat([lens, hidden * step])
        with at("forward", step):
            log(both[:4] * both.view(2, 4)[1], hidden)


def two_groups(lens: Tensor, table: Tensor, hidden: Tensor) -> None:
    plan = table[4:]
    for step in (1, 2):
        with at("refresh", step):
            first = lens * 2 + hidden
            add_in(plan, first)
            second = plan * 3
        with at("forward", step):
            log(first + second, hidden)


def plan_in_a_local(lens: Tensor, table: Tensor, hidden: Tensor) -> None:
    for step in (1, 2):
        with at("refresh", step):
            plan = torch.zeros(2, 4)
            add_in(plan[0], hidden)
            total = plan.sum(0)
        with at("forward", step):
            log(plan[0] + plan[1] + total, hidden)


def written_after_the_first_use(lens: Tensor, table: Tensor, hidden: Tensor) -> None:
    for step in (1, 2):
        with at("refresh", step):
            start = lens * 2
        with at("forward", step):
            log(start, hidden)
            add_in(lens, hidden)
        with at("refresh", step):
            late = lens + 1
        with at("forward", step):
            log(late + start, hidden)


def named_by_place(lens: Tensor, table: Tensor, hidden: Tensor) -> None:
    for step in (1, 2):
        with at("refresh", step):
            start = hidden * 2
            other = start + 1
        with at("forward", step):
            log(start.as_strided((2,), (2,), 1).repeat(2) + other, hidden)


FUNCTIONS = [
    loop,
    several_results,
    reordered_result,
    expanded_result,
    views_of_results,
    two_groups,
    plan_in_a_local,
    written_after_the_first_use,
    named_by_place,
]


@pytest.mark.parametrize("ahead", [False, True], ids=["a step", "ahead"])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_keeps_values(function: Callable[..., None], ahead: bool) -> None:
    graph = build(function, *ARGS)
    if ahead:
        refresh_ahead(graph)
    lower(graph)
    graph.lint()
    verify(graph)
    assert_equal_eager(function, graph, *ARGS)
    assert_equal_eager(function, graph, *ARGS, run=run_emitted)


@pytest.mark.parametrize("function", FUNCTIONS[:5], ids=lambda f: f.__name__)
def test_every_step_is_lowered(function: Callable[..., None]) -> None:
    graph = build(function, *ARGS)
    assert lower(graph) == 2
    left = [n for n in graph.nodes if n.op == "call_function" and ir.phase(n) == "refresh" and "body" not in n.meta]
    assert all(ir.is_static_view(n) for n in left)


def test_what_runs_ahead_is_one_operator() -> None:
    def known(lens: Tensor, table: Tensor, hidden: Tensor) -> None:
        for step in (1, 2, 3):
            with at("refresh", step):
                start = lens - step
            with at("forward", step):
                log(start * hidden, hidden)

    graph = build(known, *ARGS)
    refresh_ahead(graph)
    assert lower(graph) == 1
    call = next(n for n in graph.nodes if "body" in n.meta)
    assert len(call.args[2]) == 3  # a row a step
    assert_equal_eager(known, graph, *ARGS)


def test_leaves_alone_the_model_and_memory_that_operators_write() -> None:
    def model(lens: Tensor, table: Tensor, hidden: Tensor) -> None:
        with at("forward", 1):
            log(hidden * 2, hidden)
        with at("refresh", 1):
            plan = torch.zeros(4)
        with at("forward", 1):
            add_in(plan, hidden)
            log(plan + peek(hidden), lens)

    graph = build(model, *ARGS)
    before = render(graph)
    assert lower(graph) == 0
    assert render(graph) == before


def test_leaves_alone_views_of_buffers() -> None:
    def aliased(lens: Tensor, table: Tensor, hidden: Tensor) -> None:
        with at("refresh", 1):
            part = table.view(2, 4)[1]
        with at("forward", 1):
            log(part + lens, hidden)

    graph = build(aliased, *ARGS)
    assert lower(graph) == 0
    assert not [n for n in ir.placeholders(graph) if n.meta.get("owned")]


def test_several_users_of_a_result_read_its_one_row() -> None:
    graph = build(loop, *ARGS)
    lower(graph)
    rows = [n for n in ir.placeholders(graph) if n.meta.get("owned")]
    assert [n.meta["path"] for n in rows] == [
        "draftfuse.rows[1].clamp",
        "draftfuse.rows[1].mul",
        "draftfuse.rows[2].clamp_1",
        "draftfuse.rows[2].mul_2",
    ]
    assert all(len(n.users) == 2 for n in rows)  # the operator, and the product that reads it


def test_a_row_of_reordered_dimensions_is_dense() -> None:
    graph = build(reordered_result, *ARGS)
    lower(graph)
    row = next(n for n in ir.placeholders(graph) if n.meta.get("owned"))
    assert ir.value(row).is_contiguous()
    view = next(n for n in row.users if ir.is_view(n))
    assert ir.value(view).stride() == (1, 2)
