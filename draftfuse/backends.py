"""Attention backends: the table, ``register_backend`` for new ones, the builders and attention calls of each row."""

from __future__ import annotations

from draftfuse.lowering.backends import Backend, backends, get_backend, register_backend, unregister_backend
from draftfuse.lowering.backends.dcp import DcpBuilder, UnsupportedDcpBuilder, attend_share, merge_partials
from draftfuse.lowering.backends.flash_attn3 import FlashAttn3Builder, FlashAttnBuilder, attend_fa3, attend_flash
from draftfuse.lowering.backends.flashinfer import (
    PlannedFlashInferBuilder,
    PlannerFreeFlashInferBuilder,
    attend_planned,
    attend_planner_free,
    flashinfer_builder,
)
from draftfuse.lowering.backends.indexer import IndexerBuilder, RegisteredIndexerBuilder, select_slots
from draftfuse.lowering.backends.ops.mla_attention import mla_attention
from draftfuse.lowering.backends.ops.sparse_attention import sparse_attention
from draftfuse.lowering.backends.paged import PagedBuilder, StaticBuilder, attend_mla, attend_paged
from draftfuse.lowering.backends.ragged_swa import RaggedSwaBuilder, attend_ragged_swa
from draftfuse.lowering.backends.sparse_swa import RegisteredSparseSwaBuilder, SparseSwaBuilder, attend_sparse_swa

__all__ = [
    "Backend",
    "DcpBuilder",
    "FlashAttn3Builder",
    "FlashAttnBuilder",
    "IndexerBuilder",
    "PagedBuilder",
    "PlannedFlashInferBuilder",
    "PlannerFreeFlashInferBuilder",
    "RaggedSwaBuilder",
    "RegisteredIndexerBuilder",
    "RegisteredSparseSwaBuilder",
    "SparseSwaBuilder",
    "StaticBuilder",
    "UnsupportedDcpBuilder",
    "attend_fa3",
    "attend_flash",
    "attend_mla",
    "attend_paged",
    "attend_planned",
    "attend_planner_free",
    "attend_ragged_swa",
    "attend_share",
    "attend_sparse_swa",
    "backends",
    "flashinfer_builder",
    "get_backend",
    "merge_partials",
    "mla_attention",
    "register_backend",
    "select_slots",
    "sparse_attention",
    "unregister_backend",
]
