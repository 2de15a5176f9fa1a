"""Real vLLM engines on this CPU: the second model runner under Triton's interpreter, greedy drafts.

An engine starts in twenty seconds, so each answers several questions. They compare hashes of all drafted tokens, and
need vLLM for the CPU (``bash .ci/vllm`` installs it).
"""

from __future__ import annotations

from typing import Any

from tests.vllm.processes import NEEDS_VLLM, Engines

pytestmark = NEEDS_VLLM


def shipped(engines: Engines) -> dict[str, Any]:
    report = engines()
    assert "runs as vLLM ships it" in report["told"]
    first: dict[str, Any] = report["runs"][0]
    assert first["distinct"] > 20, "weights that draft one token prove nothing"
    return first


def test_fused_drafts_equal_split_ones_compiled_or_not_and_depend_on_the_refresh(engines: Engines) -> None:
    report = engines("1", runs=["as is", "split", "control", "compiled"])
    assert "fused, compiler none" in report["told"], report["told"]
    assert "CPUAttentionMetadataBuilder: rebuilt" in report["told"]
    assert "compiled k=4, any number of requests" in report["told"], report["told"]
    fused, split, control, compiled = report["runs"]
    assert fused == split == compiled == shipped(engines)
    assert control["drafted"] != fused["drafted"]
    assert control["outputs"] == fused["outputs"]


def test_stand_alone_draft_model_is_left_alone(engines: Engines) -> None:
    report = engines("1", method="draft_model")
    assert "StandaloneARSpeculator runs as vLLM ships it" in report["told"]
    assert report["runs"][0]["outputs"] == shipped(engines)["outputs"]
