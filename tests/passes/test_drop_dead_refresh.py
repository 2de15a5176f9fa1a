"""drop_dead_refresh: unread values and overwritten stores go; everything that somebody could have read stays."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx

from draftfuse.lowering.ops import tap
from draftfuse.passes.drop_dead_refresh import drop_dead_refresh
from draftfuse.passes.erase_taps import erase_taps
from draftfuse.passes.render import render
from tests.passes.helpers import (
    add_in,
    assert_equal_eager,
    at,
    build,
    log,
    mutations,
    numbers,
    peek_hidden,
    targets,
)

A, B = numbers(8), numbers(8, first=11)


def loop(lens: Tensor, out: Tensor) -> None:
    view = out[:4]
    with at("refresh", 1):
        start = lens - 4
        tap(start.clamp(min=0) * 2, "unused", 1)
    with at("store", 1):
        view.copy_(start)
    with at("store", 2):
        view.copy_(start + 1)


LOOP = (numbers(4), torch.zeros(6))


def untapped(function: Callable[..., None], *tensors: Tensor) -> fx.Graph:
    """The graph of ``function`` with what only a tap kept alive."""
    graph = build(function, *tensors)
    erase_taps(graph)
    return graph


def test_before_and_after() -> None:
    graph = untapped(loop, *LOOP)
    assert drop_dead_refresh(graph) == 3
    assert_expected_inline(
        render(graph),
        """\
%lens_1: f32[4] = input('lens')
%out_1: f32[6] = input('out')
%slice_1: f32[4] = aten.slice.Tensor(%out_1, 0, 0, 4)
%sub: f32[4] = aten.sub.Tensor(%lens_1, 4)  # refresh 1
%add: f32[4] = aten.add.Tensor(%sub, 1)  # store 2
%copy__1: f32[4] = aten.copy_.default(%slice_1, %add)  # store 2
return []
""",
    )


def test_is_idempotent() -> None:
    graph = untapped(loop, *LOOP)
    drop_dead_refresh(graph)
    before = render(graph)
    assert drop_dead_refresh(graph) == 0
    assert render(graph) == before


def read_between(a: Tensor, b: Tensor) -> None:
    a.copy_(b)
    b.add_(a)
    a.copy_(b + 1)


def read_through_a_view(a: Tensor, b: Tensor) -> None:
    a.copy_(b)
    b[:2].add_(a[2:4])
    a.copy_(b + 1)


def read_through_several_views(a: Tensor, b: Tensor) -> None:
    left, right = a.split(4)
    a.copy_(b)
    b[:4].add_(left + right)
    a.copy_(b + 1)


def read_by_an_opaque_operator(a: Tensor, b: Tensor) -> None:
    a.copy_(b)
    log(a, b)
    a.copy_(b + 1)


def read_unseen(a: Tensor, b: Tensor) -> None:
    a.copy_(b)
    b.copy_(peek_hidden(b))
    a.copy_(b + 1)


def read_by_its_own_store(a: Tensor, b: Tensor) -> None:
    a.copy_(b)
    a.copy_(a)


def another_view(a: Tensor, b: Tensor) -> None:
    a.copy_(b)
    a[:4].copy_(b[4:])


def written_in_place_between(a: Tensor, b: Tensor) -> None:
    a.copy_(b)
    a.add_(1)
    add_in(a, b)
    a[2:].mul_(2)


def in_another_storage(a: Tensor, b: Tensor) -> None:
    a.copy_(b)
    b.copy_(a + 1)


KEPT = [
    read_between,
    read_through_a_view,
    read_through_several_views,
    read_by_an_opaque_operator,
    read_unseen,
    read_by_its_own_store,
    another_view,
    written_in_place_between,
    in_another_storage,
]


def stored(function: Callable[..., None]) -> Callable[[Tensor, Tensor], None]:
    """The same function, every write a store."""

    def run(a: Tensor, b: Tensor) -> None:
        with at("store", 1):
            function(a, b)

    return run


@pytest.mark.parametrize("function", KEPT, ids=lambda f: f.__name__)
def test_leaves_alone_what_somebody_may_read(function: Callable[..., None]) -> None:
    run = stored(function)
    graph = build(run, A, B)
    before = mutations(graph)
    assert drop_dead_refresh(graph) == 0
    assert mutations(graph) == before
    assert_equal_eager(run, graph, A, B)


def test_keeps_values() -> None:
    graph = untapped(loop, *LOOP)
    drop_dead_refresh(graph)
    assert_equal_eager(loop, graph, *LOOP)


def test_only_stores_count_as_overwritten() -> None:
    def plain(a: Tensor, b: Tensor) -> None:
        a.copy_(b)
        a.copy_(b + 1)

    graph = build(plain, A, B)
    assert drop_dead_refresh(graph) == 0
    assert len(mutations(graph)) == 2


def test_random_numbers_and_assertions_are_not_dead() -> None:
    def effects(a: Tensor, b: Tensor) -> None:
        torch.rand(4)
        torch._assert_async((a > 0).all())
        b.copy_(torch.rand(8))

    graph = build(effects, A, B)
    drop_dead_refresh(graph)
    names = targets(graph)
    assert names.count("aten.rand.default") == 2
    assert any(name.startswith("aten._assert_async") for name in names)
    assert_equal_eager(effects, graph, A, B)


def test_a_tap_keeps_a_value_but_reads_no_memory() -> None:
    def tapped(a: Tensor, b: Tensor) -> None:
        with at("store", 1):
            a.copy_(b)
            tap(a, "a", 1)
            tap(b * 2, "double", 1)
            a.copy_(b + 1)

    graph = build(tapped, A, B)
    assert drop_dead_refresh(graph) == 1
    assert "aten.mul.Tensor" in targets(graph)


def test_several_users_keep_a_value_until_the_last_goes() -> None:
    def users(a: Tensor, b: Tensor) -> None:
        double = a * 2
        tap(double + 1, "unused", 1)
        tap((double - 1).view(2, 4).sum(0), "unused", 1)
        b.copy_(double)

    graph = untapped(users, A, B)
    assert drop_dead_refresh(graph) == 4
    assert targets(graph) == ["aten.mul.Tensor", "aten.copy_.default"]
    assert_equal_eager(users, graph, A, B)
