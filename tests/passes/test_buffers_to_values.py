"""buffers_to_values: what the loop writes to its small persistent buffers reaches the readers as values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx

from draftfuse.passes import ir
from draftfuse.passes.buffers_to_values import buffers_to_values
from draftfuse.passes.render import render
from tests.passes.helpers import (
    add_in,
    assert_equal_eager,
    at,
    build,
    log,
    mutations,
    numbers,
    peek,
    peek_hidden,
    reads_anything,
    reads_nothing,
    targets,
)

forward_all = partial(buffers_to_values, hidden_reads=reads_anything)
A, B, M = numbers(8), numbers(8, first=11), numbers(16).view(4, 4)
WHOLE = numbers(12)
FIRST, LAST = WHOLE[:8], WHOLE[4:]  # two buffers in one storage


def loop(positions: Tensor, table: Tensor, out: Tensor) -> None:
    for step in (1, 2):
        with at("refresh", step):
            row = table[positions[:2]]
        with at("forward", step):
            out.add_(row)
        with at("advance", step):
            positions[:2].copy_(positions[:2] + 1)


LOOP = (torch.tensor([0, 3, 1]), numbers(8), torch.zeros(2))


def test_before_and_after() -> None:
    graph = build(loop, *LOOP)
    assert forward_all(graph) == 4
    assert_expected_inline(
        render(graph),
        """\
