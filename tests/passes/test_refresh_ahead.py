"""refresh_ahead: metadata that no drafted token decides is computed before draft step 1, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx

from draftfuse.passes import ir
from draftfuse.passes.refresh_ahead import refresh_ahead
from draftfuse.passes.render import render
from tests.passes.helpers import add_in, assert_equal_eager, at, build, log, numbers, peek, targets

LENS, TABLE, HIDDEN = numbers(4), numbers(8, first=11), numbers(4, first=30)
ARGS = (LENS, TABLE, HIDDEN)


def loop(lens: Tensor, table: Tensor, hidden: Tensor) -> None:
    now = lens
    for step in (1, 2):
        with at("refresh", step):
            start = now - 4
        with at("forward", step):
            log(start * hidden, hidden)
        with at("advance", step):
            now = now + 1
    with at("store", 2):
        lens.copy_(now)


def test_before_and_after() -> None:
    graph = build(loop, *ARGS)
    assert refresh_ahead(graph) == 3
    assert_expected_inline(
        render(graph),
        """\
%lens_1: f32[4] = input('lens')
%table_1: f32[8] = input('table')
%hidden_1: f32[4] = input('hidden')
%sub: f32[4] = aten.sub.Tensor(%lens_1, 4)  # refresh 1
%add: f32[4] = aten.add.Tensor(%lens_1, 1)  # advance 1
%sub_1: f32[4] = aten.sub.Tensor(%add, 4)  # refresh 2
%add_1: f32[4] = aten.add.Tensor(%add, 1)  # advance 2
%mul: f32[4] = aten.mul.Tensor(%sub, %hidden_1)  # forward 1
%log = toy.log.default(%mul, %hidden_1)  # forward 1
%mul_1: f32[4] = aten.mul.Tensor(%sub_1, %hidden_1)  # forward 2
%log_1 = toy.log.default(%mul_1, %hidden_1)  # forward 2
%copy_: f32[4] = aten.copy_.default(%lens_1, %add_1)  # store 2
return []
""",
    )


def test_is_idempotent() -> None:
    graph = build(loop, *ARGS)
    refresh_ahead(graph)
    before = render(graph)
    assert refresh_ahead(graph) == 0
    assert render(graph) == before


def on_drafted_tokens(lens: Tensor, table: Tensor, hidden: Tensor) -> None:
    for step in (1, 2):
        with at("forward", step):
            token = peek(hidden)
        with at("refresh", step):
            start = token - lens
        with at("advance", step):
            hidden.copy_(start)


def on_memory_that_an_operator_wrote(lens: Tensor, table: Tensor, hidden: Tensor) -> None:
    for step in (1, 2):
        with at("forward", step):
            add_in(table, hidden.repeat(2))
        with at("refresh", step):
            best, order = torch.topk(table, 4)
            start = best + order
        with at("forward", step):
            log(start, hidden)


def on_memory_written_through_a_view(lens: Tensor, table: Tensor, hidden: Tensor) -> None:
    part = table[2:6]
    for step in (1, 2):
        with at("forward", step):
            log(hidden, part)
        with at("refresh", step):
            start = table[:4] + table[4:]
        with at("forward", step):
            log(start, hidden)


def on_random_numbers(lens: Tensor, table: Tensor, hidden: Tensor) -> None:
    for step in (1, 2):
        with at("forward", step):
            log(torch.rand(4), hidden)
        with at("refresh", step):
            start = torch.rand(4)
        with at("forward", step):
            log(hidden + start, lens)


def on_memory_of_an_operator(lens: Tensor, table: Tensor, hidden: Tensor) -> None:
    for step in (1, 2):
        with at("forward", step):
            log(hidden + 1, hidden)
        with at("refresh", step):
            plan = torch.zeros(2, 4)
            add_in(plan[0], lens)
            start = plan.sum(0)
        with at("forward", step):
            log(start + hidden, lens)


STAYS = [
    on_drafted_tokens,
    on_memory_that_an_operator_wrote,
    on_memory_written_through_a_view,
    on_random_numbers,
    on_memory_of_an_operator,
]


def operators(graph: fx.Graph) -> list[str]:
    return [str(n.target) for n in graph.nodes if n.op == "call_function" and not ir.is_alias(n)]


@pytest.mark.parametrize("function", STAYS, ids=lambda f: f.__name__)
def test_leaves_alone_what_depends(function: Callable[..., None]) -> None:
    graph = build(function, *ARGS)
    before = operators(graph)
    assert refresh_ahead(graph) == 0
    graph.lint()
    assert operators(graph) == before
    assert_equal_eager(function, graph, *ARGS)


def test_leaves_alone_the_model() -> None:
    def model(lens: Tensor, table: Tensor, hidden: Tensor) -> None:
        with at("forward", 1):
            log(hidden, table[:4])
            weights = lens * 2
        with at("sample", 1):
            other = lens + 1
        log(weights + other, hidden)

    graph = build(model, *ARGS)
    before = operators(graph)
    assert refresh_ahead(graph) == 0
    assert operators(graph) == before


def several_results(lens: Tensor, table: Tensor, hidden: Tensor) -> None:
    for step in (1, 2):
        with at("refresh", step):
            best, order = torch.topk(table, 4)
            low, high = (best * step).split(2)
        with at("forward", step):
            log(torch.cat([high, low]) + order, hidden)
        with at("forward", step):
            log(hidden * 2, lens)


def mixed(lens: Tensor, table: Tensor, hidden: Tensor) -> None:
    now = lens
    for step in (1, 2, 3):
        with at("slot_mapping", step):
            slot = now * 3
        with at("refresh", step):
            start = (now - 2).clamp(min=0)
            chosen = start + hidden
        with at("forward", step):
            log(chosen * slot, hidden)
        with at("advance", step):
            now = now + 1
            hidden.add_(1)
    lens.copy_(now)


MOVES = [loop, several_results, mixed]


@pytest.mark.parametrize("function", MOVES, ids=lambda f: f.__name__)
def test_keeps_values(function: Callable[..., None]) -> None:
    graph = build(function, *ARGS)
    assert refresh_ahead(graph) > 0
    graph.lint()
    assert_equal_eager(function, graph, *ARGS)


def test_a_value_with_several_users_moves_with_the_users_that_can() -> None:
    graph = build(mixed, *ARGS)
    refresh_ahead(graph)
    ahead = [n for n in graph.nodes if n.meta.get("ahead")]
    names = targets(graph)
    first = names.index("toy.log.default")
    assert sorted(str(n.target) for n in ahead) == sorted(
        ["aten.mul.Tensor", "aten.sub.Tensor", "aten.clamp.default", "aten.add.Tensor"] * 3
        + ["aten.add.Tensor"]  # step 1 reads what hidden holds before the loop
    )
    assert names[:first].count("aten.mul.Tensor") == 3 + 1  # three slots, and the product of step 1 itself
    assert all(ir.phase(n) != "forward" for n in ahead)
