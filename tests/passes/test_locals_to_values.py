"""locals_to_values: memory that the loop allocates and fills piece by piece becomes values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from draftfuse.lowering.emit import emit
from draftfuse.lowering.workspace import Workspace
from draftfuse.passes.locals_to_values import locals_to_values
from draftfuse.passes.render import render
from draftfuse.trace import trace
from tests.passes.helpers import add_in, assert_equal_eager, at, build, log, mutations, numbers, peek, targets

A, M, OUT = numbers(8), numbers(16).view(4, 4), torch.zeros(16)


def filled(indices: Tensor, out: Tensor) -> None:
    with at("refresh", 1):
        rows = torch.full((2, 4), -1.0)
        rows[:, :2].copy_(indices)
        out.copy_(rows.sum(1))


def test_before_and_after() -> None:
    graph = build(filled, numbers(4).view(2, 2), torch.zeros(2))
    assert locals_to_values(graph) == 1
    assert_expected_inline(
        render(graph),
        """\
%indices_1: f32[2, 2] = input('indices')
%out_1: f32[2] = input('out')
%full: f32[2, 4] = aten.full.default([2, 4], -1.0, device=device(type='cpu'), pin_memory=False)  # refresh 1
%slice_1: f32[2, 2] = aten.slice.Tensor(%full, 1, 0, 2)  # refresh 1
%copy_default: f32[2, 2] = aten.copy.default(%slice_1, %indices_1)  # refresh 1
%slice_scatter_default: f32[2, 4] = aten.slice_scatter.default(%full, %copy_default, 1, 0, 2)  # refresh 1
%sum_1: f32[2] = aten.sum.dim_IntList(%slice_scatter_default, [1])  # refresh 1
%copy__1: f32[2] = aten.copy_.default(%out_1, %sum_1)  # refresh 1
return []
""",
    )


def slices(a: Tensor, m: Tensor, out: Tensor) -> None:
    rows = torch.zeros(16)
    rows[:8] = a
    rows[4:12:2].add_(a[:4])
    rows[8:].fill_(3)
    out.copy_(rows * 2)


def nested_views(a: Tensor, m: Tensor, out: Tensor) -> None:
    rows = torch.zeros(4, 4)
    part = rows[1:]
    part[:, 1:].copy_(m[:3, :3])
    part[1][2:].mul_(a[:2])
    out.copy_(rows.view(16) + part.sum())


def reordered_views(a: Tensor, m: Tensor, out: Tensor) -> None:
    rows = torch.zeros(2, 2, 4)
    rows.permute(2, 0, 1)[1:].copy_(a[:3].view(3, 1, 1).expand(3, 2, 2))
    rows.transpose(0, 2)[0].add_(m[:2, :2])
    rows[0].t()[2:].mul_(m[2:, 2:])
    out.copy_(rows.reshape(16))


def reshaped_views(a: Tensor, m: Tensor, out: Tensor) -> None:
    rows = torch.zeros(16)
    square = rows.view(4, 4)
    square[1:3].copy_(m[2:])
    square.unsqueeze(1).squeeze(1)[3].sub_(a[4:])
    square.diagonal().mul_(2)
    rows.view(2, 8).unsqueeze(-1)[1].squeeze(-1).add_(a)
    out.copy_(rows)


def transposed_source(a: Tensor, m: Tensor, out: Tensor) -> None:
    rows = torch.zeros(4, 4)
    rows.copy_(m.t())
    rows.t()[1:].add_(1)
    out.copy_(rows.view(16))


def broadcast_and_dtype(a: Tensor, m: Tensor, out: Tensor) -> None:
    rows = torch.zeros(4, 4, dtype=torch.int32)
    rows.copy_(a[:4] * 1.75)
    rows.add_(torch.arange(4))
    rows[2:].masked_fill_(rows[2:] > 5, -1)
    rows.eq_(rows.t().clone())
    out.copy_(rows.view(16))


def by_index(a: Tensor, m: Tensor, out: Tensor) -> None:
    rows = torch.zeros(4, 4)
    rows[torch.arange(2), torch.arange(2) + 1] = a[:2]
    rows.scatter_add_(1, torch.arange(4).view(4, 1), m[:, :1])
    rows.index_add_(0, torch.arange(2), m[2:], alpha=2)
    out.copy_(rows.view(16))


def results_of_others(a: Tensor, m: Tensor, out: Tensor) -> None:
    seen = peek(m)
    seen[0].zero_()
    ordered, order = torch.sort(a, descending=True)
    ordered[1:3].copy_(order[:2])
    out[:8].copy_(ordered)
    out[8:].copy_(seen.view(16)[:8])


def read_in_between(a: Tensor, m: Tensor, out: Tensor) -> None:
    rows = a * 1
    before = rows + 1
    rows.copy_(rows.flip(0))
    middle = rows[:4] - before[:4]
    rows[:4].copy_(rows[4:])
    log(rows, out[:8])
    out[8:].copy_(torch.cat([middle, rows[2:6]]))


def takes_what_a_buffer_held(a: Tensor, m: Tensor, out: Tensor) -> None:
    rows = torch.zeros(8)
    rows.copy_(a)
    a.mul_(3)
    out[:8].copy_(rows)
    a.copy_(rows)


CONVERTED = [
    slices,
    nested_views,
    reordered_views,
    reshaped_views,
    transposed_source,
    broadcast_and_dtype,
    by_index,
    results_of_others,
    read_in_between,
    takes_what_a_buffer_held,
]


@pytest.mark.parametrize("function", CONVERTED, ids=lambda f: f.__name__)
def test_keeps_values(function: Callable[..., None]) -> None:
    graph = build(function, A, M, OUT)
    found = len(mutations(graph))
    assert locals_to_values(graph) == found - len(mutations(graph)) > 0
    graph.lint()
    assert_equal_eager(function, graph, A, M, OUT)


@pytest.mark.parametrize("function", CONVERTED, ids=lambda f: f.__name__)
def test_is_idempotent(function: Callable[..., None]) -> None:
    graph = build(function, A, M, OUT)
    locals_to_values(graph)
    before = render(graph)
    assert locals_to_values(graph) == 0
    assert render(graph) == before


@pytest.mark.parametrize("function", CONVERTED[:-3], ids=lambda f: f.__name__)
def test_no_write_to_a_local_is_left(function: Callable[..., None]) -> None:
    graph = build(function, A, M, OUT)
    locals_to_values(graph)
    assert mutations(graph) == ["aten.copy_.default"]  # out's


def test_several_users_each_see_the_value_of_their_place() -> None:
    def users(a: Tensor, m: Tensor, out: Tensor) -> None:
        rows = torch.zeros(8)
        out[:8].copy_(rows)
        rows.add_(a)
        out[:8].add_(rows)
        out[8:].copy_(rows * 10)
        rows[2:].add_(1)
        out[8:].add_(rows)

    graph = build(users, A, M, OUT)
    assert locals_to_values(graph) == 2
    assert_equal_eager(users, graph, A, M, OUT)


def opaque_writer(a: Tensor, m: Tensor, out: Tensor) -> None:
    plan = torch.zeros(2, 8)
    add_in(plan[0], a)
    plan[1].copy_(a)
    out.copy_(plan.view(16))


def out_argument(a: Tensor, m: Tensor, out: Tensor) -> None:
    rows = torch.zeros(8)
    torch.add(a, 1, out=rows)
    rows.mul_(2)
    out[:8].copy_(rows)


def named_by_place(a: Tensor, m: Tensor, out: Tensor) -> None:
    rows = m + 0
    rows.as_strided((4,), (4,), 1).zero_()
    out.copy_(rows.view(16))


def several_views_at_once(a: Tensor, m: Tensor, out: Tensor) -> None:
    rows = torch.zeros(8)
    left, right = rows.split(4)
    left.add_(1)
    right.copy_(a[:4])
    out[:8].copy_(rows + left.sum())


def random_numbers(a: Tensor, m: Tensor, out: Tensor) -> None:
    noise = torch.empty(8).exponential_()
    out[:8].copy_(noise)


def several_at_once(a: Tensor, m: Tensor, out: Tensor) -> None:
    rows = torch.zeros(8)
    torch._foreach_add_([rows], 1.0)
    out[:8].copy_(rows)


LEFT = [opaque_writer, out_argument, named_by_place, several_views_at_once, random_numbers, several_at_once]


@pytest.mark.parametrize("function", LEFT, ids=lambda f: f.__name__)
def test_leaves_alone_what_has_no_form_on_values(function: Callable[..., None]) -> None:
    graph = build(function, A, M, OUT)
    before = render(graph)
    assert locals_to_values(graph) == 0
    assert render(graph) == before
    assert_equal_eager(function, graph, A, M, OUT)


def test_leaves_buffers_alone() -> None:
    def buffers(a: Tensor, m: Tensor, out: Tensor) -> None:
        a[2:].add_(1)
        out.copy_(m.view(16))

    graph = build(buffers, A, M, OUT)
    assert locals_to_values(graph) == 0
    assert mutations(graph) == ["aten.add_.Tensor", "aten.copy_.default"]


def test_values_that_become_equal_can_be_merged() -> None:
    def twice(a: Tensor, out: Tensor) -> None:
        for step in (1, 2):
            with at("refresh", step):
                rows = torch.zeros(8)
                rows[:4].copy_(a[:4])
                out.add_(rows)

    graph = build(twice, A, torch.zeros(8))
    locals_to_values(graph)
    assert targets(graph).count("aten.slice_scatter.default") == 2
    from draftfuse.passes.hoist_invariants import hoist_invariants

    hoist_invariants(graph)
    assert targets(graph).count("aten.slice_scatter.default") == 1
    assert_equal_eager(twice, graph, A, torch.zeros(8))


class Rows:
    """Buffers with one row more than the largest batch, as the inputs of a loop have."""

    def __init__(self) -> None:
        self.lens, self.out = torch.tensor([3, 5, 4, 9, 2]), torch.zeros(5, 3, dtype=torch.int64)


def filled_for_any_number_of_rows(rows: Rows, num_reqs: int) -> None:
    lens, out = rows.lens[:num_reqs], rows.out[:num_reqs]
    starts = torch.zeros(num_reqs + 1, dtype=torch.int64)
    starts[1:].copy_(lens.cumsum(0))
    table = torch.full((num_reqs, 3), -1)
    table.view(num_reqs * 3)[:2].fill_(7)
    table[:, 1].add_(starts[:-1])
    table.t()[2].copy_(lens)
    table.unsqueeze(1)[:, 0].mul_(2)
    out.copy_(table + starts[1:].unsqueeze(1))


def test_sizes_may_be_symbols() -> None:
    traced = trace(filled_for_any_number_of_rows, (Rows(), 3), "num_reqs")
    assert locals_to_values(traced.graph) == 5
    assert mutations(traced.graph) == ["aten.copy_.default"]
    emission = emit(traced.graph, traced.fake_mode, traced.tensors, compiler="none")
    for count in (2, 3, 4):
        twin = Rows()
        filled_for_any_number_of_rows(twin, count)
        out = traced.tensors[next(n.name for n in traced.graph.nodes if n.meta.get("path") == "rows.out")].zero_()
        emission.bind(count, Workspace()).run()
        assert torch.equal(out, twin.out)
