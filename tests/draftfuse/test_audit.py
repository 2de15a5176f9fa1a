"""The audit: silent on loops that are right, the first divergence of those that are not, and nothing left changed."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

import draftfuse
from draftfuse import CommonMetadata, python_state, tapped
from draftfuse.build import passes_for
from draftfuse.passes import ir
from tests.failures.small import Small, WindowBuilder, WindowMetadata, three_rows


class Refreshing(WindowBuilder):
    """Offers a refresh by hand; ``forgets`` names a field that it leaves out."""

    def __init__(self, forgets: str = "") -> None:
        super().__init__()
        self.forgets = forgets

    def refresh(self, metadata: WindowMetadata, common: CommonMetadata) -> None:
        start = (common.seq_lens - self.window).clamp(min=0)
        if self.forgets != "start":
            metadata.start.copy_(start)
        if self.forgets != "length":
            metadata.length.copy_(common.seq_lens - start)  # the line of length


def audited(builder: Any, k: int = 3) -> draftfuse.FusedDraft:
    return draftfuse.compile(Small(k=k, builder=builder), compiler="none")


def test_a_right_loop_has_no_divergence_and_is_left_alone() -> None:
    fused = audited(Refreshing())
    spec = fused.spec
    before = {p: t.clone() for p, t in python_state.of_speculator(spec, wide=False).tensors.items()}
    report = fused.audit(three_rows(spec))
    assert report.ok, str(report)
    assert report.rounds == 3
    assert report.values > 60
    after = python_state.of_speculator(spec, wide=False).tensors
    assert all(torch.equal(before[p], after[p]) for p in before)


@pytest.mark.parametrize("field", ["start", "length"])
def test_a_field_that_a_refresh_forgets_is_named_at_its_step(field: str) -> None:
    fused = audited(Refreshing(field))
    report = fused.audit(three_rows(fused.spec))
    assert not report.ok
    first = report.first
    assert first is not None
    assert (first.round, first.step, first.phase, first.tensor) == (0, 2, "refresh", f"group0.metadata.{field}")
    lengths = [5, 9 - 1, 3]  # rejected token taken off; two steps on
    row = first.request or 0
    length = lengths[row] + 2
    start = max(0, length - 5)
    assert first.expected == (start if field == "start" else length - start)
    text = str(report)
    assert f"group0.metadata.{field}" in text
    assert json.loads(report.to_json())["divergences"][0]["step"] == 2


def test_the_source_line_is_the_users() -> None:
    fused = audited(Refreshing("start"))
    first = fused.audit(three_rows(fused.spec)).first
    assert first is not None
    assert first.source is not None
    assert first.source.file.endswith("small.py")
    assert "start" in first.source.text


def test_a_wrong_pass_shows_at_the_step_that_it_spoils(monkeypatch: pytest.MonkeyPatch) -> None:
    def freeze(graph: Any) -> int:
        """Every later step reads the slots of step 1."""
        taps = [n for n in graph.nodes if ir.is_tap(n) and n.args[1] == "hidden"]
        first, second = taps[0].args[0], taps[1].args[0]
        for user in list(second.users):
            if not ir.is_tap(user):
                user.replace_input_with(second, first)
        return 1

    def spoiled(*args: Any, **kwargs: Any) -> Any:
        return (freeze, *passes_for(*args, **kwargs))

    monkeypatch.setattr(tapped, "passes_for", spoiled)
    fused = audited(WindowBuilder())
    first = fused.audit(three_rows(fused.spec)).first
    assert first is not None
    assert (first.step, first.phase, first.tensor) == (2, "sample", "tokens")


def test_frozen_values_show_when_inputs_change(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = audited(WindowBuilder())
    fused.decode(3)
    runner = next(iter(fused.runners.made.values()))
    frozen = fused.spec.inputs.positions.clone()
    launch = runner.launch

    def spoiled() -> None:
        launch()
        fused.spec.inputs.positions[:3].copy_(frozen[:3] + 40)

    for key in fused.runners.made:
        fused.runners.made[key] = replace(runner, launch=spoiled)
    report = fused.audit(three_rows(fused.spec))
    assert report.first is not None
    assert (report.first.phase, report.first.tensor) == ("final state", "spec.inputs.positions")


def test_a_split_loop_is_compared_by_what_it_leaves() -> None:
    fused = draftfuse.compile(Small(k=3), compiler="none", mode="split")
    report = fused.audit(three_rows(fused.spec))
    assert report.ok, str(report)
    assert "does not run fused" in report.notes[0]


@pytest.mark.slow
def test_the_compiled_loop_is_audited_with_tolerance() -> None:
    fused = draftfuse.compile(Small(k=3))
    report = fused.audit(three_rows(fused.spec))
    assert report.ok, str(report)