%positions_1: i64[3] = input('positions')
%table_1: f32[8] = input('table')
%out_1: f32[2] = input('out')
%slice_1: i64[2] = aten.slice.Tensor(%positions_1, 0, 0, 2)  # refresh 1
%index: f32[2] = aten.index.Tensor(%table_1, [%slice_1])  # refresh 1
%add_tensor: f32[2] = aten.add.Tensor(%out_1, %index)  # forward 1
%slice_3: i64[2] = aten.slice.Tensor(%positions_1, 0, 0, 2)  # advance 1
%add: i64[2] = aten.add.Tensor(%slice_3, 1)  # advance 1
%index_1: f32[2] = aten.index.Tensor(%table_1, [%add])  # refresh 2
%add_tensor_1: f32[2] = aten.add.Tensor(%add_tensor, %index_1)  # forward 2
%slice_5: i64[2] = aten.slice.Tensor(%positions_1, 0, 0, 2)  # advance 2
%add_1: i64[2] = aten.add.Tensor(%add, 1)  # advance 2
%copy__default: f32[2] = aten.copy_.default(%out_1, %add_tensor_1)  # store
%copy__default_1: i64[2] = aten.copy_.default(%slice_5, %add_1)  # store
return []
""",
    )


def test_keeps_values_of_the_loop() -> None:
    graph = build(loop, *LOOP)
    forward_all(graph)
    assert_equal_eager(loop, graph, *LOOP)


def chained(a: Tensor, b: Tensor, m: Tensor) -> None:
    a.copy_(b)
    b.copy_(m[0].repeat(2))
    m[1:3].copy_(a.view(2, 4))
    a.copy_(a)
    a.add_(b)


def swapped(a: Tensor, b: Tensor, m: Tensor) -> None:
    kept = a * 1
    a.copy_(b)
    b.copy_(kept)
    m.copy_(m.t().clone())


def overlapping(a: Tensor, b: Tensor, m: Tensor) -> None:
    a[:5].mul_(2)
    a[3:].add_(100)
    b.copy_(a)
    a[::2].copy_(a[1::2])
    b[1:7].add_(a[:6])
    a[2:4].zero_()
    b[:4].sub_(a[1:5])


def shifted(a: Tensor, b: Tensor, m: Tensor) -> None:
    for _ in range(3):
        a[2:].copy_(a[:-2] + 1)
    b[:-2].copy_(b[2:] * 2)


def views_of_views(a: Tensor, b: Tensor, m: Tensor) -> None:
    part = m[1:].t()[::2]
    part[0].copy_(a[:3])
    m[:, 0].mul_(b[:4])
    part.unsqueeze(0)[0, 1].fill_(7)
    a[:4].copy_(m[2])
    b[:6].copy_(part.reshape(6))


def reordered_values(a: Tensor, b: Tensor, m: Tensor) -> None:
    m.copy_((m * 2).t())
    a.copy_(m.view(16)[4:12])
    b.copy_(m.clone().view(16)[:8])
    m.t().copy_(m.clone())
    b.add_(m.mul(3).view(16)[8:])


def named_by_place(a: Tensor, b: Tensor, m: Tensor) -> None:
    m.copy_((m * 2).t())
    a[:4].copy_(m.as_strided((4,), (1,), 4) + 0)
    rest = b[2:]
    rest.mul_(3)
    a[4:6].copy_(rest.as_strided((2,), (2,), 3) + 0)


def several_views_at_once(a: Tensor, b: Tensor, m: Tensor) -> None:
    left, right = a.split(4)
    rows = m.unbind(0)
    a.copy_(a * 2)
    b[:4].copy_(left + right)
    right.add_(b[:4])
    a.add_(1)
    low, high = a.split([3, 5])
    a.sub_(3)
    b[:3].add_(low + high[2:])
    rows[1].copy_(a[2:6])
    b[4:].copy_(rows[1] + m[1])


def dtypes(a: Tensor, b: Tensor, m: Tensor) -> None:
    whole = a.view(torch.int32)
    a.copy_(a * 1.5)
    a.masked_fill_(b > 14, 5)
    whole[4:].fill_(0)
    b.copy_(a[:1])
    b.eq_(a)
    m.copy_(whole[:4])


def broadcast(a: Tensor, b: Tensor, m: Tensor) -> None:
    m.copy_(a[:4])
    m[:, 1:3].add_(b[:2])
    m.t()[0].copy_(a[7])
    a.copy_(m[3, 3])


def by_index(a: Tensor, b: Tensor, m: Tensor) -> None:
    order = torch.arange(8).flip(0)
    a.add_(1)
    a[order[:3]] = 0.0
    b.index_put_((order[2:5],), a[:3] * 2, accumulate=True)
    a.scatter_(0, order[4:], b)
    m.index_fill_(1, order[5:7], 9.0)
    b.copy_(a + b)


def out_arguments(a: Tensor, b: Tensor, m: Tensor) -> None:
    a.add_(1)
    torch.mul(a, b, out=b)
    torch.add(a[:4], 1, out=a[4:])
    torch.max(m, 1, out=(a[:4], torch.empty(4, dtype=torch.int64)))
    b.add_(a)


def several_at_once(a: Tensor, b: Tensor, m: Tensor) -> None:
    a.add_(1)
    torch._foreach_add_([a, b], [b, a])
    torch._foreach_mul_([a], 2.0)
    m[0].copy_(a[:4] + b[4:])


def opaque(a: Tensor, b: Tensor, m: Tensor) -> None:
    a.add_(1)
    log(a, b)
    add_in(b[2:], a[:6])
    a.copy_(b)
    seen = peek(a[4:])
    a[4:].copy_(seen)
    add_in(m, m.clone())
    b[:4].copy_(m[1])


def values_that_alias_buffers(a: Tensor, b: Tensor, m: Tensor) -> None:
    a[:4].copy_(m[0])
    m[0].add_(10)
    b[:4].copy_(a[:4])
    local = torch.zeros(4)
    add_in(local, m[1])
    a[4:].copy_(local)
    add_in(local, m[2])
    b[4:].copy_(a[4:])


def random_numbers(a: Tensor, b: Tensor, m: Tensor) -> None:
    a.uniform_()
    m.t().exponential_()
    b.copy_(a + torch.rand(8))


FUNCTIONS = [
    chained,
    swapped,
    overlapping,
    shifted,
    views_of_views,
    reordered_values,
    named_by_place,
    several_views_at_once,
    dtypes,
    broadcast,
    by_index,
    out_arguments,
    several_at_once,
    opaque,
    values_that_alias_buffers,
    random_numbers,
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_keeps_values(function: Callable[..., None]) -> None:
    graph = build(function, A, B, M)
    forward_all(graph)
    graph.lint()
    assert_equal_eager(function, graph, A, B, M)


def test_keeps_values_of_buffers_in_one_storage() -> None:
    def shared(first: Tensor, last: Tensor, out: Tensor) -> None:
        first.add_(1)
        out.copy_(last)
        last[:4].mul_(2)
        first[2:6].copy_(first[2:6] + last[4:])
        out.add_(first)
        add_in(last, out)
        first[4:].copy_(last[:4] - 1)
        last[4:].copy_(first[4:])

    tensors = (FIRST, LAST, torch.zeros(8))
    graph = build(shared, *tensors)
    forward_all(graph)
    assert_equal_eager(shared, graph, *tensors)


def operators(graph: fx.Graph) -> list[str]:
    """Operators without views and without an order: a store may move among values that it does not touch."""
    return sorted(str(n.target) for n in graph.nodes if n.op == "call_function" and not ir.is_alias(n))


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_is_idempotent(function: Callable[..., None]) -> None:
    graph = build(function, A, B, M)
    forward_all(graph)
    before = operators(graph)
    assert forward_all(graph) == 0
    assert operators(graph) == before
    assert_equal_eager(function, graph, A, B, M)


def test_several_users_of_a_value_read_no_memory() -> None:
    def users(a: Tensor, b: Tensor, m: Tensor) -> None:
        a.add_(1)
        b.copy_(a * 2)
        m[0].copy_(a[:4] + a[4:])
        m[1].copy_(a.view(2, 4)[1] * b[:4])

    graph = build(users, A, B, M)
    forward_all(graph)
    placeholder = ir.placeholders(graph)[0]
    readers = [n for n in placeholder.users if n.target is not torch.ops.aten.copy_.default]
    assert [str(n.target) for n in readers] == ["aten.add.Tensor"]
    assert_equal_eager(users, graph, A, B, M)


def test_a_buffer_is_stored_once_however_often_it_is_written() -> None:
    def often(a: Tensor) -> None:
        for _ in range(5):
            a.add_(1)

    graph = build(often, A)
    assert forward_all(graph) == 5
    assert mutations(graph) == ["aten.copy_.default"]


def test_memory_is_right_before_an_operator_that_may_read_it_unseen() -> None:
    def hidden(a: Tensor, b: Tensor, m: Tensor) -> None:
        for _ in range(2):
            a.add_(1)
            b.copy_(peek_hidden(m[0]).repeat(2))

    graph = build(hidden, A, B, M)
    forward_all(graph)
    names = targets(graph)
    assert names[: names.index("toy.peek_hidden.default")].count("aten.copy_.default") == 1
    assert_equal_eager(hidden, graph, A, B, M)


def test_an_operator_that_reads_its_arguments_only_needs_no_store() -> None:
    def declared(a: Tensor, b: Tensor) -> None:
        a.add_(1)
        b.copy_(peek(b))

    graph = build(declared, A, B)
    buffers_to_values(graph, hidden_reads=reads_nothing)
    names = targets(graph)
    assert "aten.copy_.default" not in names[: names.index("toy.peek.default")]
    assert_equal_eager(declared, graph, A, B)


def test_only_the_storages_that_are_read_unseen_are_stored() -> None:
    def hidden(a: Tensor, b: Tensor, m: Tensor) -> None:
        a.add_(1)
        b.add_(1)
        m[0].copy_(peek_hidden(m[0]))

    graph = build(hidden, A, B, M)
    key = ir.storage(ir.placeholders(graph)[1])
    buffers_to_values(graph, hidden_reads=lambda node: (key,))
    names = [n.target.__name__ if n.op == "call_function" else n.name for n in graph.nodes]
    before = names[: names.index("peek_hidden.default")]
    stored = [n for n in list(graph.nodes)[: len(before)] if ir.is_mutation(n)]
    assert [ir.storage(n.args[0]) for n in stored] == [key]


def test_leaves_alone_writes_of_elements_by_index() -> None:
    def indexed(pool: Tensor, slots: Tensor, keys: Tensor) -> None:
        pool.index_put_((slots,), keys)
        pool.index_copy_(0, slots + 2, keys)

    tensors = (torch.zeros(8, 4), torch.tensor([1, 5]), numbers(8).view(2, 4))
    graph = build(indexed, *tensors)
    before = render(graph)
    assert forward_all(graph) == 0
    assert render(graph) == before
    assert_equal_eager(indexed, graph, *tensors)


@pytest.mark.parametrize("function", [random_numbers, several_at_once], ids=lambda f: f.__name__)
def test_leaves_alone_what_has_no_form_on_values(function: Callable[..., None]) -> None:
    graph = build(function, A, B, M)
    before = [name for name in mutations(graph) if name not in ("aten.copy_.default", "aten.add_.Tensor")]
    forward_all(graph)
    assert [name for name in mutations(graph) if name != "aten.copy_.default"] == before


def test_leaves_alone_a_loop_that_writes_nothing() -> None:
    def reads(a: Tensor, b: Tensor) -> None:
        peek_hidden(a + b)

    graph = build(reads, A, B)
    before = render(graph)
    assert forward_all(graph) == 0
    assert render(graph) == before


def test_an_expanded_buffer_is_written_in_place() -> None:
    def expanded(row: Tensor, out: Tensor) -> None:
        row.expand(4, 2).zero_()
        out.copy_(row)

    tensors = (numbers(2), torch.zeros(2))
    graph = build(expanded, *tensors)
    forward_all(graph)
    assert mutations(graph)[0] == "aten.zero_.default"
    assert_equal_eager(expanded, graph, *tensors)
