"""FlashInfer: its planned decode (the host plans each step, so it runs split) and its planner-free decode on sm_100.

Shape letters: R requests (rows, one query token each), Hq query heads, H KV heads, D head size, C capacity of indices.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from draftfuse.lowering.backends.ops.flashinfer_decode import planned_decode, planner_free_decode
from draftfuse.lowering.backends.paged import PagedBuilder, PagedMetadata
from draftfuse.speculator import CommonMetadata


@dataclass
class PlannedMetadata:
    """A plan that the host made for the lengths of one step."""

    kv_indptr: Tensor  # i32[R+1], pages
    kv_indices: Tensor  # i32[C], pages of all rows one behind the other
    kv_last_page_len: Tensor  # i32[R]
    slot_mapping: Tensor  # i64[T]


class PlannedFlashInferBuilder:
    """Host-planned: ``build`` reads seq_lens on the CPU, so this loop never fuses."""

    refresh_kind = "host-planned"

    def build(self, common: CommonMetadata) -> PlannedMetadata:
        """Plan for the lengths of now."""
        lens = common.seq_lens.tolist()
        page, table, device = common.page_size, common.block_table, common.seq_lens.device
        pages = [-(-n // page) for n in lens]
        indptr = torch.tensor([0, *pages], dtype=torch.int32).cumsum(0).to(torch.int32)
        indices = torch.zeros(table.numel(), dtype=torch.int32, device=device)
        for row, count in enumerate(pages):
            indices[int(indptr[row]) : int(indptr[row]) + count] = table[row, :count]
        last = torch.tensor([(n - 1) % page + 1 if n else 0 for n in lens], dtype=torch.int32)
        return PlannedMetadata(indptr.to(device), indices, last.to(device), common.slot_mapping)


class PlannerFreeFlashInferBuilder(PagedBuilder):
    """Registered, on sm_100: that kernel reads lengths and block table itself, so its refresh has nothing to write."""

    def refresh(self, metadata: PagedMetadata, common: CommonMetadata) -> None:
        """Nothing: every field is a view of the persistent inputs."""


def planner_free() -> bool:
    """Whether the planner-free decode kernel applies here."""
    if find_spec("flashinfer") is None or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability() == (10, 0)


def flashinfer_builder() -> PlannedFlashInferBuilder | PlannerFreeFlashInferBuilder:
    """The builder that suits this machine."""
    return PlannerFreeFlashInferBuilder() if planner_free() else PlannedFlashInferBuilder()


def attend_planned(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, metadata: PlannedMetadata, scale: float
) -> Tensor:
    """Decode attention by a host plan: query [R, Hq, D] -> [R, Hq, D]."""
    plan = (metadata.kv_indptr, metadata.kv_indices, metadata.kv_last_page_len)
    return planned_decode(query, key_cache, value_cache, *plan, scale)


def attend_planner_free(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, metadata: PagedMetadata, scale: float
) -> Tensor:
    """Decode attention without a plan: query [R, Hq, D] -> [R, Hq, D]."""
    tables = (metadata.block_table, metadata.seq_lens)
    return planner_free_decode(query, key_cache, value_cache, *tables, scale, metadata.max_seq_len)
