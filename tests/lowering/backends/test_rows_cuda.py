"""On a GPU: each row's fused loop, in a CUDA graph, equals per-step rebuild in every metadata tensor of every step."""

from __future__ import annotations

import pytest
import torch

from draftfuse.lowering.backends import get_backend
from tests.lowering.backends.rows import ROWS, make
from tests.lowering.backends.support import Fused, Sizes, differences, record_rebuild, without_refresh

pytestmark = pytest.mark.cuda
LENS = [30, 33, 64, 1, 95]


def sizes() -> Sizes:
    return Sizes(64, 4, 2, 64, page=16, max_len=128, max_reqs=8, dtype=torch.bfloat16, device="cuda")


def skip_without_library(name: str) -> None:
    row = get_backend(name).row()
    if row["status"] == "split":
        pytest.skip(row["reason"])


@pytest.mark.parametrize("name", ROWS)
def test_graph_equals_rebuild(name: str) -> None:
    skip_without_library(name)
    spec = make(name, sizes=sizes())
    with torch.no_grad():
        expected = record_rebuild(spec, LENS, 8)
        assert differences(expected, Fused(spec).record(LENS, 8, graph=True)) == []


@pytest.mark.parametrize("name", ["flash_attn3", "triton_attention", "sparse_swa"])
def test_graph_without_refresh_differs(name: str) -> None:
    skip_without_library(name)
    spec = make(name, sizes=sizes())
    with torch.no_grad():
        expected = record_rebuild(spec, LENS, 8)
        stale = Fused(without_refresh(spec)).record(LENS, 8, graph=True)
    assert {step for _, step in differences(expected, stale, "metadata")} == {2, 3}
