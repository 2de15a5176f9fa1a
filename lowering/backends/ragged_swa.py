"""Sliding-window attention over ragged index lists (indices and indptr), as ROCm's sparse kernels read them.

The lengths change at every draft step, so other engines leave this layout out of their captured loops. Here the lists
lie one behind the other in a buffer of fixed capacity, and the refresh is derived.

Shape letters: T tokens, C capacity of the list, Hq query heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftfuse.lowering.backends.ops.sparse_attention import sparse_attention
from draftfuse.lowering.backends.windows import ragged_window_slots, token_positions, token_to_request, window_bounds
from draftfuse.speculator import CommonMetadata, Guard


@dataclass
class RaggedSwaMetadata:
    """The slots that each token attends, one list behind the other."""

    slot_mapping: Tensor  # i64[T]
    swa_indices: Tensor  # i32[C], -1 behind the last list
    swa_indptr: Tensor  # i32[T+1]
    swa_lens: Tensor  # i32[T]
    window: int


class RaggedSwaBuilder:
    """Derived: cumulative lengths and a gather, in plain PyTorch."""

    def __init__(self, window: int) -> None:
        self.window = window

    def build(self, common: CommonMetadata) -> RaggedSwaMetadata:
        """Windows of all tokens inside ``num_tokens * window`` entries."""
        rows = token_to_request(common.query_start_loc, common.num_tokens).to(torch.int64)
        positions = token_positions(common.seq_lens, common.query_start_loc, rows)
        first, lens = window_bounds(positions, common.slot_mapping >= 0, self.window)
        capacity = common.num_tokens * self.window
        indices, indptr = ragged_window_slots(common.block_table, rows, first, lens, capacity, common.page_size)
        return RaggedSwaMetadata(common.slot_mapping, indices, indptr, lens.to(torch.int32), self.window)

    def guards(self, metadata: RaggedSwaMetadata) -> Sequence[Guard]:
        """The window, which the capacity of the list depends on."""
        return [Guard("window", metadata.window, lambda: self.window)]


def attend_ragged_swa(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, metadata: RaggedSwaMetadata, scale: float
) -> Tensor:
    """Attention over each token's list: query [T, Hq, D] -> [T, Hq, D]."""
    return sparse_attention(query, key_cache, value_cache, metadata.swa_indices, metadata.swa_indptr, scale)
