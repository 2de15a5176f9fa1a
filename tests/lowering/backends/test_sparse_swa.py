"""Sparse sliding windows: the numbers of a known case, both layouts, and state that must not outlive its step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from draftfuse import backends as b
from draftfuse.loop import common_metadata, update_slot_mapping
from draftfuse.lowering.backends.sparse_swa import TileScheduler
from draftfuse.ops import paged_attention
from draftfuse.speculator import AttentionGroup, CommonMetadata
from tests.lowering.backends.rows import WINDOW, make
from tests.lowering.backends.support import (
    LENS,
    SMALL,
    Fused,
    Layer,
    Sizes,
    Toy,
    differences,
    paged_layer,
    record_rebuild,
    without_refresh,
)

PAGE, WIDTH, BLOCK = 64, 64, 3
BUILDERS = {
    "derived": lambda: b.SparseSwaBuilder(32, WIDTH),
    "registered": lambda: b.RegisteredSparseSwaBuilder(32, SMALL.max_tokens, WIDTH),
}


def example(builder: Any) -> Toy:
    """One page of 64 slots, block 3, for row 0."""
    spec = Toy([Layer(builder, paged_layer(b.attend_sparse_swa))], Sizes(page=PAGE, max_len=PAGE))
    spec.attn_groups[0].block_table.fill_(0)
    spec.attn_groups[0].block_table[0] = BLOCK
    return spec


def expect(records: Any, step: int, length: int) -> None:
    """One live row of ``length`` tokens padded to four."""

    def of(name: str) -> Tensor:
        found: Tensor = records[f"group0.metadata.{name}", step]
        return found

    assert of("is_valid").tolist() == [True, False, False, False]
    assert of("swa_lens").tolist() == [length, 0, 0, 0]
    first = BLOCK * PAGE
    assert of("swa_indices")[0].tolist() == [*range(first, first + length)] + [-1] * (WIDTH - length)
    assert int(of("swa_indices")[1:].max()) == -1


@pytest.mark.parametrize("kind", BUILDERS)
def test_known_case(kind: str) -> None:
    records = Fused(example(BUILDERS[kind]())).record([6], 4)
    for step, length in ((1, 6), (2, 7), (3, 8)):
        expect(records, step, length)


def test_known_case_without_refresh_keeps_the_first_step() -> None:
    stale = Fused(without_refresh(example(BUILDERS["derived"]()))).record([6], 4)
    expect(stale, 1, 6)
    expect(stale, 2, 6)
    with pytest.raises(AssertionError):
        expect(stale, 2, 7)


def test_registered_equals_derived() -> None:
    derived, registered = make("sparse_swa"), make("sparse_swa_registered")
    expected = record_rebuild(derived, LENS, 6)
    assert differences(expected, Fused(registered).record(LENS, 6)) == []


def common(lens: list[int], starts: list[int]) -> CommonMetadata:
    """A ragged batch: the last tokens of each row."""
    spec, rows, tokens = make("sparse_swa"), len(lens), starts[-1]
    inputs = spec.inputs.view(rows, tokens)
    inputs.seq_lens.copy_(torch.tensor(lens))
    inputs.query_start_loc.copy_(torch.tensor(starts))
    for row, length in enumerate(lens):
        count = starts[row + 1] - starts[row]
        inputs.positions[starts[row] : starts[row + 1]] = torch.arange(length - count, length)
    group: AttentionGroup = spec.attn_groups[0]
    update_slot_mapping(group, inputs, ragged=True)
    return common_metadata(spec, group, inputs, 0, max(1, tokens), 32)


RAGGED = common([9, 3, 14, 5], [0, 4, 5, 5, 10])


def windows_by_hand() -> list[list[int]]:
    """Slots that each token of RAGGED attends, a token at a time."""
    found, starts = [], RAGGED.query_start_loc.tolist()
    for row, length in enumerate(RAGGED.seq_lens.tolist()):
        for token in range(starts[row], starts[row + 1]):
            last = length - starts[row + 1] + token
            at = range(max(0, last - WINDOW + 1), last + 1)
            found.append([int(RAGGED.block_table[row, p // 4]) * 4 + p % 4 for p in at])
    return found


@pytest.mark.parametrize(
    "builder", [b.SparseSwaBuilder(WINDOW), b.RegisteredSparseSwaBuilder(WINDOW, SMALL.max_tokens)]
)
def test_prefill_windows(builder: Any) -> None:
    metadata = builder.build(RAGGED)
    rows = [r[r >= 0].tolist() for r in metadata.swa_indices]
    assert rows == windows_by_hand()
    assert metadata.swa_lens.tolist() == [len(row) for row in rows]
    assert metadata.token_to_req.tolist() == [0] * 4 + [1] + [3] * 5


def test_ragged_lists_hold_the_same_windows() -> None:
    metadata = b.RaggedSwaBuilder(WINDOW).build(RAGGED)
    flat = [slot for row in windows_by_hand() for slot in row]
    assert metadata.swa_indices.tolist() == flat + [-1] * (metadata.swa_indices.shape[0] - len(flat))
    ends = torch.tensor([0, *(len(row) for row in windows_by_hand())]).cumsum(0)
    assert metadata.swa_indptr.tolist() == ends.tolist()


def test_attention_equals_a_sliding_window() -> None:
    """Both layouts attend what paged attention with a window attends."""
    query = torch.randn(10, 4, 16)
    caches = torch.randn(2, 60, 4, 2, 16)
    tables = (RAGGED.block_table, RAGGED.seq_lens, RAGGED.query_start_loc)
    expected = paged_attention(query, caches[0], caches[1], *tables, 0.25, WINDOW)
    dense, ragged = b.SparseSwaBuilder(WINDOW).build(RAGGED), b.RaggedSwaBuilder(WINDOW).build(RAGGED)
    torch.testing.assert_close(b.attend_sparse_swa(query, caches[0], caches[1], dense, 0.25), expected)
    torch.testing.assert_close(b.attend_ragged_swa(query, caches[0], caches[1], ragged, 0.25), expected)


def test_each_step_has_its_own_scheduler_and_cache() -> None:
    builder = b.RegisteredSparseSwaBuilder(WINDOW, SMALL.max_tokens)
    metadata = builder.build(RAGGED)
    first = metadata.tile_scheduler
    b.attend_sparse_swa(torch.randn(10, 4, 16), *torch.randn(2, 60, 4, 2, 16), metadata, 0.25)
    assert first.tiles is not None
    assert metadata.index_cache
    builder.invalidate(metadata)
    assert isinstance(metadata.tile_scheduler, TileScheduler)
    assert metadata.tile_scheduler is not first
    assert (metadata.tile_scheduler.tiles, metadata.index_cache) == (None, {})


def test_forgotten_invalidation_shows() -> None:
    """The audit's comparison sees a plan and an index cache that outlive their step."""

    class Forgetful(b.RegisteredSparseSwaBuilder):
        invalidate = None  # type: ignore[assignment]

        def __getattribute__(self, name: str) -> Any:
            if name == "invalidate":
                raise AttributeError(name)
            return super().__getattribute__(name)

    spec = Toy([Layer(Forgetful(WINDOW, SMALL.max_tokens), paged_layer(b.attend_sparse_swa))])
    expected = record_rebuild(make("sparse_swa_registered"), LENS, 6)
    found = {name for name, _ in differences(expected, record_rebuild(spec, LENS, 6), "metadata")}
    assert found == {"group0.metadata.tile_scheduler.tiles", "group0.metadata.index_cache.indices"}
