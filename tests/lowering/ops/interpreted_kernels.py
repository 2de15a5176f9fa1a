"""Triton kernels under Triton's interpreter, on CPU tensors; test_triton_kernels.py runs this file in a process.

The interpreter is chosen when Triton decorates a kernel, so it needs a process of its own. It has no bfloat16 products.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftfuse.lowering.ops import (
    _argmax_triton,
    _load_rows_triton,
    _paged_attention_triton,
    _small_linear_triton,
    _sort_triton,
    _write_kv_triton,
)
from draftfuse.lowering.ops.load_rows import READ, WRITTEN
from draftfuse.lowering.ops.load_rows import reference as load_reference
from draftfuse.lowering.ops.paged_attention import reference as attention_reference
from draftfuse.lowering.ops.small_linear import reference as linear_reference
from draftfuse.lowering.ops.small_linear_argmax import reference as argmax_reference
from draftfuse.lowering.ops.small_linear_pair import reference as pair_reference
from draftfuse.lowering.ops.write_kv import reference as write_reference

SCALE = 0.3
LENS, STARTS = [24, 0, 9, 8, 1], [0, 3, 3, 4, 11, 12]


def case(
    starts: list[int] | None, heads: tuple[int, int], size: int, page: int, dtype: torch.dtype, tokens: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """NaN in every slot, and a huge entry in every column, that no row may read."""
    rows, width = len(LENS), -(-24 // page)
    pool = torch.full((rows * width + 1, 2, page, heads[1], size), float("nan"))
    table = torch.full((rows, width), 2**30, dtype=torch.int32)
    for row, length in enumerate(LENS):
        pages = torch.arange(-(-length // page)) * rows + row + 1
        table[row, : len(pages)] = pages.int()
        for position in range(length):
            pool[pages[position // page], :, position % page] = torch.randn(2, heads[1], size)
    count = tokens or (rows if starts is None else starts[-1])
    query = torch.randn(count, 2, heads[0], size).to(dtype)[:, 1]
    key_cache, value_cache = pool.to(dtype).unbind(1)
    query_start_loc = None if starts is None else torch.tensor(starts, dtype=torch.int32)
    return query, key_cache, value_cache, table, torch.tensor(LENS, dtype=torch.int32), query_start_loc


@pytest.mark.parametrize("splits", [None, 1, 3])
@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("starts", [None, STARTS], ids=["decode", "ragged"])
def test_windows_and_splits(starts: list[int] | None, window: int, splits: int | None) -> None:
    arguments = case(starts, (6, 2), 16, 4, torch.float32)
    out = _paged_attention_triton.launch(*arguments, SCALE, window, splits)
    torch.testing.assert_close(out, attention_reference(*arguments, SCALE, window), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("starts", [None, STARTS], ids=["decode", "ragged"])
@pytest.mark.parametrize(
    ("heads", "size", "page", "dtype"),
    [
        ((1, 1), 8, 1, torch.float32),
        ((7, 1), 20, 5, torch.float32),
        ((20, 1), 64, 16, torch.float16),
        ((8, 2), 128, 16, torch.float16),
    ],
)
def test_shapes(starts: list[int] | None, heads: tuple[int, int], size: int, page: int, dtype: torch.dtype) -> None:
    arguments = case(starts, heads, size, page, dtype)
    out = _paged_attention_triton.launch(*arguments, SCALE, 0, 2)
    tolerance = 1e-5 if dtype == torch.float32 else 5e-3
    torch.testing.assert_close(out, attention_reference(*arguments, SCALE), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("splits", [1, 2])
def test_tail_tokens_give_zeros(splits: int) -> None:
    arguments = case(STARTS, (2, 2), 16, 4, torch.float32, tokens=20)
    out = _paged_attention_triton.launch(*arguments, SCALE, 0, splits)
    assert int(out[STARTS[-1] :].count_nonzero()) == 0
    torch.testing.assert_close(out, attention_reference(*arguments, SCALE), atol=1e-5, rtol=1e-5)


def test_a_row_longer_than_its_table_reads_no_further() -> None:
    query, key_cache, value_cache, table, lens, _ = case(None, (2, 2), 16, 4, torch.float32)
    wide = torch.cat([table, torch.full_like(table, 2**30)], dim=1)[:, : table.shape[1]]
    lens[0] += 9
    out = _paged_attention_triton.launch(query, key_cache, value_cache, wide, lens, None, SCALE)
    lens[0] -= 9
    expected = attention_reference(query, key_cache, value_cache, table, lens, None, SCALE)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_no_rows() -> None:
    query, key_cache, value_cache, table, lens, _ = case(None, (2, 2), 16, 4, torch.float32)
    out = _paged_attention_triton.launch(query[:0], key_cache, value_cache, table[:0], lens[:0], None, SCALE)
    assert out.shape == (0, 2, 16)


@pytest.mark.parametrize(("heads", "size", "page"), [(1, 8, 1), (2, 20, 3), (4, 64, 16)])
def test_write_kv(heads: int, size: int, page: int) -> None:
    slots = torch.tensor([2, -1, 5, -9, 0, 6 * page, 6 * page - 1])  # the last but one lies outside: no write
    fused = torch.randn(7, 3, heads, size)
    pool = torch.randn(6, 2, page, heads, size)
    inside = torch.where(slots < 6 * page, slots, -1)
    expected = write_reference(fused[:, 1], fused[:, 2], pool[:, 0], pool[:, 1], inside)
    _write_kv_triton.launch(fused[:, 1], fused[:, 2], pool[:, 0], pool[:, 1], slots)
    assert torch.equal(pool[:, 0], expected[0])
    assert torch.equal(pool[:, 1], expected[1])


def test_write_kv_without_tokens() -> None:
    empty, cache = torch.zeros(0, 2, 4), torch.zeros(2, 2, 2, 4)
    _write_kv_triton.launch(empty, empty, cache, cache.clone(), torch.zeros(0, dtype=torch.int64))
    assert int(cache.count_nonzero()) == 0


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize("with_gain", [False, True])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 64, 32), (3, 520, 40), (4, 1024, 16), (2, 2048, 10)])
def test_small_linear(rows: int, inputs: int, outputs: int, with_gain: bool, swiglu: bool, with_residual: bool) -> None:
    x = torch.randn(rows, 2, inputs)[:, 1]
    weight, gain = torch.randn(outputs, inputs) * inputs**-0.5, torch.rand(inputs) if with_gain else None
    residual = torch.randn(rows, outputs // 2 if swiglu else outputs) if with_residual else None
    out = _small_linear_triton.launch(x, weight, gain, 1e-5, swiglu, residual)
    expected = linear_reference(x, weight, gain, 1e-5, swiglu, residual)
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize(("rows", "half", "outputs"), [(1, 128, 32), (3, 384, 10), (4, 1024, 6)])
def test_small_linear_pair(rows: int, half: int, outputs: int, gathered: bool) -> None:
    table, second = torch.randn(20, half), torch.randn(rows, 2, half)[:, 1]
    index = torch.randint(20, (2 * rows,))[::2] if gathered else None
    weight, gains = torch.randn(outputs, 2 * half) * half**-0.5, (torch.rand(half), torch.rand(half))
    front = (table, index) if gathered else (table[:rows], None)
    out = _small_linear_triton.launch_pair(*front, second, weight, *gains, 1e-5)
    torch.testing.assert_close(out, pair_reference(*front, second, weight, *gains, 1e-5), atol=1e-4, rtol=1e-4)


def test_an_index_outside_the_table_reads_inside() -> None:
    table, second, weight = torch.randn(4, 128), torch.randn(3, 128), torch.randn(8, 256)
    gains = torch.rand(128), torch.rand(128)
    out = _small_linear_triton.launch_pair(table, torch.tensor([-9, 1, 2**40]), second, weight, *gains, 1e-5)
    expected = pair_reference(table, torch.tensor([0, 1, 3]), second, weight, *gains, 1e-5)
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("with_gain", [False, True])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 64, 33), (4, 520, 40), (2, 2048, 90)])
def test_small_linear_argmax(
    rows: int, inputs: int, outputs: int, with_gain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_small_linear_triton, "PICK_BLOCK", 16)  # several blocks of keys
    x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs)
    gain = torch.rand(inputs) if with_gain else None
    out = _small_linear_triton.launch_argmax(x, weight, gain, 1e-5)
    assert torch.equal(out, argmax_reference(x, weight, gain, 1e-5))


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        ([1.0, 3.0, 3.0, 2.0, 3.0], 1),
        ([-2.0, -1.0, -3.0, -1.0, -9.0], 1),
        ([-1.0, -0.0, 0.0, -0.0, -1.0], 1),
        ([float("-inf")] * 5, 0),
        ([1.0, float("inf"), float("nan"), float("inf"), float("nan")], 2),
    ],
)
def test_argmax_takes_the_first_of_equal_logits(column: list[float], expected: int) -> None:
    weight = torch.zeros(5, 16)
    weight[:, 0] = torch.tensor(column)
    x = torch.zeros(1, 16)
    x[0, 0] = 1.0
    logits = torch.nan_to_num(weight, posinf=1e30, neginf=-1e30)
    weight = torch.where(weight.isnan(), weight, logits)
    assert _small_linear_triton.launch_argmax(x, weight, None, 0.0).tolist() == [expected]
    assert argmax_reference(x, weight, None, 0.0).tolist() == [expected]


@pytest.mark.parametrize(("rows", "capacity", "length"), [(3, 3, 0), (2, 4, 3), (0, 4, 3), (4, 4, 300)])
def test_load_rows(rows: int, capacity: int, length: int) -> None:
    lengths = torch.full((rows,), length) if length else torch.tensor([1, 5, 2])
    tokens, query_len = int(lengths.sum()), length or 1
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int()
    read = {n: torch.randint(1, 99, (max(tokens, rows),)) for n in READ} | {"query_start_loc": starts}
    read |= {"seq_lens": torch.arange(rows).int(), "temperature": torch.rand(rows)}
    read |= {"num_rejected": torch.arange(rows) % lengths.clamp(min=1), "hidden_states": torch.randn(tokens, 1500)}
    kinds = {"input_ids": torch.int32, "seq_lens": torch.int32, "query_start_loc": torch.int32}
    room = capacity * query_len + 20
    buffers = [torch.full((room,), 77, dtype=kinds.get(n, torch.int64)) for n in WRITTEN]
    buffers[WRITTEN.index("temperature")] = torch.full((room,), 7.5)
    buffers[WRITTEN.index("hidden_states")] = torch.full((room, 1500), 7.5)
    expected = [b.clone() for b in buffers]
    sources = [read[n] for n in READ] if rows else []
    load_reference(expected, sources, rows, tokens, capacity, query_len)
    _load_rows_triton.launch(buffers, sources, rows, tokens, capacity, query_len)
    for name, want, got in zip(WRITTEN, expected, buffers, strict=True):
        if name == "input_ids" and rows:  # behind the last accepted token of a row stands rubbish in both
            starts_of, last = starts[:-1].tolist(), (starts[1:] - 1 - read["num_rejected"]).tolist()
            for begin, end in zip(starts_of, last, strict=True):
                assert torch.equal(want[begin : end + 1], got[begin : end + 1])
            want, got = want[tokens:], got[tokens:]
        assert torch.equal(want, got), name


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(1,), (6,), (33,), (257,), (3, 40)])
def test_sort_is_stable_and_puts_nan_last(shape: tuple[int, ...], dtype: torch.dtype, descending: bool) -> None:
    x = torch.randint(-5, 6, shape).to(dtype)
    if dtype.is_floating_point:
        x.view(-1)[::3] = float("nan")
        x.view(-1)[1::7] = float("inf")
    assert _sort_triton.takes(x, -1)
    expected = torch.sort(x, dim=-1, descending=descending, stable=True)
    for want, got in zip(expected, _sort_triton.launch(x, descending), strict=True):
        assert torch.equal(want.nan_to_num(nan=99), got.nan_to_num(nan=99))


def test_which_sorts_have_a_kernel() -> None:
    square = torch.zeros(4, 4)
    assert _sort_triton.takes(square, 1)
    assert not _sort_triton.takes(square, 0)
    assert not _sort_triton.takes(square.T, -1)
    assert not _sort_triton.takes(square.double(), -1)
    assert not _sort_triton.takes(torch.zeros(_sort_triton.LONGEST + 1), -1)
    assert not _sort_triton.takes(torch.zeros(()), -1)
    assert not _sort_triton.takes(torch.zeros(0), -1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("size", [1, 7, 4096, 9000])
def test_argmax_of_long_rows(size: int, dtype: torch.dtype) -> None:
    x = torch.randint(-9, 9, (5, size)).to(dtype)  # many equal ones
    x[1] = -float("inf")
    x[2] = -0.0
    x[2, size // 2] = 0.0
    x[3, size - 1] = float("nan")
    assert torch.equal(_argmax_triton.launch(x), x.argmax(-1))
    wide = torch.zeros(5, size + 3, dtype=dtype)
    wide[:, :size] = x
    assert torch.equal(_argmax_triton.launch(wide[:, :size]), x.argmax(-1))
    assert torch.equal(_argmax_triton.launch(x.T.contiguous().T), x.argmax(-1))
