"""The operators on a GPU: equal to the CPU's, safe in capture, right when a replay sees other lengths."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftfuse.ops import advance_positions, compute_slot_mapping, gumbel_sample, paged_attention, store, write_kv

pytestmark = pytest.mark.cuda
SCALE = 0.1


def batch(
    rows: int, width: int, dtype: torch.dtype, starts: list[int] | None, longest: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    pool = torch.randn(rows * width, 2, 16, 8, 128).to(dtype)
    table = torch.randperm(rows * width).view(rows, width).int()
    lens = torch.randint(8, longest + 1, (rows,)).int()
    lens[1], lens[0] = 0, longest
    query = torch.randn(rows if starts is None else starts[-1], 3, 32, 128).to(dtype)[:, 1]
    query_start_loc = None if starts is None else torch.tensor(starts, dtype=torch.int32)
    return query, pool[:, 0], pool[:, 1], table, lens, query_start_loc


def on_cuda(*tensors: Tensor | None) -> list[Tensor | None]:
    return [tensor if tensor is None else tensor.cuda() for tensor in tensors]


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("starts", [None, [0, 8, 8, 9, 16]], ids=["decode", "ragged"])
def test_attention_equals_cpu(starts: list[int] | None, dtype: torch.dtype, window: int) -> None:
    arguments = batch(4, 32, dtype, starts, 512)
    out = torch.ops.draftfuse.paged_attention(*on_cuda(*arguments), SCALE, window)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.cpu(), paged_attention(*arguments, SCALE, window), atol=tolerance, rtol=tolerance)


def test_attention_replays_with_other_lengths() -> None:
    query, key_cache, value_cache, table, lens, _ = batch(4, 32, torch.bfloat16, None, 64)
    arguments = on_cuda(query, key_cache, value_cache, table, lens, None)
    run = torch.ops.draftfuse.paged_attention
    run(*arguments, SCALE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(*arguments, SCALE)
    for new in ([512, 0, 1, 200], [0, 0, 0, 0], [16, 17, 15, 300]):
        lens.copy_(torch.tensor(new))
        assert arguments[4] is not None
        arguments[4].copy_(lens)
        graph.replay()
        expected = paged_attention(query, key_cache, value_cache, table, lens, None, SCALE)
        torch.testing.assert_close(out.cpu(), expected, atol=2e-2, rtol=2e-2)


def test_write_kv_equals_cpu_and_skips_what_lies_outside() -> None:
    fused, pool = torch.randn(5, 3, 8, 128), torch.randn(6, 2, 16, 8, 128)
    device_fused, device_pool = fused.cuda(), pool.cuda()
    write_kv(fused[:, 1], fused[:, 2], pool[:, 0], pool[:, 1], torch.tensor([3, -1, 95, -1, 16]))
    slots = torch.tensor([3, -1, 95, 96, 16]).cuda()
    write_kv(device_fused[:, 1], device_fused[:, 2], device_pool[:, 0], device_pool[:, 1], slots)
    assert torch.equal(device_pool.cpu(), pool)


@pytest.mark.parametrize("op", ["write_kv", "store", "paged_attention"])
def test_opcheck(op: str) -> None:
    query, key_cache, value_cache, table, lens, _ = on_cuda(*batch(4, 4, torch.float32, None, 64))
    assert query is not None
    rows = torch.randn(4, 8, 128, device="cuda")
    arguments = {
        "write_kv": (rows, rows + 1, key_cache, value_cache, torch.tensor([1, -1, 9, 30], device="cuda")),
        "store": (torch.arange(3, device="cuda"), torch.zeros(4, dtype=torch.int32, device="cuda")[:3]),
        "paged_attention": (query, key_cache, value_cache, table, lens, None, SCALE, 0),
    }[op]
    torch.library.opcheck(getattr(torch.ops.draftfuse, op).default, arguments)


def test_composites_equal_cpu() -> None:
    positions, lens = torch.tensor([3, 7, 0]), torch.tensor([4, 8, 0], dtype=torch.int32)
    table = torch.randperm(12).view(3, 4).int()
    device_positions, device_lens = positions.cuda(), lens.cuda()
    assert torch.equal(
        compute_slot_mapping(device_positions, device_lens, table.cuda(), 4).cpu(),
        compute_slot_mapping(positions, lens, table, 4),
    )
    advance_positions(positions, lens, 8)
    advance_positions(device_positions, device_lens, 8)
    assert torch.equal(device_positions.cpu(), positions)
    assert torch.equal(device_lens.cpu(), lens)


def test_sampling_equals_cpu() -> None:
    logits, temperature, seeds = torch.randn(64, 1000), torch.full((64,), 0.8), torch.arange(64)
    tokens = gumbel_sample(logits.cuda(), temperature.cuda(), seeds.cuda(), seeds.cuda())
    assert torch.equal(tokens.cpu(), gumbel_sample(logits, temperature, seeds, seeds))


def test_store() -> None:
    out = torch.zeros(4, dtype=torch.int32, device="cuda")
    store(torch.arange(3, device="cuda"), out[:3])
    assert out.tolist() == [0, 1, 2, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_linears_equal_cpu(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    table, hidden = torch.randn(500, 2048).to(dtype), torch.randn(1, 2048).to(dtype)
    weight, head = (torch.randn(3072, 4096) * 0.02).to(dtype), (torch.randn(32000, 2048) * 0.02).to(dtype)
    gains, index = (torch.rand(2048).to(dtype), torch.rand(2048).to(dtype)), torch.tensor([37])
    given = (table, index, hidden, weight, *gains)
    out = torch.ops.draftfuse.small_linear_pair(*on_cuda(*given), 1e-5)
    expected = torch.ops.draftfuse.small_linear_pair(*given, 1e-5)
    torch.testing.assert_close(out.cpu(), expected, atol=3e-2, rtol=3e-2)
    cuda = on_cuda(hidden, head, gains[0])
    logits = torch.ops.draftfuse.small_linear(*cuda, 1e-5, False, None)
    picked = torch.ops.draftfuse.small_linear_argmax(*cuda, 1e-5)
    assert torch.equal(picked, logits.argmax(-1))  # both sum a row in one order, so ties are the same ties


@pytest.mark.parametrize("size", [6, 24, 384, 3000])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16])
def test_sort_equals_cpu(dtype: torch.dtype, size: int) -> None:
    x = torch.randint(-40, 40, (2, size)).to(dtype)
    for descending in (False, True):
        found = torch.ops.draftfuse.sort(x.cuda(), -1, descending, True)
        for want, got in zip(torch.sort(x, dim=-1, descending=descending, stable=True), found, strict=True):
            assert torch.equal(want, got.cpu())


@pytest.mark.parametrize("rows", [1, 4, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_argmax_equals_cpu(dtype: torch.dtype, rows: int) -> None:
    x = torch.randint(-40, 40, (rows, 151936)).to(dtype)
    x[0, 77777] = float("nan")
    assert torch.equal(torch.ops.draftfuse.argmax(x.cuda()).cpu(), x.argmax(-1))
