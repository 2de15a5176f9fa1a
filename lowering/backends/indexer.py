"""The indexer of sparse MLA: compressed keys of every ``ratio`` tokens, scored to choose what the attention reads.

Shape letters: R requests (rows), T tokens, S processors in the schedule, I indexer heads, D indexer head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftfuse.lowering.backends.ops.index_logits import index_logits, index_topk
from draftfuse.lowering.backends.ops.indexer_refresh import indexer_refresh
from draftfuse.lowering.backends.ops.indexer_refresh import reference as indexer_fields
from draftfuse.speculator import CommonMetadata, Guard


@dataclass
class IndexerMetadata:
    """What the indexer reads at one draft step."""

    slots: Tensor  # i64[T] of the compressed cache, -1 where a token completes no entry
    request_ids: Tensor  # i32[T]
    lens: Tensor  # i32[R], compressed entries
    schedule: Tensor  # i32[S+1, 2]
    block_table: Tensor  # i32[R, blocks]
    ratio: int
    processors: int


class IndexerBuilder:
    """Derived: plain PyTorch.

    Args:
        ratio: tokens of one compressed entry; divides the page size.
        processors: how many programs share the scoring, the number of SMs on a GPU.
    """

    def __init__(self, ratio: int, processors: int) -> None:
        self.ratio, self.processors = ratio, processors

    def build(self, common: CommonMetadata) -> IndexerMetadata:
        """Compressed slots, request ids, lengths and schedule."""
        fields = indexer_fields(
            common.slot_mapping,
            common.positions,
            common.seq_lens,
            common.query_start_loc,
            self.ratio,
            self.processors,
        )
        return IndexerMetadata(*fields, common.block_table, self.ratio, self.processors)

    def guards(self, metadata: IndexerMetadata) -> Sequence[Guard]:
        """Compression ratio and the number of processors that the schedule was laid out for."""
        return [
            Guard("ratio", metadata.ratio, lambda: self.ratio),
            Guard("processors", metadata.processors, lambda: self.processors),
        ]


class RegisteredIndexerBuilder(IndexerBuilder):
    """Registered: one kernel writes persistent buffers.

    Args:
        ratio, processors: as in :class:`IndexerBuilder`.
        max_num_reqs, max_num_tokens: the largest batch, prefill included.
        device: where the buffers live.
    """

    def __init__(
        self,
        ratio: int,
        processors: int,
        max_num_reqs: int,
        max_num_tokens: int,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(ratio, processors)
        self.slots = torch.full((max_num_tokens + 1,), -1, dtype=torch.int64, device=device)
        self.request_ids = torch.zeros(max_num_tokens + 1, dtype=torch.int32, device=device)
        self.lens = torch.zeros(max_num_reqs + 1, dtype=torch.int32, device=device)
        self.schedule = torch.zeros(processors + 1, 2, dtype=torch.int32, device=device)

    def build(self, common: CommonMetadata) -> IndexerMetadata:
        """Views of the persistent buffers; the loop refreshes them before each decode step, this at prefill."""
        n, r = common.num_tokens, common.num_reqs
        fields = (self.slots[:n], self.request_ids[:n], self.lens[:r], self.schedule)
        metadata = IndexerMetadata(*fields, common.block_table, self.ratio, self.processors)
        if common.draft_step == 0:
            self.refresh(metadata, common)
        return metadata

    def refresh(self, metadata: IndexerMetadata, common: CommonMetadata) -> None:
        """Write the buffers for ``common``."""
        indexer_refresh(
            common.slot_mapping,
            common.positions,
            common.seq_lens,
            common.query_start_loc,
            metadata.slots,
            metadata.request_ids,
            metadata.lens,
            metadata.schedule,
            self.ratio,
        )


def select_slots(
    query: Tensor, weights: Tensor, key_cache: Tensor, metadata: IndexerMetadata, topk: int
) -> tuple[Tensor, Tensor]:
    """Compressed slots that each row of a decode step attends, for ``sparse_attention``: (i32[R, k], i32[R])."""
    logits = index_logits(query, weights, key_cache, metadata.block_table, metadata.lens, metadata.schedule)
    return index_topk(logits, metadata.block_table, metadata.lens, key_cache.shape[1], topk)
