"""Every row of the backend table as a toy speculator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from draftfuse import backends as b
from draftfuse.backends import mla_attention
from draftfuse.ops import write_kv
from tests.lowering.backends.support import (
    HEADS,
    KV_HEADS,
    MAX_REQS,
    PAGE,
    SCALE,
    SIZE,
    STEPS,
    Attend,
    Layer,
    Toy,
    paged_layer,
)

TOKENS = MAX_REQS * (STEPS + 1)
WINDOW, RATIO, PROCESSORS, TOPK = 6, 2, 3, 5


def latent_layer(q: Tensor, k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, metadata: Any) -> Tensor:
    """Latent KV: half of the one key head is the latent, half the rope key."""
    half = SIZE // 2
    write_kv(k, v, key_cache, value_cache, metadata.slot_mapping)
    out = b.attend_mla(q[..., :half], q[..., half:], key_cache[:, :, 0], metadata, SCALE)
    return torch.cat([out, out], dim=-1)


def static_layer(q: Tensor, k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, metadata: Any) -> Tensor:
    """A query over KV that somebody else wrote."""
    return b.attend_paged(q, key_cache, value_cache, metadata, SCALE)


def indexed_layer(q: Tensor, k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, metadata: Any) -> Tensor:
    """Compressed entries are written as they complete, scored by the indexer, and the best attended."""
    pages, page = key_cache.shape[0], PAGE // RATIO
    keys, values = (c.view(pages, PAGE, KV_HEADS, SIZE)[:, :page] for c in (key_cache, value_cache))
    write_kv(k, v, keys, values, metadata.slots)
    weights = q[..., 0]
    slots, counts = b.select_slots(q, weights, keys[:, :, 0], metadata, TOPK)
    return b.sparse_attention(q, keys, values, slots, counts, SCALE)


def planned_layer(q: Tensor, k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, metadata: Any) -> Tensor:
    """By a host plan."""
    return paged_layer(b.attend_planned)(q, k, v, key_cache, value_cache, metadata)


def flash_attn3() -> b.FlashAttn3Builder:
    return b.FlashAttn3Builder(HEADS, KV_HEADS, SIZE, torch.float32, MAX_REQS)


def registered_indexer() -> b.RegisteredIndexerBuilder:
    return b.RegisteredIndexerBuilder(RATIO, PROCESSORS, MAX_REQS, TOKENS)


ROWS: dict[str, tuple[Callable[[], Any], Attend]] = {
    "flash_attn3": (flash_attn3, paged_layer(b.attend_fa3)),
    "flash_attn2": (b.FlashAttnBuilder, paged_layer(b.attend_flash)),
    "triton_attention": (b.PagedBuilder, paged_layer(b.attend_paged)),
    "triton_mla": (b.PagedBuilder, latent_layer),
    "sparse_swa": (lambda: b.SparseSwaBuilder(WINDOW), paged_layer(b.attend_sparse_swa)),
    "sparse_swa_registered": (
        lambda: b.RegisteredSparseSwaBuilder(WINDOW, TOKENS),
        paged_layer(b.attend_sparse_swa),
    ),
    "ragged_swa": (lambda: b.RaggedSwaBuilder(WINDOW), paged_layer(b.attend_ragged_swa)),
    "sparse_mla_indexer": (lambda: b.IndexerBuilder(RATIO, PROCESSORS), indexed_layer),
    "sparse_mla_indexer_registered": (registered_indexer, indexed_layer),
}


def make(*names: str, **options: Any) -> Toy:
    """A toy with one layer for each named row."""
    return Toy([Layer(ROWS[name][0](), ROWS[name][1]) for name in names], **options)


__all__ = ["ROWS", "make", "mla_attention", "planned_layer", "static_layer"]
