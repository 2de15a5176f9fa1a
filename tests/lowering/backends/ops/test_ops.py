"""Operators of the backends on the CPU: equal to their references, registered right, errors by name."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from draftfuse.errors import InvalidOptionError, MissingExtraError, OpArgumentError
from draftfuse.lowering.backends.ops import (
    _vendors,
    fa3,
    flash_attention,
    index_logits,
    indexer_refresh,
    mla_attention,
    partial_attention,
    sparse_attention,
    swa_refresh,
)
from draftfuse.ops import paged_attention
from tests.lowering.backends.ops import cases

OPS = torch.ops.draftfuse


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mla_equals_reference(dtype: torch.dtype) -> None:
    arguments = cases.mla(dtype)
    expected = mla_attention.reference(*arguments, 0.3)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(mla_attention.mla_attention(*arguments, 0.3), expected, atol=tolerance, rtol=tolerance)


def test_mla_is_attention_over_uncompressed_heads() -> None:
    """Absorbing the up-projections gives what attention over the projected keys and values gives."""
    rows, heads, latent, rope, size = 3, 4, 16, 8, 12
    cache, table = torch.randn(9, 4, latent + rope), torch.arange(9, dtype=torch.int32).view(3, 3)
    lens = torch.tensor([11, 4, 7], dtype=torch.int32)
    up_key, up_value = torch.randn(heads, size, latent), torch.randn(heads, size, latent)
    q, q_rope = torch.randn(rows, heads, size), torch.randn(rows, heads, rope)
    absorbed = torch.einsum("rhd,hdc->rhc", q, up_key)
    out = torch.einsum("rhc,hdc->rhd", mla_attention.mla_attention(absorbed, q_rope, cache, table, lens, 0.2), up_value)
    for row, length in enumerate(lens.tolist()):
        tokens = cache[table[row].long()].flatten(0, 1)[:length]
        keys = torch.einsum("lc,hdc->hld", tokens[:, :latent], up_key)
        values = torch.einsum("lc,hdc->hld", tokens[:, :latent], up_value)
        scores = torch.einsum("hd,hld->hl", q[row], keys) + q_rope[row] @ tokens[:, latent:].T
        torch.testing.assert_close(out[row], torch.einsum("hl,hld->hd", (scores * 0.2).softmax(-1), values))


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("planned", [False, True])
def test_sparse_equals_reference(ragged: bool, planned: bool) -> None:
    arguments = cases.sparse(ragged, planned)
    expected = sparse_attention.reference(*arguments, 0.3)
    torch.testing.assert_close(OPS.sparse_attention(*arguments, 0.3), expected, atol=1e-5, rtol=1e-5)


def test_stale_plan_loses_slots() -> None:
    """A plan for shorter lists attends less: what the tile scheduler of an earlier step would do."""
    arguments = list(cases.sparse(False, True))
    arguments[5] = arguments[5].clamp(max=1)
    fresh = OPS.sparse_attention(*arguments[:5], None, 0.3)
    assert not torch.allclose(OPS.sparse_attention(*arguments, 0.3), fresh)


@pytest.mark.parametrize("lens", [[70, 0, 3, 129], [0, 0, 0, 0], [64, 64, 1, 0]])
@pytest.mark.parametrize("processors", [1, 3, 7])
def test_schedule_covers_each_unit_once(lens: list[int], processors: int) -> None:
    schedule = index_logits.plan_schedule(torch.tensor(lens, dtype=torch.int32), processors).tolist()
    units = [(row, unit) for row, n in enumerate(lens) for unit in range(-(-n // index_logits.SPLIT))]
    found = []
    for begin, end in pairwise(schedule):
        found += [u for u in units if tuple(begin) <= u < tuple(end)]
    assert found == units


def test_index_logits_equal_a_dense_product() -> None:
    query, weights, cache, table, lens, schedule = cases.index()
    logits = index_logits.index_logits(query, weights, cache, table, lens, schedule)
    for row, length in enumerate(lens.tolist()):
        keys = cache[table[row].long()].flatten(0, 1)[:length]
        expected = (torch.relu(query[row] @ keys.T) * weights[row].unsqueeze(1)).sum(0)
        torch.testing.assert_close(logits[row, :length], expected)
        assert bool((logits[row, length:] == float("-inf")).all())


def test_index_topk_takes_the_best() -> None:
    logits = torch.tensor([[1.0, 5.0, 3.0, float("-inf")], [2.0, float("-inf"), float("-inf"), float("-inf")]])
    table, lens = torch.tensor([[4, 7], [1, 2]], dtype=torch.int32), torch.tensor([3, 1], dtype=torch.int32)
    slots, counts = index_logits.index_topk(logits, table, lens, 2, 2)
    assert slots.tolist() == [[9, 14], [2, -1]]
    assert counts.tolist() == [2, 1]


def test_parts_merge_to_the_whole() -> None:
    query, keys, values, table, lens = cases.paged()
    whole = paged_attention(query, keys, values, table, lens, None, 0.3)
    lens_of_parts = [lens.clamp(max=4), (lens - 4).clamp(min=0)]
    tables = [table[:, :1], table[:, 1:]]
    parts = [
        partial_attention.partial_attention(query, keys, values, t.contiguous(), n, 0.3)
        for t, n in zip(tables, lens_of_parts, strict=True)
    ]
    outs, lses = (torch.stack(items) for items in zip(*parts, strict=True))
    torch.testing.assert_close(partial_attention.merge_partials(outs, lses), whole)


def test_plan_goes_into_the_buffer_and_its_tail_is_zero() -> None:
    lens, starts = torch.tensor([3, 0, 17], dtype=torch.int32), torch.arange(4, dtype=torch.int32)
    schedule = torch.full((fa3.schedule_capacity(5),), 99, dtype=torch.int32)
    OPS.fa3_schedule(lens, starts, schedule, 1, 64, 4, 2, 16, 4, 0, 0, torch.float32)
    plan = fa3.reference_plan(lens, starts, 0)
    assert schedule[: len(plan)].tolist() == plan.tolist() == [1, 0, 1, 0, 1, 0, 3, 0, 0]
    assert int(schedule[len(plan) :].count_nonzero()) == 0


def test_plan_that_does_not_fit_is_refused() -> None:
    lens, starts = torch.ones(9, dtype=torch.int32), torch.arange(10, dtype=torch.int32)
    with pytest.raises(OpArgumentError, match=r"plan does not fit its buffer: got 25, expected at most 17"):
        OPS.fa3_schedule(lens, starts, lens.new_zeros(17), 1, 64, 4, 2, 16, 4, 0, 0, torch.float32)


def test_fa3_on_cuda_needs_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_vendors, "find_namespace", lambda version: None)
    with pytest.raises(MissingExtraError, match="FA3_LIBRARY"):
        _vendors.require_fa3()


def test_vendor_call_goes_by_name() -> None:
    """What an older or newer version of the library does not know is left out, what it asks more is neutral."""
    library = torch.library.Library("draftfuse_test_vendor", "DEF")
    library.define(
        "fwd(Tensor q, Tensor? k_new, int window_size_left, int sm_margin, bool? pack_gqa, int cp_rank=5) -> Tensor"
    )
    seen: list[Any] = []

    def run(*args: Any) -> Tensor:
        seen.extend(args[1:])
        return args[0].clone()

    library.impl("fwd", run, "CPU")
    operator = torch.ops.draftfuse_test_vendor.fwd.default
    _vendors.call(operator, {"q": torch.ones(1), "window_size_left": 3, "unknown_here": 1})
    assert seen[:4] == [None, 3, 0, None]


def test_flash_attention_equals_paged() -> None:
    query, keys, values, table, lens = cases.paged()
    starts = torch.arange(5, dtype=torch.int32)
    expected = paged_attention(query, keys, values, table, lens, None, 0.3, 5)
    out = flash_attention.flash_attention(query, keys, values, table, lens, starts, 0.3, 1, 64, 5)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("name", cases.OPCHECKS)
def test_opcheck(name: str) -> None:
    torch.library.opcheck(getattr(OPS, name).default, cases.OPCHECKS[name]())


def wrong(index: int, value: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*arguments[:index], value, *arguments[index + 1 :])


@pytest.mark.parametrize(
    ("name", "index", "value", "message"),
    [
        ("mla_attention", 2, torch.zeros(2, 2, 5), "latent_cache has another row size: got 5, expected 24"),
        ("mla_attention", 4, torch.zeros(4), "seq_lens has a wrong dtype: got torch.float32"),
        ("sparse_attention", 3, torch.zeros(2, 2, 2, dtype=torch.int32), "indices has a wrong number of dims: got 3"),
        ("sparse_attention", 4, torch.zeros(9, dtype=torch.int32), "lens does not fit query: got 9"),
        ("swa_refresh", 8, 0, "window or page_size is no size"),
        ("swa_refresh", 7, torch.zeros(4, 8), "indices has a wrong dtype"),
        ("indexer_refresh", 8, 0, "ratio is no compression ratio: got 0"),
        ("index_logits", 5, torch.zeros(3, dtype=torch.int32), "schedule has 1 dims"),
        ("partial_attention", 3, torch.zeros(4, dtype=torch.int32), "block_table has 1 dims"),
        ("flash_attention", 5, torch.zeros(5), "query_start_loc has a wrong dtype"),
    ],
)
def test_errors(name: str, index: int, value: Any, message: str) -> None:
    with pytest.raises(OpArgumentError, match=message):
        getattr(OPS, name)(*wrong(index, value, cases.OPCHECKS[name]()))


def test_refreshes_equal_their_references() -> None:
    swa, indexer = cases.swa_refresh(), cases.indexer_refresh()
    OPS.swa_refresh(*swa)
    for out, expected in zip(swa[4:8], swa_refresh.reference(*swa[:4], swa[7].shape[1], *swa[8:]), strict=True):
        assert torch.equal(out, expected)
    OPS.indexer_refresh(*indexer)
    expected = indexer_refresh.reference(*indexer[:4], indexer[8], indexer[7].shape[0] - 1)
    for out, value in zip(indexer[4:8], expected, strict=True):
        assert torch.equal(out, value)


def test_a_library_that_cannot_be_loaded_is_named() -> None:
    with pytest.raises(InvalidOptionError, match=r"the library cannot be loaded: got no_such\.so \(.*or unset FA3_LIB"):
        _vendors.load_library("no_such.so")
