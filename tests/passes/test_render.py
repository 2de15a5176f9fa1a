"""render and canonical: one stable text of a graph, and one text for equal graphs."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from draftfuse.passes.render import canonical, render, symbols
from tests.passes.helpers import at, build, numbers

A, OUT = numbers(8), torch.zeros(8)


def kinds(a: Tensor, ids: Tensor, out: Tensor) -> None:
    with at("slot_mapping", 2):
        low, high = a.split(4)
        best, where = torch.sort(a, descending=True)
    with at("refresh"):
        flags = ids > 1
        half = torch.where(flags, low.to(torch.bfloat16), 0.5)
    out[1:5].copy_(half)
    out.index_put_((where[:2],), best[:2], accumulate=True)
    out[4:].add_(high, alpha=-0.0)


def test_prints_types_places_and_arguments() -> None:
    graph = build(kinds, A, torch.zeros(4, dtype=torch.int32), OUT)
    assert_expected_inline(
        render(graph),
        """\
%a_1: f32[8] = input('a')
%ids_1: i32[4] = input('ids')
%out_1: f32[8] = input('out')
%split = aten.split.Tensor(%a_1, 4)  # slot_mapping 2
%getitem: f32[4] = getitem(%split, 0)  # slot_mapping 2
%getitem_1: f32[4] = getitem(%split, 1)  # slot_mapping 2
%sort = aten.sort.default(%a_1, -1, True)  # slot_mapping 2
%getitem_2: f32[8] = getitem(%sort, 0)  # slot_mapping 2
%getitem_3: i64[8] = getitem(%sort, 1)  # slot_mapping 2
%gt: bool[4] = aten.gt.Scalar(%ids_1, 1)  # refresh
%_to_copy: bf16[4] = aten._to_copy.default(%getitem, dtype=torch.bfloat16)  # refresh
%scalar_tensor: bf16[] = aten.scalar_tensor.default(0.5, device=device(type='cpu'), dtype=torch.bfloat16, layout=torch.strided)  # refresh
%where: bf16[4] = aten.where.self(%gt, %_to_copy, %scalar_tensor)  # refresh
%slice_1: f32[4] = aten.slice.Tensor(%out_1, 0, 1, 5)
%copy_: f32[4] = aten.copy_.default(%slice_1, %where)
%slice_2: i64[2] = aten.slice.Tensor(%getitem_3, 0, 0, 2)
%slice_3: f32[2] = aten.slice.Tensor(%getitem_2, 0, 0, 2)
%index_put_: f32[8] = aten.index_put_.default(%out_1, [%slice_2], %slice_3, True)
%slice_4: f32[4] = aten.slice.Tensor(%out_1, 0, 4, 9223372036854775807)
%add_: f32[4] = aten.add_.Tensor(%slice_4, %getitem_1, alpha=-0.0)
return []
""",
    )


def test_places_can_be_left_out() -> None:
    graph = build(kinds, A, torch.zeros(4, dtype=torch.int32), OUT)
    assert "#" in render(graph)
    assert "#" not in render(graph, steps=False)


def test_a_slice_argument_prints_its_bounds() -> None:
    graph = fx.Graph()
    whole = graph.placeholder("whole")
    part = graph.call_function(torch.ops.aten.clone.default, (slice(0, whole), None, "text", [1, 2.5, True]))
    graph.output((part,))
    assert (
        render(graph).splitlines()[1] == "%clone_default = aten.clone.default(0:%whole, None, 'text', [1, 2.5, True])"
    )


def text_of(function: Callable[..., None], *tensors: Tensor) -> str:
    return canonical(build(function, *tensors))


def test_equal_graphs_have_one_canonical_text() -> None:
    def one(a: Tensor, out: Tensor) -> None:
        with at("refresh", 1):
            out.copy_(a * 2 + 1)

    def other(first: Tensor, result: Tensor) -> None:
        double = first * 2
        with at("forward", 3):
            result.copy_(double + 1)

    assert text_of(one, A, OUT) == text_of(other, A, OUT)
    assert render(build(one, A, OUT)) != render(build(other, A, OUT))


def plain(a: Tensor, out: Tensor) -> None:
    out.copy_(a * 0.0)


def another_constant(a: Tensor, out: Tensor) -> None:
    out.copy_(a * -0.0)


def another_type_of_constant(a: Tensor, out: Tensor) -> None:
    out.copy_(a * 0)


def another_operator(a: Tensor, out: Tensor) -> None:
    out.copy_(a / 0.0)


def another_argument(a: Tensor, out: Tensor) -> None:
    out.copy_(out * 0.0)


@pytest.mark.parametrize(
    "function",
    [another_constant, another_type_of_constant, another_operator, another_argument],
    ids=lambda f: f.__name__,
)
def test_different_operators_have_different_texts(function: Callable[..., None]) -> None:
    assert text_of(function, A, OUT) != text_of(plain, A, OUT)


@pytest.mark.parametrize(
    "other",
    [numbers(16)[::2], A.to(torch.float64), numbers(8, torch.int32), numbers(9)[1:]],
    ids=["stride", "float64", "int32", "alignment"],
)
def test_different_inputs_have_different_texts(other: Tensor) -> None:
    assert text_of(plain, other, OUT) != text_of(plain, A, OUT)


def symbolic(skipped: int) -> fx.Graph:
    """``x * 2`` over one symbolic dimension; ``skipped`` symbols of its environment belong to other tensors."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    for size in range(skipped):
        mode.from_tensor(torch.zeros(size + 20), symbolic_context=context)
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = mode.from_tensor(torch.zeros(7), symbolic_context=context)
    double = graph.call_function(torch.ops.aten.mul.Tensor, (x, 2))
    with mode:
        double.meta["val"] = x.meta["val"] * 2
    graph.output((double,))
    return graph


def test_the_name_of_a_symbol_means_nothing() -> None:
    first, second = symbolic(0), symbolic(13)
    assert symbols(first) != symbols(second)
    assert canonical(first) == canonical(second)
    assert re.search(r"f32\[n0\]", canonical(first))


def test_a_symbol_is_no_number() -> None:
    def fixed(x: Tensor, out: Tensor) -> None:
        out.copy_(x * 2)

    assert not symbols(build(fixed, A, OUT))
    assert "n0" not in text_of(fixed, A, OUT)
