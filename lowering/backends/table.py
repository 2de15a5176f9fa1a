"""The backends that come with draftfuse, one row each. A probe looks at this machine without importing a library."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch

from draftfuse.lowering.backends import flashinfer
from draftfuse.lowering.backends.dcp import DcpBuilder
from draftfuse.lowering.backends.flash_attn3 import FlashAttn3Builder, FlashAttnBuilder
from draftfuse.lowering.backends.indexer import IndexerBuilder, RegisteredIndexerBuilder
from draftfuse.lowering.backends.ops._vendors import LIBRARY_VARIABLE, has_op
from draftfuse.lowering.backends.paged import PagedBuilder, StaticBuilder
from draftfuse.lowering.backends.ragged_swa import RaggedSwaBuilder
from draftfuse.lowering.backends.registry import register_backend
from draftfuse.lowering.backends.sparse_swa import RegisteredSparseSwaBuilder, SparseSwaBuilder

Status = tuple[str, str]
INPUT_VIEWS = ("seq_lens", "slot_mapping")
SWA_FIELDS = ("is_valid", "token_to_req", "swa_lens", "swa_indices", "tile_scheduler", "index_cache")
INDEXER_FIELDS = ("slots", "request_ids", "lens", "schedule")


def own_kernel() -> Status:
    """A kernel of draftfuse's own: Triton on CUDA, ATen elsewhere."""
    if not torch.cuda.is_available():
        return "reference", "no CUDA device: the operator's ATen implementation stands in for its Triton kernel"
    if find_spec("triton") is None:
        return "split", "Triton is not installed: draftfuse.compile refuses loops on CUDA without it"
    return "fused", "draftfuse's Triton kernel"


def flash_attn3() -> Status:
    """The real library, or on the CPU its stand-in."""
    if not torch.cuda.is_available():
        return "reference", "no CUDA device: a stand-in plans and attends on the CPU"
    if os.environ.get(LIBRARY_VARIABLE) or has_op("_vllm_fa3_C", "fwd") or has_op("flash_attn_3", "fwd"):
        return "fused", "the FlashAttention 3 library that is loaded or named by path"
    installed = [name for name in ("vllm", "flash_attn_interface") if find_spec(name) is not None]
    if installed:
        return "fused", f"the FlashAttention 3 library of {installed[0]}"
    return "split", f"no FlashAttention 3: install vllm or flash-attn 3, or set {LIBRARY_VARIABLE}"


def flash_attn2() -> Status:
    """FlashAttention 2 of vLLM, FlashAttention 3 without a schedule, or the own kernel."""
    if torch.cuda.is_available() and find_spec("vllm") is not None:
        return "fused", "the FlashAttention library of vllm"
    reason = own_kernel()[1]
    return "reference", f"no FlashAttention 2 here: draftfuse's own kernel attends in its place ({reason})"


def flashinfer_status() -> Status:
    """Planner-free where that kernel applies."""
    if flashinfer.planner_free():
        return "fused", "sm_100: the planner-free decode kernel reads lengths and block table by itself"
    return "split", "its plan() reads seq_lens on the host at every step; the planner-free kernel needs sm_100"


def register_all() -> None:
    """Register every row, in the order in which they are listed."""
    register_backend(
        "flash_attn3",
        builder=FlashAttn3Builder,
        refresh="registered",
        refreshes=(*INPUT_VIEWS, "schedule"),
        buffers=("schedule (i32, 4 vectors of the request capacity and a counter; tail zeroed)",),
        frozen=("max_seq_len", "num_splits", "window"),
        kernel="draftfuse::fa3_schedule, draftfuse::fa3_attention over the library's operators",
        probe=flash_attn3,
    )
    register_backend(
        "flash_attn2",
        builder=FlashAttnBuilder,
        refresh="aliased",
        refreshes=INPUT_VIEWS,
        frozen=("max_seq_len",),
        kernel="draftfuse::flash_attention (FlashAttention 2, or 3 without a schedule made ahead)",
        probe=flash_attn2,
    )
    for name, kernel in (("triton_attention", "paged_attention"), ("triton_mla", "mla_attention")):
        register_backend(
            name,
            builder=PagedBuilder,
            refresh="aliased",
            refreshes=INPUT_VIEWS,
            frozen=("max_seq_len",),
            kernel=f"draftfuse::{kernel}",
            probe=own_kernel,
        )
    register_backend(
        "sparse_swa",
        builder=SparseSwaBuilder,
        refreshes=SWA_FIELDS,
        frozen=("window", "index_width"),
        kernel="draftfuse::sparse_attention",
        probe=own_kernel,
    )
    register_backend(
        "sparse_swa_registered",
        builder=RegisteredSparseSwaBuilder,
        refresh="registered",
        refreshes=SWA_FIELDS,
        buffers=("is_valid", "token_to_req", "swa_lens", "swa_indices"),
        frozen=("window", "index_width"),
        kernel="draftfuse::swa_refresh, draftfuse::sparse_attention",
        probe=own_kernel,
    )
    register_backend(
        "ragged_swa",
        builder=RaggedSwaBuilder,
        refreshes=("swa_indices", "swa_indptr", "swa_lens"),
        frozen=("window",),
        kernel="draftfuse::sparse_attention",
        probe=own_kernel,
    )
    register_backend(
        "sparse_mla_indexer",
        builder=IndexerBuilder,
        refreshes=INDEXER_FIELDS,
        frozen=("ratio", "processors"),
        kernel="draftfuse::index_logits, draftfuse::sparse_attention",
        probe=own_kernel,
    )
    register_backend(
        "sparse_mla_indexer_registered",
        builder=RegisteredIndexerBuilder,
        refresh="registered",
        refreshes=INDEXER_FIELDS,
        buffers=INDEXER_FIELDS,
        frozen=("ratio", "processors"),
        kernel="draftfuse::indexer_refresh, draftfuse::index_logits, draftfuse::sparse_attention",
        probe=own_kernel,
    )
    register_backend(
        "position_static",
        builder=StaticBuilder,
        refresh="static",
        frozen=("max_seq_len",),
        kernel="draftfuse::paged_attention over the target's KV",
        probe=own_kernel,
    )
    register_backend(
        "flashinfer",
        builder=flashinfer.flashinfer_builder,
        refresh=("host-planned", "registered"),
        refreshes=("kv_indptr", "kv_indices", "kv_last_page_len"),
        frozen=("max_seq_len",),
        kernel="draftfuse::planned_decode, draftfuse::planner_free_decode",
        probe=flashinfer_status,
    )
    register_backend(
        "dcp",
        builder=DcpBuilder,
        refreshes=("local_lens", "local_slots"),
        frozen=("dcp_world_size", "dcp_rank"),
        kernel="draftfuse::partial_attention on each rank, merge_partials over the ranks",
    )
    register_backend("other", builder=None, refresh=("derived", "host-planned"), kernel="the user's own", probe=other)


def other() -> Status:
    """Any builder that is not in the table."""
    return "fused", "derived where its build can be traced; else split, and the report names the builder and the line"
