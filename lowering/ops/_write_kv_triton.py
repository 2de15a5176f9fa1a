"""Triton kernel of ``write_kv``: one program copies the key and the value of one token.

Imported only by the CUDA implementation, and by tests under Triton's interpreter.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from draftfuse.lowering.ops._dependent_launch import dependent_launch


@triton.jit  # type: ignore[untyped-decorator]
def _write_kv(
    key: tl.tensor,
    value: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    slot_mapping: tl.tensor,
    capacity: tl.tensor,
    key_t: tl.tensor,
    key_h: tl.tensor,
    key_d: tl.tensor,
    value_t: tl.tensor,
    value_h: tl.tensor,
    value_d: tl.tensor,
    key_cache_n: tl.tensor,
    key_cache_p: tl.tensor,
    key_cache_h: tl.tensor,
    key_cache_d: tl.tensor,
    value_cache_n: tl.tensor,
    value_cache_p: tl.tensor,
    value_cache_h: tl.tensor,
    value_cache_d: tl.tensor,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if (slot >= 0) & (slot < capacity):
        block = slot // PAGE
        offset = slot % PAGE
        element = tl.arange(0, BLOCK)
        head = element // HEAD_SIZE
        d = element % HEAD_SIZE
        mask = element < HEADS * HEAD_SIZE
        k = tl.load(key + token * key_t + head * key_h + d * key_d, mask=mask)
        v = tl.load(value + token * value_t + head * value_h + d * value_d, mask=mask)
        to_key = block * key_cache_n + offset * key_cache_p
        to_value = block * value_cache_n + offset * value_cache_p
        tl.store(key_cache + to_key + head * key_cache_h + d * key_cache_d, k, mask=mask)
        tl.store(value_cache + to_value + head * value_cache_h + d * value_cache_d, v, mask=mask)


def launch(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Launch on checked arguments; no sync, no allocation, so safe in capture."""
    blocks, page, heads, head_size = key_cache.shape
    tokens = slot_mapping.shape[0]
    if tokens == 0:
        return
    block = triton.next_power_of_2(heads * head_size)
    _write_kv[(tokens,)](
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping.contiguous(),
        blocks * page,
        *key.stride(),
        *value.stride(),
        *key_cache.stride(),
        *value_cache.stride(),
        PAGE=page,
        HEADS=heads,
        HEAD_SIZE=head_size,
        BLOCK=block,
        num_warps=max(1, min(8, block // 256)),
        **dependent_launch(key.device),
    )
