"""Launch sizes of the Triton kernels of ``paged_attention``, from host sizes alone: no tensor data, no sync.

Q query tokens a block, M rows of a matrix product (Q tokens of a group of heads), N KV positions and D elements a tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PROGRAMS_PER_SM = 3  # enough to hide a tile's latency; more only adds work to the reduction
SMALL_HEAD = 64  # elements
MAX_SPLITS = 64
TILE_BYTES = 16384  # of one K or V tile: BLOCK_N is 64 for 128 bf16 elements a head
STAGES = 4  # the page table takes one, so two K and two V tiles are in flight; three programs fit a Hopper SM


@dataclass(frozen=True)
class Plan:
    """Launch sizes of the kernels."""

    block_q: int
    block_m: int
    block_n: int
    block_d: int
    q_blocks: int
    splits: int
    early: bool  # whether its programs may start before the kernel in front of it ends


def next_power_of_2(size: int) -> int:
    """The smallest power of two that is at least ``size`` (1 for 1 or less)."""
    return 1 << max(0, size - 1).bit_length()


def plan(query: Tensor, key_cache: Tensor, blocks: int, rows: int, ragged: bool, window: int, sms: int) -> Plan:
    """Choose tile sizes and the number of splits; ``blocks`` is the width of the block table.

    Programs of large heads should all run at once, and start on idle SMs: a few left over for a second round, and
    others squeezed in beside the kernel in front, leave bandwidth unused (on an H200, 4 requests of 8,192 tokens, 8 KV
    heads of 128: 49 us, then 45; 64 requests: 511, then 496). Those of small heads are too short for that to matter.
    """
    tokens, heads, head_size = query.shape
    _, page, kv_heads, _ = key_cache.shape
    group = heads // kv_heads
    block_d = max(16, next_power_of_2(head_size))
    block_n = max(16, min(128, TILE_BYTES // (block_d * query.element_size())))
    mean_queries = next_power_of_2(max(1, -(-tokens // max(1, rows))))
    block_q = min(mean_queries, max(1, 64 // group)) if ragged else 1
    q_blocks = tokens // block_q + rows if ragged else rows
    longest = min(blocks * page, window + block_q + block_n) if window else blocks * page
    early = head_size <= SMALL_HEAD
    room, needed = PROGRAMS_PER_SM * sms, max(1, q_blocks * kv_heads)
    wanted = -(-room // needed) if early else room // needed
    splits = max(1, min(wanted, -(-longest // block_n), MAX_SPLITS))
    block_m = max(16, next_power_of_2(block_q * group))
    return Plan(block_q, block_m, block_n, block_d, q_blocks, splits, early)


def hardware(device: torch.device) -> tuple[int, int]:
    """Number of SMs and pipeline stages; cached by PyTorch, no sync."""
    if device.type != "cuda":
        return 4, 1
    properties = torch.cuda.get_device_properties(device)
    shared_memory: int = getattr(properties, "shared_memory_per_block_optin", 0)
    return properties.multi_processor_count, STAGES if shared_memory >= 9 * TILE_BYTES else 2
