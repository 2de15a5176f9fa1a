"""Launch sizes: enough programs, never more splits than tiles, and every query block has an owner."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftfuse.lowering.ops._paged_attention_plan import MAX_SPLITS, hardware, next_power_of_2, plan

CACHE = torch.empty(1, 16, 8, 128, dtype=torch.bfloat16, device="meta")


def query(tokens: int, heads: int = 32) -> torch.Tensor:
    return torch.empty(tokens, heads, 128, dtype=torch.bfloat16, device="meta")


@pytest.mark.parametrize(("rows", "splits"), [(1, 49), (8, 6), (64, 1), (512, 1)])
def test_splits_fill_the_device_in_one_round(rows: int, splits: int) -> None:
    chosen = plan(query(rows), CACHE, 256, rows, False, 0, 132)
    assert chosen.splits == splits
    assert splits == 1 or chosen.splits * rows * 8 <= 3 * 132
    assert not chosen.early


@pytest.mark.parametrize(("rows", "splits"), [(1, 50), (16, 4), (64, 1)])
def test_programs_of_small_heads_start_early(rows: int, splits: int) -> None:
    small = torch.empty(rows, 32, 64, dtype=torch.bfloat16, device="meta")
    chosen = plan(small, CACHE[..., :64], 516, rows, False, 0, 132)
    assert (chosen.splits, chosen.early) == (splits, True)


def test_splits_are_bounded_by_the_tiles_of_the_table_or_window() -> None:
    assert plan(query(1), CACHE, 8, 1, False, 0, 132).splits == 2  # 128 positions in tiles of 64
    assert plan(query(1), CACHE, 4096, 1, False, 512, 132).splits == 10
    assert plan(query(1, 8), CACHE, 10**5, 1, False, 0, 10**4).splits == MAX_SPLITS


@given(st.lists(st.integers(0, 40), min_size=1, max_size=8), st.sampled_from([8, 32, 56]))
def test_ragged_query_blocks_cover_all_tokens(lengths: list[int], heads: int) -> None:
    chosen = plan(query(max(1, sum(lengths)), heads), CACHE, 8, len(lengths), True, 0, 132)
    start = 0
    for row, length in enumerate(lengths):
        first = start // chosen.block_q + row
        start += length
        assert -(-length // chosen.block_q) <= start // chosen.block_q + row + 1 - first
        assert start // chosen.block_q + row + 1 <= chosen.q_blocks
    assert chosen.block_m >= max(16, chosen.block_q * heads // 8)


@pytest.mark.parametrize(("size", "power"), [(0, 1), (1, 1), (2, 2), (3, 4), (64, 64), (65, 128)])
def test_next_power_of_2(size: int, power: int) -> None:
    assert next_power_of_2(size) == power


def test_hardware_without_cuda() -> None:
    assert hardware(torch.device("cpu")) == (4, 1)
