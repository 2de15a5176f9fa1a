"""Real vLLM engines on this CPU that the pass hook asked for the fused loop; drafts at a temperature.

They need vLLM for the CPU (``bash .ci/vllm`` installs it).
"""

from __future__ import annotations

import json
from typing import Any

from tests.vllm.chi_square import differ
from tests.vllm.processes import NEEDS_VLLM, Engines

pytestmark = NEEDS_VLLM
HOOK = json.dumps({"inductor_passes": {"post_grad_custom_post_pass": "draftfuse.post_grad_pass"}})


def test_hook_by_name_on_the_command_line_asks_for_the_fused_loop(engines: Engines) -> None:
    report = engines(method="eagle", layers=1, k=3, eager=False, cli=HOOK, requests=2, runs=["as is", "split"])
    assert "fused, compiler none" in report["told"], report["told"]
    assert sorted(report["markers"]) == [0, 1], "the target's graph has no marker, the draft's has one"
    fused, split = report["runs"]
    assert fused == split


def at_a_temperature(engines: Engines) -> dict[str, Any]:
    """Drafts drawn at temperature 1, in an engine that the hook object asked for the fused loop. Logits are far apart,
    so that some tokens are drawn often."""
    drawing = {"temperature": 1.0, "logits": 8, "speculative": {"draft_sample_method": "probabilistic"}}
    load = {"k": 3, "requests": 4, "tokens": 4, "longer": 0, "runs": ["as is", "split"]}
    return engines(hook="object", draws=24, drawn=["split", "as is", "hot"], **drawing, **load)


def test_hook_object_and_same_seeds_draw_the_same_drafts(engines: Engines) -> None:
    report = at_a_temperature(engines)
    assert "fused, compiler none" in report["told"], report["told"]
    fused, split = report["runs"]
    assert fused == split
    assert fused["distinct"] > 20, "weights that draft one token prove nothing"


def test_drafts_come_from_the_distribution_of_the_shipped_loop(engines: Engines) -> None:
    """Every draw has a seed that no other has; the loop makes draft steps 1 and 2."""
    split, fused, hot = at_a_temperature(engines)["drawn"]
    assert split != fused, "the same seeds would prove nothing"
    assert [differ(a, b) for a, b in zip(split, fused, strict=True)] == [False] * 3
    assert any(differ(a, b) for a, b in zip(split[1:], hot[1:], strict=True)), "a wrong temperature is not seen"
