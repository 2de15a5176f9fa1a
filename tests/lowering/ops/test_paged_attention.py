"""paged_attention on the CPU: equals its reference, reads nothing that it may not, names what is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from draftfuse.errors import OpArgumentError
from draftfuse.ops import paged_attention

Case = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]
SCALE = 0.3
STARTS = [0, 3, 3, 4, 9, 10]
LENS = [24, 0, 5, 8, 1]


def case(
    lens: list[int],
    starts: list[int] | None = None,
    *,
    tokens: int | None = None,
    heads: tuple[int, int] = (6, 2),
    size: int = 8,
    page: int = 4,
    width: int = 6,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """A batch whose unused slots are all NaN and whose unused table entries are huge."""
    generator = torch.Generator().manual_seed(0)
    rows = len(lens)
    pool = torch.full((rows * width + 1, 2, page, heads[1], size), float("nan"))
    table = torch.full((rows, width), 10**8, dtype=torch.int32)
    order = torch.randperm(rows * width, generator=generator) + 1
    for row, length in enumerate(lens):
        pages = order[row * width : row * width + -(-length // page)]
        table[row, : len(pages)] = pages.int()
        for position in range(length):
            slot = torch.randn(2, heads[1], size, generator=generator)
            pool[pages[position // page], :, position % page] = slot
    count = tokens or (rows if starts is None else starts[-1])
    query = torch.randn(count, 2, heads[0], size, generator=generator).to(dtype)[:, 1]
    query_start_loc = None if starts is None else torch.tensor(starts, dtype=torch.int32)
    key_cache, value_cache = pool.to(dtype).unbind(1)
    return query, key_cache, value_cache, table, torch.tensor(lens, dtype=torch.int32), query_start_loc


def assert_equals_reference(arguments: Case, window: int, tolerance: float) -> None:
    from draftfuse.lowering.ops.paged_attention import reference

    out = paged_attention(*arguments, SCALE, window)
    assert out.dtype == arguments[0].dtype
    assert out.is_contiguous()
    torch.testing.assert_close(out, reference(*arguments, SCALE, window), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("window", [0, 1, 3, 9, 100])
@pytest.mark.parametrize("starts", [None, STARTS], ids=["decode", "ragged"])
def test_windows(starts: list[int] | None, window: int) -> None:
    assert_equals_reference(case(LENS, starts), window, 1e-5)


@pytest.mark.parametrize("starts", [None, STARTS], ids=["decode", "ragged"])
@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (4, 1), (7, 1), (6, 3)])
@pytest.mark.parametrize(("page", "width"), [(1, 24), (3, 8), (16, 2)])
def test_heads_and_pages(heads: tuple[int, int], page: int, width: int, starts: list[int] | None) -> None:
    assert_equals_reference(case(LENS, starts, heads=heads, page=page, width=width), 0, 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("starts", [None, STARTS], ids=["decode", "ragged"])
def test_dtypes(starts: list[int] | None, dtype: torch.dtype) -> None:
    assert_equals_reference(case(LENS, starts, dtype=dtype, size=20), 0, 2e-2)


@pytest.mark.parametrize("length", [3, 4, 5, 23, 24])
def test_page_boundary(length: int) -> None:
    assert_equals_reference(case([length, 1]), 0, 1e-5)


def test_dead_rows_and_tail_tokens_give_zeros() -> None:
    assert int(paged_attention(*case([0, 4]), SCALE)[0].count_nonzero()) == 0
    assert int(paged_attention(*case([0, 0]), SCALE).count_nonzero()) == 0
    ragged = paged_attention(*case(LENS, STARTS, tokens=13), SCALE)
    assert int(ragged[10:].count_nonzero()) == 0
    dead_with_tokens = paged_attention(*case([0, 4], [0, 2, 3]), SCALE)
    assert int(dead_with_tokens[:2].count_nonzero()) == 0


def test_no_rows() -> None:
    query, key_cache, value_cache, table, lens, _ = case([1])
    out = paged_attention(query[:0], key_cache, value_cache, table[:0], lens[:0], None, SCALE)
    assert out.shape == (0, 6, 8)


def test_a_row_does_not_depend_on_its_company() -> None:
    """Up to rounding: the products of a row may be blocked otherwise when it is alone or padded to another length."""
    query, key_cache, value_cache, table, lens, _ = case(LENS)
    together = paged_attention(query, key_cache, value_cache, table, lens, None, SCALE)
    for row in range(len(LENS)):
        only = slice(row, row + 1)
        alone = paged_attention(query[only], key_cache, value_cache, table[only], lens[only], None, SCALE)
        torch.testing.assert_close(alone[0], together[row], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("starts", [None, STARTS], ids=["decode", "ragged"])
def test_opcheck(starts: list[int] | None) -> None:
    torch.library.opcheck(torch.ops.draftfuse.paged_attention.default, (*case(LENS, starts), SCALE, 5))


def test_fake_checks_too() -> None:
    query, key_cache, value_cache, table, lens = (tensor.to("meta") for tensor in case([4, 4])[:5])
    out = torch.ops.draftfuse.paged_attention(query, key_cache, value_cache, table, lens, None, SCALE)
    assert (out.shape, out.dtype, out.device.type) == ((2, 6, 8), torch.float32, "meta")
    with pytest.raises(OpArgumentError, match="seq_lens has a wrong dtype"):
        torch.ops.draftfuse.paged_attention(query, key_cache, value_cache, table, lens.long(), None, SCALE)


CHANGES: dict[str, tuple[Any, ...]] = {
    "query dim": ("query has 2 dims", (6, 8), "[T, Hq, D]"),
    "cache dtype": ("key_cache and query differ in dtype", torch.float16, torch.float32),
    "table dtype": ("block_table has a wrong dtype", torch.int64, "torch.int32"),
    "lens dtype": ("seq_lens has a wrong dtype", torch.int64, "torch.int32"),
    "starts dtype": ("query_start_loc has a wrong dtype", torch.int64, "torch.int32"),
    "window": ("window is negative", -1, "window >= 0 (0: no window)"),
    "caches": ("value_cache differs from key_cache in shape", (12, 4, 2, 8), (13, 4, 2, 8)),
    "head size": ("query has another head size than the caches", 4, 8),
    "groups": ("query heads do not group over KV heads", 5, "a multiple of 2"),
    "table rows": ("block_table has other rows than seq_lens", 1, 2),
    "query rows": ("query has other rows than seq_lens", 1, 2),
    "starts": ("query_start_loc does not fit seq_lens", 2, 3),
    "length": ("a row is longer than its block table", 25, "seq_lens <= B * P = 24"),
}


def broken(change: str) -> tuple[Any, ...]:
    query, key_cache, value_cache, table, lens, _ = case([4, 4])
    good = (query, key_cache, value_cache, table, lens, None, SCALE, 0)
    index, value = {
        "query dim": (0, query[0]),
        "cache dtype": (1, key_cache.half()),
        "table dtype": (3, table.long()),
        "lens dtype": (4, lens.long()),
        "starts dtype": (5, torch.tensor([0, 1, 2])),
        "window": (7, -1),
        "caches": (2, value_cache[1:]),
        "head size": (0, query[..., :4]),
        "groups": (0, query[:, :5]),
        "table rows": (3, table[:1]),
        "query rows": (0, query[:1]),
        "starts": (5, torch.tensor([0, 2], dtype=torch.int32)),
        "length": (4, lens + 21),
    }[change]
    return (*good[:index], value, *good[index + 1 :])


@pytest.mark.parametrize("change", CHANGES)
def test_errors(change: str) -> None:
    what, came, expected = CHANGES[change]
    with pytest.raises(OpArgumentError) as caught:
        paged_attention(*broken(change))
    assert caught.value.what == f"draftfuse.ops.paged_attention: {what}"
    assert (caught.value.came, caught.value.expected) == (came, expected)
