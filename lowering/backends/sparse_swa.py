"""Sparse sliding-window attention as in DeepSeek V4: every token names the slots of its window.

:class:`SparseSwaBuilder` is plain PyTorch, and its refresh is derived; the registered one keeps persistent
buffers and refreshes them with one kernel. Both re-make the tile scheduler, which is planned by the first attention
call of a step, and the cache of prepared indices, which ``forward`` fills: neither may outlive its step.

Shape letters: R requests (rows), T tokens, W index columns, Hq query heads, H KV heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftfuse.lowering.backends.ops.sparse_attention import TILE, plan_tiles, sparse_attention
from draftfuse.lowering.backends.ops.swa_refresh import reference as swa_fields
from draftfuse.lowering.backends.ops.swa_refresh import swa_refresh
from draftfuse.speculator import CommonMetadata, Guard


@dataclass
class TileScheduler:
    """Planned lazily, by the first attention call that uses it; good for the lengths of that step alone."""

    tiles: Tensor | None = None  # i32[T]

    def plan(self, lens: Tensor) -> Tensor:
        """The plan for ``lens``, made once."""
        if self.tiles is None:
            self.tiles = plan_tiles(lens)
        return self.tiles


@dataclass
class SparseSwaMetadata:
    """What sparse sliding-window attention reads at one draft step."""

    slot_mapping: Tensor  # i64[T]
    is_valid: Tensor  # bool[T]
    token_to_req: Tensor  # i32[T]
    swa_lens: Tensor  # i32[T]
    swa_indices: Tensor  # i32[T, W], -1 past the window
    window: int
    width: int
    tile_scheduler: TileScheduler
    index_cache: dict[str, Tensor]  # filled by ``prepared_indices``


class SparseSwaBuilder:
    """Derived: plain PyTorch, nothing to refresh by hand.

    Args:
        window: how many positions a token attends, its own included.
        width: index columns, at least ``window``; a multiple of the kernel's tile by default.
    """

    def __init__(self, window: int, width: int | None = None) -> None:
        self.window = window
        self.width = -(-window // TILE) * TILE if width is None else width

    def build(self, common: CommonMetadata) -> SparseSwaMetadata:
        """Validity, rows, lengths and slots of every token's window."""
        is_valid, rows, lens, indices = swa_fields(
            common.slot_mapping,
            common.seq_lens,
            common.query_start_loc,
            common.block_table,
            self.width,
            self.window,
            common.page_size,
        )
        fields = (common.slot_mapping, is_valid, rows, lens, indices, self.window, self.width)
        return SparseSwaMetadata(*fields, TileScheduler(), {})

    def guards(self, metadata: SparseSwaMetadata) -> Sequence[Guard]:
        """Window and index width, which sizes in the captured graph depend on."""
        return [
            Guard("window", metadata.window, lambda: self.window),
            Guard("index_width", metadata.width, lambda: self.width),
        ]


class RegisteredSparseSwaBuilder(SparseSwaBuilder):
    """Registered: one kernel writes persistent buffers of fixed capacity.

    Args:
        window, width: as in :class:`SparseSwaBuilder`.
        max_num_tokens: the largest batch, prefill included.
        device: where the buffers live.
    """

    def __init__(
        self, window: int, max_num_tokens: int, width: int | None = None, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(window, width)
        size = max_num_tokens + 1  # a slice as long as its buffer would be a trace of its own
        self.is_valid = torch.zeros(size, dtype=torch.bool, device=device)
        self.token_to_req = torch.zeros(size, dtype=torch.int32, device=device)
        self.swa_lens = torch.zeros(size, dtype=torch.int32, device=device)
        self.swa_indices = torch.full((size, self.width), -1, dtype=torch.int32, device=device)

    def build(self, common: CommonMetadata) -> SparseSwaMetadata:
        """Views of the persistent buffers; the loop refreshes them before each decode step, this at prefill."""
        n = common.num_tokens
        metadata = SparseSwaMetadata(
            common.slot_mapping,
            self.is_valid[:n],
            self.token_to_req[:n],
            self.swa_lens[:n],
            self.swa_indices[:n],
            self.window,
            self.width,
            TileScheduler(),
            {},
        )
        if common.draft_step == 0:
            self.refresh(metadata, common)
        return metadata

    def refresh(self, metadata: SparseSwaMetadata, common: CommonMetadata) -> None:
        """Write the buffers for ``common``."""
        swa_refresh(
            common.slot_mapping,
            common.seq_lens,
            common.query_start_loc,
            common.block_table,
            metadata.is_valid,
            metadata.token_to_req,
            metadata.swa_lens,
            metadata.swa_indices,
            self.window,
            common.page_size,
        )

    def invalidate(self, metadata: SparseSwaMetadata) -> None:
        """Drop what ``forward`` derived from the last step's values."""
        metadata.tile_scheduler = TileScheduler()
        metadata.index_cache = {}


def prepared_indices(metadata: SparseSwaMetadata) -> Tensor:
    """The index rows as the kernel wants them, prepared once a step and shared by all layers."""
    if "indices" not in metadata.index_cache:
        rest = -metadata.width % TILE
        metadata.index_cache["indices"] = torch.nn.functional.pad(metadata.swa_indices, (0, rest), value=-1)
    return metadata.index_cache["indices"]


def attend_sparse_swa(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, metadata: SparseSwaMetadata, scale: float
) -> Tensor:
    """Attention over each token's window: query [T, Hq, D] -> [T, Hq, D]."""
    tiles = metadata.tile_scheduler.plan(metadata.swa_lens)
    return sparse_attention(query, key_cache, value_cache, prepared_indices(metadata), metadata.swa_lens, scale, tiles)
