"""Each row of the table: fused equals per-step rebuild in every metadata tensor of every step, and the test can fail."""

from __future__ import annotations

import pytest

import draftfuse
from tests.lowering.backends.rows import ROWS, make
from tests.lowering.backends.support import LENS, STEPS, differences, load, record_fused, record_rebuild, without_refresh

NAMES = list(ROWS)


@pytest.mark.parametrize("capacity", [4, 6], ids=["full", "padded"])
@pytest.mark.parametrize("name", NAMES)
def test_fused_equals_rebuild(name: str, capacity: int) -> None:
    spec = make(name)
    expected = record_rebuild(spec, LENS, capacity)
    assert {step for _, step in expected} == set(range(1, STEPS))
    assert differences(expected, record_fused(spec, LENS, capacity)) == []


@pytest.mark.parametrize("name", NAMES)
def test_without_refresh_it_fails(name: str) -> None:
    spec = make(name)
    expected = record_rebuild(spec, LENS, 6)
    stale = record_fused(without_refresh(spec), LENS, 6)
    assert [key for key in differences(expected, stale, "metadata") if key[1] == 1] == []
    assert {step for _, step in differences(expected, stale, "metadata")} >= {2, 4}
    assert {step for _, step in differences(expected, stale, "hidden")} >= {4}


@pytest.mark.parametrize("name", NAMES)
def test_shipped_build_equals_rebuild(name: str) -> None:
    spec = make(name)
    load(spec, LENS, 6)
    fused = draftfuse.compile(spec, mode="fused", compiler="none", request_capacities=[6])
    record_rebuild(spec, LENS, 6)
    expected = spec.inputs.draft_tokens.clone()
    load(spec, LENS, 6)
    fused.decode(len(LENS))
    assert fused.report.fallbacks == []
    assert spec.inputs.draft_tokens[: len(LENS)].tolist() == expected[: len(LENS)].tolist()
