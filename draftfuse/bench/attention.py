"""Attention backends of the measured speculators: draftfuse's Triton operator, or FlashAttention 3 where it is installed.

Shapes: R requests, T tokens, Q query heads, D head size, N pages, P slots a page, G KV heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from draftfuse.ops import paged_attention
from draftfuse.speculator import CommonMetadata, MetadataBuilder

BACKENDS = ("triton", "fa3")


class Backend(Protocol):
    """A metadata builder and the attention that reads its metadata."""

    builder: MetadataBuilder

    def attend(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, metadata: Any) -> Tensor:
        """Attention of [T, Q, D] over the pages; ``metadata`` is what the builder made, with a ``slot_mapping``."""


@dataclass
class PagedMetadata:
    """Views of persistent buffers: this backend's refresh is aliased."""

    seq_lens: Tensor  # i32[R]
    block_table: Tensor  # i32[R, blocks]
    slot_mapping: Tensor  # i64[T]
    query_start_loc: Tensor | None  # i32[R+1]; None in decode


class PagedBuilder:
    """Metadata of ``draftfuse.ops.paged_attention``."""

    def build(self, common: CommonMetadata) -> PagedMetadata:
        """Views only."""
        starts = None if common.max_query_len == 1 else common.query_start_loc
        return PagedMetadata(common.seq_lens, common.block_table, common.slot_mapping, starts)


class TritonAttention:
    """``draftfuse.ops.paged_attention``: Triton on CUDA, plain PyTorch on the CPU."""

    def __init__(self, head_size: int) -> None:
        self.builder, self.scale = PagedBuilder(), head_size**-0.5

    def attend(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, metadata: PagedMetadata) -> Tensor:
        """Paged attention at this backend's scale."""
        return paged_attention(
            query,
            key_cache,
            value_cache,
            metadata.block_table,
            metadata.seq_lens,
            metadata.query_start_loc,
            self.scale,
        )
