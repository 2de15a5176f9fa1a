"""write_kv: equals its reference, keeps padded rows out, and names what is wrong with its arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from draftfuse.errors import OpArgumentError
from draftfuse.ops import write_kv

BLOCKS, PAGE, HEADS, SIZE = 5, 4, 2, 8


def arguments(slots: list[int], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    fused = torch.randn(len(slots), 3, HEADS, SIZE, generator=generator).to(dtype)
    pool = torch.randn(BLOCKS, 2, PAGE, HEADS, SIZE, generator=generator).to(dtype)
    return fused[:, 1], fused[:, 2], pool[:, 0], pool[:, 1], torch.tensor(slots, dtype=torch.int64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "slots",
    [[], [0], [-1], [-1, -7], [3, 4], [PAGE - 1, PAGE], [19, 0, -1, 7], [BLOCKS * PAGE - 1]],
    ids=str,
)
def test_equals_reference(slots: list[int], dtype: torch.dtype) -> None:
    from draftfuse.lowering.ops.write_kv import reference

    key, value, key_cache, value_cache, mapping = arguments(slots, dtype)
    expected = reference(key, value, key_cache, value_cache, mapping)
    write_kv(key, value, key_cache, value_cache, mapping)
    assert torch.equal(key_cache, expected[0])
    assert torch.equal(value_cache, expected[1])


def test_negative_slot_leaves_the_last_slot_alone() -> None:
    key, value, key_cache, value_cache, mapping = arguments([-1, -1])
    before = key_cache.clone(), value_cache.clone()
    write_kv(key, value, key_cache, value_cache, mapping)
    assert torch.equal(key_cache, before[0])
    assert torch.equal(value_cache, before[1])


def test_writes_in_place_through_views() -> None:
    key, value, key_cache, value_cache, mapping = arguments([6])
    address = key_cache.data_ptr()
    write_kv(key, value, key_cache, value_cache, mapping)
    assert key_cache.data_ptr() == address
    assert torch.equal(key_cache[1, 2], key[0])
    assert torch.equal(value_cache[1, 2], value[0])


def test_opcheck() -> None:
    torch.library.opcheck(torch.ops.draftfuse.write_kv.default, arguments([3, -1, 8]))


def broken(change: str) -> tuple[Any, ...]:
    key, value, key_cache, value_cache, mapping = arguments([0, 1])
    if change == "dim":
        return key[0], value, key_cache, value_cache, mapping
    if change == "integer key":
        return key.long(), value, key_cache, value_cache, mapping
    if change == "slot dtype":
        return key, value, key_cache, value_cache, mapping.int()
    if change == "cache dtype":
        return key, value, key_cache.half(), value_cache, mapping
    if change == "rows":
        return key, value, key_cache, value_cache, mapping[:1]
    if change == "value shape":
        return key, value[:, :1], key_cache, value_cache, mapping
    if change == "cache shape":
        return key, value, key_cache, value_cache[1:], mapping
    return key, value, key_cache, value_cache, mapping + BLOCKS * PAGE - 1


@pytest.mark.parametrize(
    ("change", "what", "came", "expected"),
    [
        ("dim", "key has 2 dims", (2, 8), "[T, H, D]"),
        ("integer key", "key has a wrong dtype", torch.int64, "a floating dtype"),
        ("slot dtype", "slot_mapping has a wrong dtype", torch.int32, "torch.int64"),
        ("cache dtype", "key and key_cache differ in dtype", torch.float32, torch.float16),
        ("rows", "key does not fit slot_mapping and key_cache", (2, 2, 8), (1, 2, 8)),
        ("value shape", "value differs from key in shape", (2, 1, 8), (2, 2, 8)),
        ("cache shape", "value_cache differs from key_cache in shape", (4, 4, 2, 8), (5, 4, 2, 8)),
        ("slot range", "a slot lies outside the cache", 20, "slots < N * P = 20"),
    ],
)
def test_errors(change: str, what: str, came: object, expected: object) -> None:
    with pytest.raises(OpArgumentError) as caught:
        write_kv(*broken(change))
    assert caught.value.what == f"draftfuse.ops.write_kv: {what}"
    assert (caught.value.came, caught.value.expected) == (came, expected)
    assert caught.value.todo


def test_device_error() -> None:
    from draftfuse.lowering.ops.write_kv import _check_sizes

    key, value, key_cache, value_cache, mapping = arguments([0])
    with pytest.raises(OpArgumentError) as caught:
        _check_sizes(key, value, key_cache, value_cache, mapping.to("meta"))
    assert (caught.value.came, caught.value.expected) == (torch.device("meta"), torch.device("cpu"))
