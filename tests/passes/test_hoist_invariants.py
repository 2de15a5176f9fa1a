"""hoist_invariants: equal work is done once, and only where it is equal."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from draftfuse.passes.hoist_invariants import hoist_invariants
from draftfuse.passes.render import render
from draftfuse.passes.verify import verify
from tests.passes.helpers import add_in, assert_equal_eager, at, build, log, numbers, peek, targets

A, B = numbers(8), numbers(8, first=11)


def loop(starts: Tensor, out: Tensor) -> None:
    for step in (1, 2, 3):
        with at("refresh", step):
            rows = torch.searchsorted(starts, torch.arange(4))
        with at("forward", step):
            out.add_(rows * step)


LOOP = (torch.tensor([0, 2, 3, 5]), torch.zeros(4, dtype=torch.int64))


def test_before_and_after() -> None:
    graph = build(loop, *LOOP)
    assert hoist_invariants(graph) == 4
    assert_expected_inline(
        render(graph),
        """\
%starts_1: i64[4] = input('starts')
%out_1: i64[4] = input('out')
%arange: i64[4] = aten.arange.default(4, device=device(type='cpu'), pin_memory=False)  # refresh 1
%searchsorted: i64[4] = aten.searchsorted.Tensor(%starts_1, %arange)  # refresh 1
%mul: i64[4] = aten.mul.Tensor(%searchsorted, 1)  # forward 1
%add_: i64[4] = aten.add_.Tensor(%out_1, %mul)  # forward 1
%mul_1: i64[4] = aten.mul.Tensor(%searchsorted, 2)  # forward 2
%add__1: i64[4] = aten.add_.Tensor(%out_1, %mul_1)  # forward 2
%mul_2: i64[4] = aten.mul.Tensor(%searchsorted, 3)  # forward 3
%add__2: i64[4] = aten.add_.Tensor(%out_1, %mul_2)  # forward 3
return []
""",
    )


def test_is_idempotent() -> None:
    graph = build(loop, *LOOP)
    hoist_invariants(graph)
    before = render(graph)
    assert hoist_invariants(graph) == 0
    assert render(graph) == before


def reads_between_writes(a: Tensor, b: Tensor) -> None:
    b.copy_(a * 2)
    a.add_(1)
    b.add_(a * 2)
    b.add_(a * 2)
    add_in(a[2:], b[2:])
    b.sub_(a * 2)


def reads_through_views(a: Tensor, b: Tensor) -> None:
    part = a[2:6]
    b[:4].copy_(part + 1)
    a[3].fill_(50)
    b[4:].copy_(part + 1)
    b[:4].add_(a[2:6] + 1)


def reads_several_views_at_once(a: Tensor, b: Tensor) -> None:
    left = a.split(4)[0]
    b[:4].copy_(left + 1)
    add_in(left, b[4:])
    right = a.split(4)[1]
    b[4:].copy_(a.split(4)[0] + right)


def written_locals(a: Tensor, b: Tensor) -> None:
    first, second = torch.zeros(8), torch.zeros(8)
    add_in(first, a)
    b.add_(first + second)
    log(b, second[:8])
    a.copy_(second)


def written_results(a: Tensor, b: Tensor) -> None:
    first = torch.sort(a, descending=True)
    second = torch.sort(a, descending=True)
    add_in(first.values, b)
    b.copy_(second.values)
    a.copy_(first.values + second.indices)


def random_numbers(a: Tensor, b: Tensor) -> None:
    a.copy_(torch.rand(8))
    b.copy_(torch.rand(8))
    a.sub_(torch.bernoulli(b * 0 + 0.5))
    b.sub_(torch.bernoulli(b * 0 + 0.5))


def opaque_results(a: Tensor, b: Tensor) -> None:
    first, second = peek(a), peek(a)
    a.copy_(first)
    b.copy_(second)


def signed_zeros(a: Tensor, b: Tensor) -> None:
    a.copy_(torch.copysign(a, torch.full((8,), 0.0)))
    b.copy_(torch.copysign(b, torch.full((8,), -0.0)))


def equal_but_for_a_type(a: Tensor, b: Tensor) -> None:
    a.copy_(torch.full((8,), 1) / 2)
    b.copy_(torch.full((8,), True).logical_not())
    a.add_(torch.full((8,), 1.0))


NOTHING_TO_MERGE = [opaque_results, random_numbers]
FUNCTIONS = [
    reads_between_writes,
    reads_through_views,
    reads_several_views_at_once,
    written_locals,
    written_results,
    signed_zeros,
    equal_but_for_a_type,
    *NOTHING_TO_MERGE,
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_keeps_values(function: Callable[..., None]) -> None:
    graph = build(function, A, B)
    hoist_invariants(graph)
    graph.lint()
    verify(graph)
    assert_equal_eager(function, graph, A, B)


def test_keeps_values_of_the_loop() -> None:
    graph = build(loop, *LOOP)
    hoist_invariants(graph)
    assert_equal_eager(loop, graph, *LOOP)


def test_reads_without_a_write_between_are_merged() -> None:
    graph = build(reads_between_writes, A, B)
    hoist_invariants(graph)
    assert targets(graph).count("aten.mul.Tensor") == 3


@pytest.mark.parametrize("function", NOTHING_TO_MERGE, ids=lambda f: f.__name__)
def test_leaves_alone_what_is_not_pure(function: Callable[..., None]) -> None:
    def operators(names: list[str]) -> list[str]:
        return [name for name in names if name.startswith(("toy.", "aten.rand", "aten.bernoulli"))]

    graph = build(function, A, B)
    before = operators(targets(graph))
    hoist_invariants(graph)
    assert operators(targets(graph)) == before


def test_leaves_alone_memory_that_an_operator_writes() -> None:
    graph = build(written_locals, A, B)
    hoist_invariants(graph)
    assert targets(graph).count("aten.zeros.default") == 2


def test_several_users_share_the_first() -> None:
    def users(a: Tensor, b: Tensor) -> None:
        double, again = a * 2, a * 2
        b.copy_(double + again)
        b.add_(again.view(2, 4).sum(0).repeat(2))
        log(again, a)

    graph = build(users, A, B)
    assert hoist_invariants(graph) == 1
    verify(graph)
    assert_equal_eager(users, graph, A, B)


def test_views_follow_what_they_are_views_of() -> None:
    def views(a: Tensor, b: Tensor) -> None:
        for part in (slice(0, 4), slice(4, 8)):
            local = torch.arange(8) * 2
            b[part].copy_(local[part] + local.view(2, 4)[1])

    graph = build(views, A, B)
    hoist_invariants(graph)
    verify(graph)
    assert targets(graph).count("aten.view.default") == 1
    assert_equal_eager(views, graph, A, B)


def test_items_of_a_merged_list_stand_behind_it() -> None:
    def items(a: Tensor, b: Tensor) -> None:
        b.add_(torch.sort(a).values)
        log(b, a[:8].clone())
        b.add_(torch.sort(a).indices)

    graph = build(items, A, B)
    hoist_invariants(graph)
    names = targets(graph)
    at = names.index("aten.sort.default")
    assert names[at + 1 : at + 3] == ["getitem", "getitem"]
    assert_equal_eager(items, graph, A, B)
