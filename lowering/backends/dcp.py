"""Decode context parallelism: each rank holds a share of every sequence's KV, and attends that share alone.

Positions go round the ranks in pieces of ``interleave`` tokens. A group's ``page_size`` is that of the *virtual* page,
``ranks`` local pages long, so the block table and the length limit mean the same on every rank. Local lengths and slots
follow from seq_lens and positions in plain PyTorch, so the refresh is derived.

Shape letters: R requests (rows, one query token each), Hq query heads, D head size, W ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftfuse.lowering.backends.ops.partial_attention import merge_partials, partial_attention
from draftfuse.lowering.backends.windows import slots_through_table, token_to_request
from draftfuse.speculator import CommonMetadata, Guard


@dataclass
class DcpMetadata:
    """What one rank reads at one draft step."""

    local_lens: Tensor  # i32[R], this rank's share of seq_lens
    local_slots: Tensor  # i64[T], -1 where another rank holds the token
    block_table: Tensor
    world_size: int
    rank: int


def local_lengths(seq_lens: Tensor, world_size: int, rank: int, interleave: int) -> Tensor:
    """How many of the first ``seq_lens`` tokens ``rank`` holds."""
    cycle = world_size * interleave
    rest = (seq_lens % cycle - rank * interleave).clamp(min=0, max=interleave)
    return (seq_lens // cycle * interleave + rest).to(seq_lens.dtype)


class DcpBuilder:
    """Derived: lengths and slots of one rank.

    Args:
        world_size, rank: of the context-parallel group.
        interleave: tokens of one piece; divides the local page size.
        world_size_now: returns the group's size at replay; the captured one by default.
    """

    def __init__(self, world_size: int, rank: int, interleave: int = 1) -> None:
        self.world_size, self.rank, self.interleave = world_size, rank, interleave

    def build(self, common: CommonMetadata) -> DcpMetadata:
        """This rank's lengths and slots."""
        lens = local_lengths(common.seq_lens, self.world_size, self.rank, self.interleave)
        slots = self.local_slots(common)
        return DcpMetadata(lens, slots, common.block_table, self.world_size, self.rank)

    def local_slots(self, common: CommonMetadata) -> Tensor:
        """Slots of the tokens that this rank holds; -1 elsewhere and where the global slot is -1."""
        cycle = self.world_size * self.interleave
        position = common.positions
        mine = position // self.interleave % self.world_size == self.rank
        local = position // cycle * self.interleave + position % self.interleave
        rows = token_to_request(common.query_start_loc, common.num_tokens)
        slots = slots_through_table(common.block_table, rows, local, common.page_size // self.world_size)
        return torch.where(mine & (common.slot_mapping >= 0), slots, -1)

    def guards(self, metadata: DcpMetadata) -> Sequence[Guard]:
        """Size and rank of the group: the shares that the graph computes."""
        return [
            Guard("dcp_world_size", metadata.world_size, lambda: self.world_size),
            Guard("dcp_rank", metadata.rank, lambda: self.rank),
        ]


class UnsupportedDcpBuilder:
    """A backend whose host decisions change under DCP > 1 (FlashAttention 3's schedule, say): always split."""

    refresh_kind = "host-planned"

    def __init__(self, inner: DcpBuilder) -> None:
        self.inner = inner

    def build(self, common: CommonMetadata) -> DcpMetadata:
        """What the inner builder makes."""
        return self.inner.build(common)


def attend_share(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, metadata: DcpMetadata, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention over this rank's share: (f32[R, Hq, D], f32[R, Hq] log-sum-exp), to be merged over the ranks."""
    return partial_attention(query, key_cache, value_cache, metadata.block_table, metadata.local_lens, scale)


__all__ = ["DcpBuilder", "DcpMetadata", "UnsupportedDcpBuilder", "attend_share", "local_lengths", "merge_partials"]
