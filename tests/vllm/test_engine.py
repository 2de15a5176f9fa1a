"""Real vLLM engines on this CPU: the second model runner under Triton's interpreter, one process a case.

An engine starts in twenty seconds, so each answers several questions. They compare hashes of all drafted tokens, greedy
and drawn at a temperature. They need vLLM for the CPU (``bash .ci/vllm`` installs it).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.chi_square import differ

pytestmark = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed (bash .ci/vllm runs these)"),
    pytest.mark.slow,
    pytest.mark.timeout(900),
]
ENGINE = Path(__file__).with_name("engine.py")
HOOK = json.dumps({"inductor_passes": {"post_grad_custom_post_pass": "draftfuse.post_grad_pass"}})


@cache
def engine(ask: str, switch: str | None = None) -> dict[str, Any]:
    """What one engine reports; ``switch`` is DRAFTFUSE_VLLM."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("DRAFTFUSE_", "VLLM_"))}
    environment["VLLM_CACHE_ROOT"] = os.environ.get("VLLM_CACHE_ROOT", "/nonexistent-vllm-cache")
    if switch is not None:
        environment["DRAFTFUSE_VLLM"] = switch
    done = subprocess.run([sys.executable, str(ENGINE), ask], capture_output=True, text=True, env=environment)
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert found, done.stdout[-3000:] + done.stderr[-6000:]
    report: dict[str, Any] = json.loads(found[0].removeprefix("RESULT "))
    return report


def ask(**values: Any) -> str:
    return json.dumps({"method": "eagle3", "k": 4} | values)


@pytest.fixture(autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path_factory.getbasetemp() / "vllm-cache"))


def shipped() -> dict[str, Any]:
    report = engine(ask())
    assert "runs as vLLM ships it" in report["told"]
    first: dict[str, Any] = report["runs"][0]
    assert first["distinct"] > 20, "weights that draft one token prove nothing"
    return first


def test_fused_drafts_equal_split_ones_compiled_or_not_and_depend_on_the_refresh() -> None:
    report = engine(ask(runs=["as is", "split", "control", "compiled"]), "1")
    assert "fused, compiler none" in report["told"], report["told"]
    assert "CPUAttentionMetadataBuilder: rebuilt" in report["told"]
    assert "compiled k=4, any number of requests" in report["told"], report["told"]
    fused, split, control, compiled = report["runs"]
    assert fused == split == compiled == shipped()
    assert control["drafted"] != fused["drafted"]
    assert control["outputs"] == fused["outputs"]


def test_hook_by_name_on_the_command_line_asks_for_the_fused_loop() -> None:
    report = engine(ask(k=3, eager=False, cli=HOOK))
    assert "fused, compiler none" in report["told"], report["told"]
    assert sorted(report["markers"]) == [0, 1], "the target's graph has no marker, the draft's has one"
    assert report["runs"][0]["outputs"] == shipped()["outputs"]


@cache
def at_a_temperature() -> dict[str, Any]:
    """Drafts drawn at temperature 1, in an engine that the hook object asked for the fused loop. Logits are far apart,
    so that some tokens are drawn often."""
    drawing = {"temperature": 1.0, "logits": 8, "speculative": {"draft_sample_method": "probabilistic"}}
    load = {"k": 3, "requests": 4, "tokens": 4, "longer": 0, "runs": ["as is", "split"]}
    return engine(ask(hook="object", draws=24, drawn=["split", "as is", "hot"], **drawing, **load))


def test_hook_object_and_same_seeds_draw_the_same_drafts() -> None:
    report = at_a_temperature()
    assert "fused, compiler none" in report["told"], report["told"]
    fused, split = report["runs"]
    assert fused == split
    assert fused["distinct"] > 20, "weights that draft one token prove nothing"


def test_drafts_come_from_the_distribution_of_the_shipped_loop() -> None:
    """Every draw has a seed that no other has; the loop makes draft steps 1 and 2."""
    split, fused, hot = at_a_temperature()["drawn"]
    assert split != fused, "the same seeds would prove nothing"
    assert [differ(a, b) for a, b in zip(split, fused, strict=True)] == [False] * 3
    assert any(differ(a, b) for a, b in zip(split[1:], hot[1:], strict=True)), "a wrong temperature is not seen"


def test_stand_alone_draft_model_is_left_alone() -> None:
    report = engine(ask(method="draft_model"), "1")
    assert "StandaloneARSpeculator runs as vLLM ships it" in report["told"]
    assert report["runs"][0]["outputs"] == shipped()["outputs"]


def test_pass_manager_takes_the_marker_out_and_a_warm_cache_does_not_call_the_pass(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("DRAFTFUSE_", "VLLM_"))}
    environment |= {"VLLM_CACHE_ROOT": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    reports = []
    for _ in range(2):
        command = [sys.executable, str(ENGINE.with_name("piecewise.py"))]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        assert found, done.stdout[-3000:] + done.stderr[-6000:]
        reports.append(json.loads(found[0].removeprefix("RESULT ")))
    cold, warm = reports
    assert cold["right"]
    assert warm["right"]
    assert sum(cold["calls"]) == 1, "one piece has the marker"
    assert len(cold["calls"]) > 1, "the piece without it was left as it is"
    assert warm["calls"] == []
