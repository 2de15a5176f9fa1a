"""Each row of the table: fused equals per-step rebuild, every metadata tensor, every step; and the test can fail."""

from __future__ import annotations

from functools import cache

import pytest

import draftfuse
from tests.lowering.backends.rows import ROWS, make
from tests.lowering.backends.support import (
    LENS,
    SMALL,
    STEPS,
    Fused,
    differences,
    load,
    record_rebuild,
    without_refresh,
)

NAMES = list(ROWS)
BATCHES = {"ragged": LENS, "one": [1], "all": [5, 4, 12, 7, 2, 6], "limit": [SMALL.max_len - 1, 9]}


@cache
def fused_row(name: str) -> Fused:
    return Fused(make(name))


@pytest.mark.parametrize("lens", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("name", NAMES)
def test_fused_equals_rebuild(name: str, lens: list[int]) -> None:
    fused = fused_row(name)
    for capacity in {max(2, len(lens)), 4, 6} - set(range(len(lens))):
        expected = record_rebuild(fused.spec, lens, capacity)
        assert {step for _, step in expected} == set(range(1, STEPS))
        assert differences(expected, fused.record(lens, capacity)) == []


@pytest.mark.parametrize("name", NAMES)
def test_without_refresh_it_fails(name: str) -> None:
    spec = make(name)
    expected = record_rebuild(spec, LENS, 6)
    stale = Fused(without_refresh(spec)).record(LENS, 6)
    assert [key for key in differences(expected, stale, "metadata") if key[1] == 1] == []
    assert {step for _, step in differences(expected, stale, "metadata")} == {2, 3}
    assert 3 in {step for _, step in differences(expected, stale, "hidden")}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_shipped_build_equals_rebuild(name: str) -> None:
    spec = make(name)
    fused = draftfuse.compile(spec, mode="fused", compiler="none", request_capacities=[6])
    record_rebuild(spec, LENS, 6)
    expected = spec.inputs.draft_tokens[: len(LENS)].tolist()
    load(spec, LENS, 6)
    fused.decode(len(LENS))
    assert fused.report.fallbacks == []
    assert spec.inputs.draft_tokens[: len(LENS)].tolist() == expected


@pytest.mark.slow
def test_compiled_equals_rebuild() -> None:
    """One build through Inductor: a derived, a registered and an aliased group together."""
    spec = make("ragged_swa", "flash_attn3", "triton_attention")
    fused = draftfuse.compile(spec, mode="fused", request_capacities=[6])
    record_rebuild(spec, LENS, 6)
    expected = spec.inputs.draft_tokens[: len(LENS)].tolist()
    load(spec, LENS, 6)
    fused.decode(len(LENS))
    assert spec.inputs.draft_tokens[: len(LENS)].tolist() == expected
