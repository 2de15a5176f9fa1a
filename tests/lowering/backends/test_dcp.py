"""Decode context parallelism: simulated ranks draft what a single rank drafts, local metadata equal a plain count."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import draftfuse
from draftfuse import backends as b
from draftfuse.lowering.backends.dcp import local_lengths
from draftfuse.ops import write_kv
from draftfuse.speculator import AttentionGroup
from tests.lowering.backends.rows import make
from tests.lowering.backends.support import LENS, SMALL, Fused, Layer, Toy, differences, load, record_rebuild

PAGE, SCALE = SMALL.page, SMALL.size**-0.5


class Ranks(Toy):
    """All ranks in one process: a group a rank, with caches of its own; results are merged as a collective would."""

    def __init__(self, world_size: int, interleave: int) -> None:
        super().__init__([Layer(b.DcpBuilder(world_size, 0, interleave), self.attend, page_size=PAGE * world_size)])
        self.world_size, group = world_size, self.attn_groups[0]
        pages = self.layers[0].caches[0].shape[0]
        shape = (world_size, 2, pages, PAGE, *self.layers[0].caches[0].shape[2:])
        self.shares = torch.full(shape, float("nan"))
        self.attn_groups = [
            AttentionGroup(
                b.DcpBuilder(world_size, rank, interleave),
                group.block_table,
                group.slot_mapping,
                group.page_size,
                (f"rank{rank}",),
            )
            for rank in range(world_size)
        ]

    def forward(self, inputs: Any, metadata: Any) -> tuple[Tensor, Tensor]:
        return super().forward(inputs, {"layer0": [metadata[f"rank{r}"] for r in range(self.world_size)]})

    def attend(self, q: Tensor, k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, ranks: Any) -> Tensor:
        parts = []
        for rank, metadata in enumerate(ranks):
            keys, values = self.shares[rank]
            write_kv(k, v, keys, values, metadata.local_slots)
            parts.append(b.attend_share(q, keys, values, metadata, SCALE))
        outs, lses = (torch.stack(items) for items in zip(*parts, strict=True))
        return b.merge_partials(outs, lses)


def spread(single: Toy, ranks: Ranks, interleave: int) -> None:
    """Give every rank its share of what the single rank's cache holds, and the same model."""
    ranks.layers[0].weights = single.layers[0].weights
    one, many = single.attn_groups[0].block_table, ranks.attn_groups[0].block_table
    for row, length in enumerate(LENS):
        for position in range(length - 1):
            piece, offset = divmod(position, interleave)
            cycle, rank = divmod(piece, ranks.world_size)
            page, slot = divmod(cycle * interleave + offset, PAGE)
            for i, cache in enumerate(single.layers[0].caches):
                value = cache[one[row, position // PAGE], position % PAGE]
                ranks.shares[rank, i, many[row, page], slot] = value


@pytest.mark.parametrize(("world_size", "interleave"), [(2, 1), (3, 2)])
def test_ranks_equal_a_single_rank(world_size: int, interleave: int) -> None:
    single, ranks = make("triton_attention"), Ranks(world_size, interleave)
    spread(single, ranks, interleave)
    before = ranks.shares.clone()
    expected = record_rebuild(single, LENS, 6)
    rebuilt = record_rebuild(ranks, LENS, 6)
    assert differences(named(expected, "hidden", "tokens"), named(rebuilt, "hidden", "tokens")) == []
    fused = Fused(ranks)
    ranks.shares.copy_(before)
    assert differences(rebuilt, fused.record(LENS, 6)) == []


def named(records: Any, *names: str) -> Any:
    """Live rows of some of the records."""
    return {key: value[: len(LENS)] for key, value in records.items() if key[0] in names}


@given(st.integers(0, 200), st.integers(1, 5), st.integers(1, 4))
def test_local_lengths_count_positions(length: int, world_size: int, interleave: int) -> None:
    for rank in range(world_size):
        mine = sum(position // interleave % world_size == rank for position in range(length))
        lens = torch.tensor([length], dtype=torch.int32)
        assert local_lengths(lens, world_size, rank, interleave).tolist() == [mine]


def test_changed_rank_breaks_its_guard() -> None:
    ranks = Ranks(2, 1)
    fused = draftfuse.compile(ranks, compiler="none", request_capacities=[6])
    load(ranks, LENS, 6)
    fused.decode(len(LENS))
    for group, rank in zip(ranks.attn_groups, (1, 0), strict=True):
        group.builder.rank = rank
    load(ranks, LENS, 6)
    fused.decode(len(LENS))
    assert fused.report.counters["broken guards"] == 1
    assert "rank: traced with 0, now 1" in fused.report.fallbacks[0].reason


def test_backend_that_cannot_runs_split() -> None:
    ranks = Ranks(2, 1)
    ranks.attn_groups[1].builder = b.UnsupportedDcpBuilder(ranks.attn_groups[1].builder)
    fused = draftfuse.compile(ranks, compiler="none", request_capacities=[6])
    load(ranks, LENS, 6)
    fused.decode(len(LENS))
    assert "UnsupportedDcpBuilder" in fused.report.fallbacks[0].reason
