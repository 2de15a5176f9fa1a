"""Arguments for the operators of the backends, shared by the CPU tests and those of the Triton kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from draftfuse.lowering.backends.ops.index_logits import plan_schedule
from draftfuse.lowering.backends.ops.sparse_attention import plan_tiles

LENS, PAGE, WIDTH = [9, 0, 4, 22], 4, 6


def table_of(rows: int, width: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return (torch.randperm(rows * width, generator=generator).view(rows, width) + 1).to(torch.int32)


def paged(dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(query, key_cache, value_cache, block_table, seq_lens) with a padded row."""
    torch.manual_seed(0)
    pool = torch.randn(2, 4 * WIDTH + 1, PAGE, 2, 16).to(dtype).to(device)
    query = torch.randn(4, 4, 16).to(dtype).to(device)
    return query, pool[0], pool[1], table_of(4, WIDTH).to(device), torch.tensor(LENS, dtype=torch.int32, device=device)


def mla(
    dtype: torch.dtype = torch.float32, device: str = "cpu", heads: int = 5, latent: int = 16, rope: int = 8
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(q_nope, q_rope, latent_cache, block_table, seq_lens)."""
    torch.manual_seed(0)
    cache = torch.randn(4 * WIDTH + 1, PAGE, latent + rope).to(dtype).to(device)
    q_nope, q_rope = (torch.randn(4, heads, n).to(dtype).to(device) for n in (latent, rope))
    return q_nope, q_rope, cache, table_of(4, WIDTH).to(device), torch.tensor(LENS, dtype=torch.int32, device=device)


def sparse(
    ragged: bool, planned: bool, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """(query, key_cache, value_cache, indices, lens or indptr, tiles); lists of 0 to 100 slots, some entries -1."""
    torch.manual_seed(0)
    pool, query = torch.randn(2, 30, PAGE, 2, 16).to(dtype), torch.randn(4, 4, 16).to(dtype)
    counts = torch.tensor([100, 0, 7, 65])
    lists = torch.stack([torch.randperm(120)[:100] for _ in range(4)])
    lists[:, 3] = -1
    if ragged:
        indices = torch.cat(
            [row[:n] for row, n in zip(lists, counts.tolist(), strict=True)] + [lists.new_full((28,), -1)]
        )
        lens = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    else:
        indices, lens = lists, counts
    tiles = plan_tiles(counts) if planned else None
    moved = [t.to(device) for t in (query, pool[0], pool[1], indices.to(torch.int32), lens.to(torch.int32))]
    return (*moved, None if tiles is None else tiles.to(device))  # type: ignore[return-value]


def index(device: str = "cpu") -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(query, weights, key_cache, block_table, lens, schedule); rows of up to three units."""
    torch.manual_seed(0)
    lens = torch.tensor([130, 0, 7, 64], dtype=torch.int32)
    cache = torch.randn(4 * 18 + 1, 8, 16)
    tensors = (torch.randn(4, 3, 16), torch.randn(4, 3), cache, table_of(4, 18), lens, plan_schedule(lens, 3))
    return tuple(t.to(device) for t in tensors)  # type: ignore[return-value]


def swa_refresh(device: str = "cpu") -> tuple[Any, ...]:
    """A ragged batch: 1, 0, 3 and 2 tokens, the last of them padding."""
    starts = torch.tensor([0, 1, 1, 4, 6], dtype=torch.int32)
    slots = torch.tensor([5, 9, 10, 11, -1, -1])
    outputs = [torch.ones(6, dtype=torch.bool), *(torch.full((6,), 7, dtype=torch.int32) for _ in range(2))]
    tensors = [slots, torch.tensor(LENS, dtype=torch.int32), starts, table_of(4, WIDTH), *outputs]
    tensors.append(torch.full((6, 12), 7, dtype=torch.int32))
    return (*(t.to(device) for t in tensors), 5, PAGE)


def indexer_refresh(device: str = "cpu") -> tuple[Any, ...]:
    """The same batch, compressed two to one."""
    slots, lens, starts = swa_refresh()[:3]
    positions = torch.tensor([8, 1, 2, 3, 0, 0])
    outputs = [torch.full((6,), 7), torch.full((6,), 7, dtype=torch.int32), torch.full((4,), 7, dtype=torch.int32)]
    tensors = [slots, positions, lens, starts, *outputs, torch.full((4, 2), 7, dtype=torch.int32)]
    return (*(t.to(device) for t in tensors), 2)


def fa3_schedule() -> tuple[Any, ...]:
    lens, starts = torch.tensor(LENS, dtype=torch.int32), torch.arange(5, dtype=torch.int32)
    return lens, starts, torch.zeros(17, dtype=torch.int32), 1, 24, 4, 2, 16, PAGE, 0, 0, torch.float32


def fa3_attention() -> tuple[Any, ...]:
    tensors, starts = paged(), torch.arange(5, dtype=torch.int32)
    return *tensors, starts, torch.ones(17, dtype=torch.int32), torch.zeros_like(tensors[0]), 0.3, 1, 24, 0, 0


def planned() -> tuple[Any, ...]:
    query, keys, values, table, lens = paged()
    pages = (lens + PAGE - 1) // PAGE
    indptr = torch.cat([pages.new_zeros(1), pages.cumsum(0).to(torch.int32)])
    last = torch.where(lens > 0, (lens - 1) % PAGE + 1, 0).to(torch.int32)
    return query, keys, values, indptr, table.flatten(), last, 0.3


OPCHECKS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "mla_attention": lambda: (*mla(), 0.3),
    "sparse_attention": lambda: (*sparse(False, True), 0.3),
    "swa_refresh": swa_refresh,
    "indexer_refresh": indexer_refresh,
    "index_logits": index,
    "partial_attention": lambda: (*paged(), 0.3),
    "flash_attention": lambda: (*paged(), torch.arange(5, dtype=torch.int32), 0.3, 1, 24),
    "fa3_schedule": fa3_schedule,
    "fa3_attention": fa3_attention,
    "planned_decode": planned,
    "planner_free_decode": lambda: (*paged(), 0.3, 24),
}
