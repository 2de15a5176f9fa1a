"""FlashAttention 3 and 2: with the schedule made ahead of time (registered), and without (aliased).

Shape letters: R requests (rows), T query tokens, Hq query heads, H KV heads, D head size, S capacity of the schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftfuse.lowering.backends.ops import fa3
from draftfuse.lowering.backends.ops.flash_attention import flash_attention
from draftfuse.lowering.backends.paged import PagedBuilder, PagedMetadata
from draftfuse.speculator import CommonMetadata, Guard


@dataclass
class FlashAttn3Metadata(PagedMetadata):
    """Views of the inputs, and the plan of the library in a persistent buffer."""

    schedule: Tensor  # i32[S], zero behind the plan
    num_splits: int
    window: int


class FlashAttn3Builder:
    """Registered: the library plans into a buffer of fixed capacity before every step.

    Args:
        heads, kv_heads, head_size: the draft's own (not the target's).
        dtype: of queries and KV.
        max_num_reqs: the largest batch.
        num_splits: upper bound of splits; 0 lets the library choose it from host sizes. Fixed at capture.
        window: sliding window of these layers, 0 for none.
        device: where the buffer lives.
    """

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        max_num_reqs: int,
        num_splits: int = 0,
        window: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.heads, self.kv_heads, self.head_size, self.dtype = heads, kv_heads, head_size, dtype
        self.num_splits, self.window = num_splits, window
        self.schedule = torch.zeros(fa3.schedule_capacity(max_num_reqs), dtype=torch.int32, device=device)

    def build(self, common: CommonMetadata) -> FlashAttn3Metadata:
        """Views; the loop plans before each decode step, this at prefill."""
        metadata = FlashAttn3Metadata(
            seq_lens=common.seq_lens,
            block_table=common.block_table,
            slot_mapping=common.slot_mapping,
            query_start_loc=common.query_start_loc,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            schedule=self.schedule,
            num_splits=self.num_splits,
            window=self.window,
        )
        if common.draft_step == 0:
            self.refresh(metadata, common)
        return metadata

    def refresh(self, metadata: FlashAttn3Metadata, common: CommonMetadata) -> None:
        """Plan for the lengths of ``common``, with the host bounds that the attention will be called with."""
        torch.ops.draftfuse.fa3_schedule(
            common.seq_lens,
            common.query_start_loc,
            metadata.schedule,
            metadata.max_query_len,
            metadata.max_seq_len,
            self.heads,
            self.kv_heads,
            self.head_size,
            common.page_size,
            metadata.num_splits,
            metadata.window,
            self.dtype,
        )

    def guards(self, metadata: FlashAttn3Metadata) -> Sequence[Guard]:
        """The bounds that schedule and attention share."""
        return [
            Guard("max_seq_len", metadata.max_seq_len, "max_seq_len", "at_most"),
            Guard("num_splits", metadata.num_splits, lambda: self.num_splits),
            Guard("window", metadata.window, lambda: self.window),
        ]


class FlashAttnBuilder(PagedBuilder):
    """Aliased: FlashAttention 2, or 3 without a schedule made ahead."""


def attend_fa3(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, metadata: FlashAttn3Metadata, scale: float
) -> Tensor:
    """Attention by the schedule of ``metadata``: query [T, Hq, D] -> [T, Hq, D]."""
    out = torch.empty_like(query)
    torch.ops.draftfuse.fa3_attention(
        query,
        key_cache,
        value_cache,
        metadata.block_table,
        metadata.seq_lens,
        metadata.query_start_loc,
        metadata.schedule,
        out,
        scale,
        metadata.max_query_len,
        metadata.max_seq_len,
        metadata.num_splits,
        metadata.window,
    )
    return out


def attend_flash(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, metadata: PagedMetadata, scale: float, window: int = 0
) -> Tensor:
    """Attention without a schedule: query [T, Hq, D] -> [T, Hq, D]."""
    return flash_attention(
        query,
        key_cache,
        value_cache,
        metadata.block_table,
        metadata.seq_lens,
        metadata.query_start_loc,
        scale,
        metadata.max_query_len,
        metadata.max_seq_len,
        window,
    )
