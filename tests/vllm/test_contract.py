"""Which builders may be recorded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from draftfuse.vllm.contract import HostWatch, kind_of, watched


def builder(name: str, **attributes: Any) -> Any:
    return type(name, (), {"device": "cuda:0", **attributes})()


def nothing() -> None:
    """A build that launches nothing."""


@pytest.mark.parametrize(
    ("made", "kind", "fused"),
    [
        (builder("FlashAttentionMetadataBuilder", aot_schedule=True), "registered", True),
        (builder("FlashAttentionMetadataBuilder", aot_schedule=False), "aliased", True),
        (builder("TritonAttentionMetadataBuilder"), "aliased", True),
        (builder("TritonAttentionMetadataBuilder", rswa_window=64), "host-planned", False),
        (builder("TritonMLAMetadataBuilder"), "aliased", True),
        (builder("FlashInferMetadataBuilder"), "host-planned", False),
        (builder("FlashInferMLASparseMetadataBuilder"), "host-planned", False),
        (builder("DeepseekV4ROCMAiterSparseSWAMetadataBuilder"), "derived", True),
        (builder("CPUAttentionMetadataBuilder", device="cpu"), "rebuilt", True),
    ],
)
def test_kind(made: Any, kind: str, fused: bool) -> None:
    found = kind_of(made, advances=True, updates=False, build=nothing)
    assert (found.kind, found.fused) == (kind, fused)
    assert found.builder == type(made).__name__


def test_vllm_s_own_update_is_used_where_its_loop_has_one() -> None:
    made = builder("FlashInferMetadataBuilder", supports_draft_decode_metadata_update=True)
    assert kind_of(made, advances=True, updates=True, build=nothing).kind == "registered"
    assert not kind_of(made, advances=True, updates=False, build=nothing).fused


def test_static_positions_need_no_refresh() -> None:
    assert kind_of(builder("FlashInferMetadataBuilder"), advances=False, updates=False, build=nothing).kind == "static"


def test_a_build_that_moves_data_between_host_and_device_is_not_recorded() -> None:
    found = watched("Mine", lambda: torch.zeros(4).to("meta"))
    assert not found.fused
    assert "aten._to_copy" in found.note


def test_a_build_that_stays_on_one_device_is_derived() -> None:
    assert watched("Mine", lambda: torch.arange(4).cumsum(0)).kind == "derived"


def test_a_build_that_fails_is_not_recorded() -> None:
    def build() -> None:
        raise RuntimeError("no such thing")

    found = watched("Mine", build)
    assert not found.fused
    assert "no such thing" in found.note


def test_watch_sees_nothing_where_nothing_is() -> None:
    with HostWatch() as watch:
        torch.ones(3).sum().item()  # on the host alone
    assert watch.found == set()
