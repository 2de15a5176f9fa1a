"""compute_slot_mapping: equals its reference on any batch, gives -1 wherever nothing may be written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftfuse.errors import OpArgumentError
from draftfuse.ops import compute_slot_mapping


def i32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def i64(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


TABLE = torch.tensor([[7, 3, 9], [1, 0, 2]], dtype=torch.int32)


@pytest.mark.parametrize(
    ("position", "seq_len", "slot"),
    [
        (0, 1, 28),
        (3, 4, 31),  # last slot of a page
        (4, 5, 12),  # first slot of the next
        (11, 12, 39),  # last slot of the table
        (12, 13, -1),  # past the table
        (0, 0, -1),  # padded row
        (5, 5, -1),  # at max_model_len: seq_len := position
        (-1, 5, -1),
    ],
)
def test_decode(position: int, seq_len: int, slot: int) -> None:
    assert compute_slot_mapping(i64(position), i32(seq_len), TABLE[:1], 4).tolist() == [slot]


def test_ragged_rows_and_tail() -> None:
    slots = compute_slot_mapping(i64(2, 3, 4, 0, 9, 9), i32(5, 1), TABLE, 4, i32(0, 3, 4))
    assert slots.tolist() == [30, 31, 12, 4, -1, -1]


def test_empty_row_in_the_middle() -> None:
    slots = compute_slot_mapping(i64(0, 0), i32(1, 0, 1), TABLE[[0, 1, 1]], 4, i32(0, 1, 1, 2))
    assert slots.tolist() == [28, 4]


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, int, Tensor | None]:
    rows, width = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    page = draw(st.sampled_from([1, 2, 3, 4, 16]))
    ints = st.integers(-2, width * page + 3)
    table = [draw(st.lists(st.integers(0, 50), min_size=width, max_size=width)) for _ in range(rows)]
    lens = draw(st.lists(st.integers(0, width * page + 2), min_size=rows, max_size=rows))
    starts = None
    tokens = rows
    if draw(st.booleans()):
        starts = [0]
        for _ in range(rows):
            starts.append(starts[-1] + draw(st.integers(0, 3)))
        tokens = starts[-1] + draw(st.integers(0, 3))
    positions = draw(st.lists(ints, min_size=tokens, max_size=tokens))
    query_start_loc = None if starts is None else i32(*starts)
    return i64(*positions), i32(*lens), torch.tensor(table, dtype=torch.int32), page, query_start_loc


@settings(deadline=None, max_examples=80)
@given(batches())
def test_equals_reference(batch: tuple[Tensor, Tensor, Tensor, int, Tensor | None]) -> None:
    from draftfuse.lowering.ops.compute_slot_mapping import reference

    assert torch.equal(compute_slot_mapping(*batch), reference(*batch))


@settings(deadline=None, max_examples=40)
@given(batches(), st.integers(1, 3))
def test_padding_changes_no_live_slot(batch: tuple[Tensor, Tensor, Tensor, int, Tensor | None], padding: int) -> None:
    positions, lens, table, page, starts = batch
    lens_padded = torch.cat([lens, lens.new_zeros(padding)])
    table_padded = torch.cat([table, table.new_full((padding, table.shape[1]), 10**6)])
    if starts is not None:
        starts = torch.cat([starts, starts[-1:].expand(padding)])
    else:
        positions = torch.cat([positions, positions.new_zeros(padding)])
    slots = compute_slot_mapping(positions, lens_padded, table_padded, page, starts)
    assert slots[: batch[0].shape[0]].tolist() == compute_slot_mapping(*batch).tolist()
    assert slots[batch[0].shape[0] :].tolist() == [-1] * (slots.shape[0] - batch[0].shape[0])


def test_traces_without_an_opaque_op() -> None:
    targets: list[Any] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        targets.extend(node.target for node in graph.graph.nodes)
        return graph

    compiled = torch.compile(compute_slot_mapping, backend=keep, fullgraph=True, dynamic=True)
    for arguments in ((i64(3, 4), i32(4, 0), TABLE, 4), (i64(2, 3, 4, 0), i32(5, 1), TABLE, 4, i32(0, 3, 4))):
        assert torch.equal(compiled(*arguments), compute_slot_mapping(*arguments))
    assert not any("draftfuse" in str(target) for target in targets)


@pytest.mark.parametrize(
    ("arguments", "what", "came", "expected"),
    [
        ((i32(0), i32(1), TABLE[:1], 4), "positions has a wrong dtype", torch.int32, "torch.int64"),
        ((i64(0), i64(1), TABLE[:1], 4), "seq_lens has a wrong dtype", torch.int64, "torch.int32"),
        ((i64(0), i32(1), TABLE[:1].long(), 4), "block_table has a wrong dtype", torch.int64, "torch.int32"),
        ((i64(0), i32(1), TABLE[0], 4), "block_table has 1 dims", (3,), "[R, B]"),
        ((i64(0), i32(1), TABLE[:1], 0), "page_size is no page size", 0, "page_size >= 1"),
        ((i64(0), i32(1), TABLE, 4), "block_table has other rows than seq_lens", 2, 1),
        ((i64(0, 1), i32(1), TABLE[:1], 4), "positions has other rows than seq_lens", 2, 1),
        ((i64(0), i32(1), TABLE[:1], 4, i64(0, 1)), "query_start_loc has a wrong dtype", torch.int64, "torch.int32"),
        ((i64(0), i32(1), TABLE[:1], 4, i32(0)), "query_start_loc does not fit seq_lens", 1, 2),
    ],
)
def test_errors(arguments: tuple[Any, ...], what: str, came: object, expected: object) -> None:
    with pytest.raises(OpArgumentError) as caught:
        compute_slot_mapping(*arguments)
    assert caught.value.what == f"draftfuse.ops.compute_slot_mapping: {what}"
    assert (caught.value.came, caught.value.expected) == (came, expected)
