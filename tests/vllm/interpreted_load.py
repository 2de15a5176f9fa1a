"""Kernels of draftfuse.vllm under Triton's interpreter against references; test_load.py runs this in a process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftfuse.vllm import _load_triton as kernels
from draftfuse.vllm.load import reference, turn_reference

CAPACITY, TOKENS = 6, 160


def written() -> tuple[Tensor, ...]:
    def full(size: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.full((size,), 77, dtype=dtype)

    wide, rows = torch.int64, CAPACITY
    step = torch.tensor(9)
    tokens = (full(TOKENS), full(TOKENS, wide), full(rows + 1), full(rows))
    sampling = (full(rows), full(rows, torch.float32), full(rows, wide), full(rows), full(1))
    return (full(rows, wide), step, *tokens, *sampling)


def read(lengths: list[int], seed: int) -> tuple[Tensor, ...]:
    make = torch.Generator().manual_seed(seed)

    def some(size: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.randint(0, 1000, (size,), generator=make).to(dtype)

    rows, tokens = len(lengths), sum(lengths)
    rejected = torch.tensor([int(torch.randint(0, n, (1,), generator=make)) for n in lengths]).int()
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    index, sampled = torch.randperm(CAPACITY, generator=make)[:rows].int(), torch.arange(rows).int() % 2
    batch = (some(tokens), some(tokens, torch.int64), index, some(CAPACITY, torch.int64)[:, None], some(CAPACITY))
    sampling = (torch.rand(CAPACITY, generator=make), some(CAPACITY, torch.int64))
    return (*batch, sampled, rejected, starts, some(rows), *sampling)


@pytest.mark.parametrize("pads", [False, True])
@pytest.mark.parametrize("lengths", [[1], [4, 4, 4], [130, 1, 7], [2] * CAPACITY])
def test_load(lengths: list[int], pads: bool) -> None:
    batch, expected, got = read(lengths, 3), written(), written()
    reference(expected, batch, len(lengths), pads)
    assert kernels.launch_load(got, batch, len(lengths), pads) is None, "the interpreter compiles nothing"
    for left, right in zip(got, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=0)


@pytest.mark.parametrize("advances", [False, True])
@pytest.mark.parametrize("live", [0, 1, 4, 130, 200])
def test_turn(live: int, advances: bool) -> None:
    make = torch.Generator().manual_seed(live)

    def tensors() -> tuple[Tensor, ...]:
        rows = [torch.randint(0, 60, (200,), generator=make.manual_seed(i)) for i in range(4)]
        drafts = torch.randint(0, 99, (200, 3), generator=make.manual_seed(9))
        ids, starts = rows[0].int(), torch.full((201,), 7, dtype=torch.int32)
        return drafts, (rows[1] % 4).int(), torch.tensor([live]).int(), ids, rows[2], starts, rows[3].int()

    expected, got = tensors(), tensors()
    turn_reference(expected, 50, advances)
    kernels.launch_turn(got, 50, advances)
    for left, right in zip(got, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=0)
