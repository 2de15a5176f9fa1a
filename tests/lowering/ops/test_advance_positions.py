"""advance_positions: live rows move, padded rows and rows at the limit stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftfuse.errors import OpArgumentError
from draftfuse.ops import advance_positions

LIMIT = 8


def rows(positions: list[int], lens: list[int]) -> tuple[Tensor, Tensor]:
    return torch.tensor(positions, dtype=torch.int64), torch.tensor(lens, dtype=torch.int32)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((4, 5), (5, 6)),
        ((LIMIT - 2, LIMIT - 1), (LIMIT - 1, LIMIT)),  # the last move
        ((LIMIT - 1, LIMIT), (LIMIT - 1, LIMIT - 1)),  # at the limit: dies by seq_len := position
        ((LIMIT - 1, LIMIT - 1), (LIMIT - 1, LIMIT - 1)),  # and stays dead
        ((0, 0), (0, 0)),  # padded
    ],
)
def test_one_row(before: tuple[int, int], after: tuple[int, int]) -> None:
    positions, lens = rows([before[0]], [before[1]])
    advance_positions(positions, lens, LIMIT)
    assert (positions.item(), lens.item()) == after
    assert (positions.dtype, lens.dtype) == (torch.int64, torch.int32)


states = st.lists(st.tuples(st.integers(0, LIMIT - 1), st.integers(0, LIMIT)), min_size=1, max_size=6)


@settings(deadline=None, max_examples=80)
@given(states)
def test_equals_reference(state: list[tuple[int, int]]) -> None:
    from draftfuse.lowering.ops.advance_positions import reference

    positions, lens = rows(*map(list, zip(*state, strict=True)))
    expected = reference(positions, lens, LIMIT)
    advance_positions(positions, lens, LIMIT)
    assert torch.equal(positions, expected[0])
    assert torch.equal(lens, expected[1])


@settings(deadline=None, max_examples=40)
@given(states, st.integers(1, 12))
def test_any_number_of_steps_keeps_the_contract(state: list[tuple[int, int]], steps: int) -> None:
    positions, lens = rows(*map(list, zip(*state, strict=True)))
    live = positions < lens
    padded = positions[~live].clone(), lens[~live].clone()
    for _ in range(steps):
        advance_positions(positions, lens, LIMIT)
    assert bool((positions < LIMIT).all())
    assert torch.equal(positions[~live], padded[0])
    assert torch.equal(lens[~live], padded[1])


def test_writes_slices_of_persistent_buffers() -> None:
    positions, lens = rows([1, 1, 1], [2, 2, 2])
    advance_positions(positions[:2], lens[:2], LIMIT)
    assert positions.tolist() == [2, 2, 1]
    assert lens.tolist() == [3, 3, 2]


def test_traces_in_place() -> None:
    compiled = torch.compile(advance_positions, backend="eager", fullgraph=True, dynamic=True)
    positions, lens = rows([3, 7, 0], [4, 8, 0])
    compiled(positions, lens, LIMIT)
    assert positions.tolist() == [4, 7, 0]
    assert lens.tolist() == [5, 7, 0]


@pytest.mark.parametrize(
    ("change", "what", "came", "expected"),
    [
        ("positions", "positions has a wrong dtype", torch.int32, "torch.int64"),
        ("lens", "seq_lens has 2 dims", (1, 2), "[R]"),
        ("rows", "positions has other rows than seq_lens", 1, 2),
        ("limit", "max_model_len is no length", 0, "max_model_len >= 1"),
    ],
)
def test_errors(change: str, what: str, came: object, expected: object) -> None:
    positions, lens = rows([0, 1], [1, 2])
    arguments: dict[str, tuple[Any, ...]] = {
        "positions": (positions.int(), lens, LIMIT),
        "lens": (positions, lens[None], LIMIT),
        "rows": (positions[:1], lens, LIMIT),
        "limit": (positions, lens, 0),
    }
    with pytest.raises(OpArgumentError) as caught:
        advance_positions(*arguments[change])
    assert caught.value.what == f"draftfuse.ops.advance_positions: {what}"
    assert (caught.value.came, caught.value.expected) == (came, expected)
