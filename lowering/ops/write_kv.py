"""Write keys and values into a paged KV cache; negative slots write nothing.

Shape letters: T tokens, H KV heads, D head size, N blocks (pages), P slots a page.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftfuse.lowering.ops._library import (
    check_floating,
    check_same_device,
    check_same_dtype,
    check_size,
    check_tensor,
    define,
    fail,
    fake,
    implement,
    require_triton,
)


def _check(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    for name, tensor in (("key", key), ("value", value)):
        check_floating("write_kv", name, tensor, "T, H, D")
    for name, tensor in (("key_cache", key_cache), ("value_cache", value_cache)):
        check_floating("write_kv", name, tensor, "N, P, H, D")
    check_tensor("write_kv", "slot_mapping", slot_mapping, "T", torch.int64)
    check_same_dtype("write_kv", "key", key, "key_cache", key_cache)
    check_same_dtype("write_kv", "value", value, "value_cache", value_cache)


def _check_sizes(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    todo = "Pass one slot a token, and caches allocated for these heads."
    rows = (slot_mapping.shape[0], *key_cache.shape[2:])
    check_size("write_kv", "key does not fit slot_mapping and key_cache", tuple(key.shape), rows, todo)
    check_size("write_kv", "value differs from key in shape", tuple(value.shape), tuple(key.shape), todo)
    caches = "value_cache differs from key_cache in shape"
    check_size("write_kv", caches, tuple(value_cache.shape), tuple(key_cache.shape), todo)
    check_same_device(
        "write_kv", key_cache=key_cache, value_cache=value_cache, key=key, value=value, slot_mapping=slot_mapping
    )


def reference(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> tuple[Tensor, Tensor]:
    """What both caches hold afterwards: row t at block ``slot // P``, offset ``slot % P``, where ``slot >= 0``."""
    page = key_cache.shape[1]
    new_keys, new_values = key_cache.clone(), value_cache.clone()
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            new_keys[slot // page, slot % page] = key[token]
            new_values[slot // page, slot % page] = value[token]
    return new_keys, new_values


def _cpu(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    _check(key, value, key_cache, value_cache, slot_mapping)
    _check_sizes(key, value, key_cache, value_cache, slot_mapping)
    if slot_mapping.numel() == 0:
        return
    blocks, page = key_cache.shape[:2]
    smallest, largest = (int(bound) for bound in torch.aminmax(slot_mapping))  # on the CPU, reading it is free
    if largest >= blocks * page:
        todo = "Compute slots with compute_slot_mapping, from a block table of this cache."
        fail("write_kv", "a slot lies outside the cache", largest, f"slots < N * P = {blocks * page}", todo)
    if smallest < 0:
        tokens = torch.nonzero(slot_mapping >= 0).squeeze(1)
        key, value, slot_mapping = key[tokens], value[tokens], slot_mapping[tokens]
    where = (slot_mapping // page, slot_mapping % page)
    key_cache.index_put_(where, key)
    value_cache.index_put_(where, value)


def _cuda(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    _check(key, value, key_cache, value_cache, slot_mapping)
    _check_sizes(key, value, key_cache, value_cache, slot_mapping)
    require_triton("write_kv")
    from draftfuse.lowering.ops._write_kv_triton import launch

    launch(key, value, key_cache, value_cache, slot_mapping)


define("write_kv(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping) -> ()")
implement("write_kv", _cpu, "CPU")
implement("write_kv", _cuda, "CUDA")
fake("write_kv", _check)


def write_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write row t of ``key`` and ``value`` at slot ``slot_mapping[t]``: block ``slot // P``, offset ``slot % P``.

    A negative slot writes nothing: that is how padded rows and rows at ``max_model_len`` stay out of the cache. A slot
    past the cache raises on the CPU and writes nothing on CUDA, where checking it would be a host sync.

    Args:
        key, value: floating[T, H, D], any strides (slices of a fused projection will do).
        key_cache, value_cache: [N, P, H, D] of the same dtypes, any strides; written in place.
        slot_mapping: i64[T]; slots of one call are distinct, except negative ones.

    Raises:
        OpArgumentError: a dtype, dim, size or device is wrong, or (CPU) a slot lies outside the cache.
    """
    torch.ops.draftfuse.write_kv(key, value, key_cache, value_cache, slot_mapping)
