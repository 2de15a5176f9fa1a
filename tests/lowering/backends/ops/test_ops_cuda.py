"""The backends' Triton kernels on a GPU: equal to the references, in bfloat16 too, and inside a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from draftfuse.lowering.backends.ops import index_logits, indexer_refresh, mla_attention, sparse_attention, swa_refresh
from tests.lowering.backends.ops import cases

pytestmark = pytest.mark.cuda
OPS = torch.ops.draftfuse
DTYPES = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


def on_cpu(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(a.cpu() if isinstance(a, torch.Tensor) else a for a in arguments)


def close(out: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(out.cpu(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "latent", "rope"), [(5, 16, 8), (16, 512, 64)])
def test_mla(dtype: torch.dtype, heads: int, latent: int, rope: int) -> None:
    arguments = cases.mla(dtype, "cuda", heads, latent, rope)
    scale = (latent + rope) ** -0.5
    close(OPS.mla_attention(*arguments, scale), mla_attention.reference(*on_cpu(arguments), scale), DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ragged", [False, True])
def test_sparse(dtype: torch.dtype, ragged: bool) -> None:
    arguments = cases.sparse(ragged, True, dtype, "cuda")
    close(OPS.sparse_attention(*arguments, 0.3), sparse_attention.reference(*on_cpu(arguments), 0.3), DTYPES[dtype])


def test_index_logits() -> None:
    arguments = cases.index("cuda")
    close(OPS.index_logits(*arguments), index_logits.reference(*on_cpu(arguments)), 1e-3)


def captured(run: Callable[[], None]) -> None:
    """Run once, then capture and replay."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    torch.cuda.synchronize()


def test_refreshes_in_a_graph() -> None:
    swa, indexer = cases.swa_refresh("cuda"), cases.indexer_refresh("cuda")
    captured(lambda: OPS.swa_refresh(*swa))
    expected = swa_refresh.reference(*on_cpu(swa)[:4], swa[7].shape[1], *swa[8:])
    for out, value in zip(swa[4:8], expected, strict=True):
        assert torch.equal(out.cpu(), value)
    captured(lambda: OPS.indexer_refresh(*indexer))
    wanted = indexer_refresh.reference(*on_cpu(indexer)[:4], indexer[8], indexer[7].shape[0] - 1)
    for out, value in zip(indexer[4:8], wanted, strict=True):
        assert torch.equal(out.cpu(), value)
