"""Every row of the backend table as a toy speculator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from draftfuse import backends as b
from draftfuse.ops import write_kv
from tests.lowering.backends.support import SMALL, Attend, Layer, Sizes, Toy, paged_layer

WINDOW, RATIO, PROCESSORS, TOPK = 6, 2, 3, 5


def latent_layer(q: Tensor, k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, metadata: Any) -> Tensor:
    """Latent KV: half of the one key head is the latent, half the rope key."""
    half = q.shape[-1] // 2
    write_kv(k, v, key_cache, value_cache, metadata.slot_mapping)
    out = b.attend_mla(q[..., :half], q[..., half:], key_cache[:, :, 0], metadata, q.shape[-1] ** -0.5)
    return torch.cat([out, out], dim=-1)


def static_layer(q: Tensor, k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, metadata: Any) -> Tensor:
    """A query over KV that somebody else wrote."""
    return b.attend_paged(q, key_cache, value_cache, metadata, q.shape[-1] ** -0.5)


def indexed_layer(q: Tensor, k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, metadata: Any) -> Tensor:
    """Compressed entries are written as they complete, scored by the indexer, and the best attended."""
    page = key_cache.shape[1] // RATIO
    keys, values = key_cache[:, :page], value_cache[:, :page]
    write_kv(k, v, keys, values, metadata.slots)
    weights = q[..., 0]
    slots, counts = b.select_slots(q, weights, keys[:, :, 0], metadata, TOPK)
    return b.sparse_attention(q, keys, values, slots, counts, q.shape[-1] ** -0.5)


def planned_layer(q: Tensor, k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, metadata: Any) -> Tensor:
    """By a host plan."""
    return paged_layer(b.attend_planned)(q, k, v, key_cache, value_cache, metadata)


def flash_attn3(z: Sizes) -> b.FlashAttn3Builder:
    return b.FlashAttn3Builder(z.heads, z.kv_heads, z.size, z.dtype, z.max_reqs, device=z.device)


def registered_swa(z: Sizes) -> b.RegisteredSparseSwaBuilder:
    return b.RegisteredSparseSwaBuilder(WINDOW, z.max_tokens, device=z.device)


def registered_indexer(z: Sizes) -> b.RegisteredIndexerBuilder:
    return b.RegisteredIndexerBuilder(RATIO, PROCESSORS, z.max_reqs, z.max_tokens, z.device)


ROWS: dict[str, tuple[Callable[[Sizes], Any], Attend]] = {
    "flash_attn3": (flash_attn3, paged_layer(b.attend_fa3)),
    "flash_attn2": (lambda z: b.FlashAttnBuilder(), paged_layer(b.attend_flash)),
    "triton_attention": (lambda z: b.PagedBuilder(), paged_layer(b.attend_paged)),
    "triton_mla": (lambda z: b.PagedBuilder(), latent_layer),
    "sparse_swa": (lambda z: b.SparseSwaBuilder(WINDOW), paged_layer(b.attend_sparse_swa)),
    "sparse_swa_registered": (registered_swa, paged_layer(b.attend_sparse_swa)),
    "ragged_swa": (lambda z: b.RaggedSwaBuilder(WINDOW), paged_layer(b.attend_ragged_swa)),
    "sparse_mla_indexer": (lambda z: b.IndexerBuilder(RATIO, PROCESSORS), indexed_layer),
    "sparse_mla_indexer_registered": (registered_indexer, indexed_layer),
}


def layer_of(name: str, sizes: Sizes = SMALL) -> Layer:
    """The layer of one row."""
    builder, attend = ROWS[name]
    return Layer(builder(sizes), attend)


def make(*names: str, sizes: Sizes = SMALL, **options: Any) -> Toy:
    """A toy with one layer for each named row."""
    return Toy([layer_of(name, sizes) for name in names], sizes, **options)
