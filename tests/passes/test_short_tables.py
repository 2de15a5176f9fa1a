"""short_tables: the largest index that positions give, through arithmetic, against the rows of a table."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from draftfuse.passes.short_tables import short_tables
from tests.passes.helpers import build

LIMIT = 20


def found(index: Callable[[Tensor], Tensor], rows: int) -> list[tuple[int, int]]:
    def loop(positions: Tensor, table: Tensor, out: Tensor) -> None:
        out.copy_(table[index(positions)])

    graph = build(loop, torch.zeros(3, dtype=torch.int64), torch.zeros(rows), torch.zeros(3))
    return [
        (have, need)
        for _, have, need in short_tables(
            graph, [n.name for n in graph.nodes if n.meta.get("path") == "positions"], LIMIT
        )
    ]


@pytest.mark.parametrize(
    ("index", "needed"),
    [
        (lambda p: p, 20),
        (lambda p: p + 1, 21),
        (lambda p: p - 2, 18),
        (lambda p: p * 2, 39),
        (lambda p: p // 4, 5),
        (lambda p: p % 7, 7),
        (lambda p: p.clamp(max=9), 10),
        (lambda p: torch.where(p > 3, p, 0), 20),
        (lambda p: torch.where(p >= 9, 0, p), 9),
        (lambda p: torch.where((p > 9) | (p == 3), 0, p), 10),
        (lambda p: torch.where((p < 9) & (p > 3), p, 5), 9),
        (lambda p: torch.where(p <= 9, p, 0), 10),
        (lambda p: p.masked_fill(p >= 9, 0), 9),
        (lambda p: torch.where((p >= 9) & (p > 3), 0, p), 20),
        (lambda p: torch.where(p >= 9, p, 0), 20),
        (lambda p: torch.where(p + 1 >= 9, 0, p), 20),
        (lambda p: (p + 3).to(torch.int32).to(torch.int64)[:], 23),
    ],
)
def test_a_table_needs_one_row_more_than_the_largest_index(index: Callable[[Tensor], Tensor], needed: int) -> None:
    assert found(index, needed) == []
    assert found(index, needed - 1) == [(needed - 1, needed)]


def test_an_unknown_index_is_not_judged() -> None:
    assert found(lambda p: (p.to(torch.float32) * 0.1).to(torch.int64), 1) == []


def test_an_unconditional_advance_raises_what_later_steps_hold() -> None:
    def loop(positions: Tensor, table: Tensor, out: Tensor) -> None:
        out.copy_(table[positions])
        positions.add_(1)
        out.copy_(table[positions])

    graph = build(loop, torch.zeros(3, dtype=torch.int64), torch.zeros(LIMIT), torch.zeros(3))
    names = [n.name for n in graph.nodes if n.meta.get("path") == "positions"]
    assert [(have, need) for _, have, need in short_tables(graph, names, LIMIT)] == [(20, 21)]


def test_what_is_written_over_positions_takes_their_place() -> None:
    def loop(positions: Tensor, table: Tensor, out: Tensor) -> None:
        positions.add_(1)
        positions.copy_(torch.where(positions >= LIMIT, 0, positions))
        out.copy_(table[positions])

    graph = build(loop, torch.zeros(3, dtype=torch.int64), torch.zeros(LIMIT - 1), torch.zeros(3))
    names = [n.name for n in graph.nodes if n.meta.get("path") == "positions"]
    assert [(have, need) for _, have, need in short_tables(graph, names, LIMIT)] == [(19, 20)]
