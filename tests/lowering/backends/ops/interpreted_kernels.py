"""Triton kernels of the backends under Triton's interpreter; test_triton_kernels.py runs this file in a process."""

from __future__ import annotations

import pytest
import torch

from draftfuse.lowering.backends.ops import (
    _index_triton,
    _mla_attention_triton,
    _sparse_attention_triton,
    _swa_refresh_triton,
    index_logits,
    indexer_refresh,
    mla_attention,
    sparse_attention,
    swa_refresh,
)
from tests.lowering.backends.ops import cases


@pytest.mark.parametrize("splits", [None, 1, 3])
@pytest.mark.parametrize(("heads", "latent", "rope"), [(5, 16, 8), (17, 24, 16)])
def test_mla(heads: int, latent: int, rope: int, splits: int | None) -> None:
    arguments = cases.mla(heads=heads, latent=latent, rope=rope)
    out = _mla_attention_triton.launch(*arguments, 0.3, splits)
    torch.testing.assert_close(out, mla_attention.reference(*arguments, 0.3), atol=1e-5, rtol=1e-5)


def test_mla_half() -> None:
    arguments = cases.mla(torch.float16)
    out = _mla_attention_triton.launch(*arguments, 0.3, 2)
    torch.testing.assert_close(out, mla_attention.reference(*arguments, 0.3), atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("planned", [False, True])
def test_sparse(ragged: bool, planned: bool) -> None:
    arguments = cases.sparse(ragged, planned)
    out = _sparse_attention_triton.launch(*arguments, 0.3)
    torch.testing.assert_close(out, sparse_attention.reference(*arguments, 0.3), atol=1e-5, rtol=1e-5)


def test_swa_refresh() -> None:
    arguments = cases.swa_refresh()
    _swa_refresh_triton.launch(*arguments)
    expected = swa_refresh.reference(*arguments[:4], arguments[7].shape[1], *arguments[8:])
    for out, value in zip(arguments[4:8], expected, strict=True):
        assert torch.equal(out, value)


def test_indexer_refresh() -> None:
    arguments = cases.indexer_refresh()
    _index_triton.launch_refresh(*arguments)
    expected = indexer_refresh.reference(*arguments[:4], arguments[8], arguments[7].shape[0] - 1)
    for out, value in zip(arguments[4:8], expected, strict=True):
        assert torch.equal(out, value)


@pytest.mark.parametrize("lens", [[130, 0, 7, 64], [0, 0, 0, 0], [0, 144, 144, 0]])
def test_index_logits(lens: list[int]) -> None:
    query, weights, cache, table, _, _ = cases.index()
    now = torch.tensor(lens, dtype=torch.int32)
    arguments = (query, weights, cache, table, now, index_logits.plan_schedule(now, 3))
    out = _index_triton.launch_logits(*arguments)
    torch.testing.assert_close(out, index_logits.reference(*arguments), atol=1e-5, rtol=1e-5)
