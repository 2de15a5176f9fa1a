"""Backends whose metadata are nothing but views of the persistent inputs: Triton paged attention, MLA, static drafters.

Shape letters: R requests (rows), T tokens, Hq query heads, H KV heads, D head size, N blocks (pages), P slots a page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from draftfuse.lowering.backends.ops.mla_attention import mla_attention
from draftfuse.lowering.ops.paged_attention import paged_attention
from draftfuse.speculator import CommonMetadata, Guard


@dataclass
class PagedMetadata:
    """Views of persistent buffers: they change when the buffers do."""

    seq_lens: Tensor  # i32[R]
    block_table: Tensor  # i32[R, blocks]
    slot_mapping: Tensor  # i64[T]
    query_start_loc: Tensor  # i32[R+1]
    max_query_len: int
    max_seq_len: int


class PagedBuilder:
    """Metadata of attention through a block table: every field is a view, so there is no refresh."""

    def build(self, common: CommonMetadata) -> PagedMetadata:
        """The views of ``common``."""
        return PagedMetadata(
            seq_lens=common.seq_lens,
            block_table=common.block_table,
            slot_mapping=common.slot_mapping,
            query_start_loc=common.query_start_loc,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
        )

    def guards(self, metadata: PagedMetadata) -> Sequence[Guard]:
        """The longest sequence that the launch sizes of the captured kernels were chosen for."""
        return [Guard("max_seq_len", metadata.max_seq_len, "max_seq_len", "at_most")]


class StaticBuilder(PagedBuilder):
    """Metadata of a drafter whose positions do not advance and that writes no KV (it shares the target's)."""

    refresh_kind = "static"


def attend_paged(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, metadata: PagedMetadata, scale: float, window: int = 0
) -> Tensor:
    """Attention of the draft step or prefill that ``metadata`` was built for; query [T, Hq, D] -> [T, Hq, D]."""
    starts = None if metadata.max_query_len == 1 else metadata.query_start_loc
    return paged_attention(
        query, key_cache, value_cache, metadata.block_table, metadata.seq_lens, starts, scale, window
    )


def attend_mla(q_nope: Tensor, q_rope: Tensor, latent_cache: Tensor, metadata: PagedMetadata, scale: float) -> Tensor:
    """Latent attention of a decode step (one query token a row); see :func:`mla_attention`."""
    return mla_attention(q_nope, q_rope, latent_cache, metadata.block_table, metadata.seq_lens, scale)
