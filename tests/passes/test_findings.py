"""Findings: each once, errors first; a comment on the line allows one class."""

from __future__ import annotations

from pathlib import Path

from draftfuse.errors import SourceLine
from draftfuse.passes.findings import Finding, allowed, merged


def test_findings_are_merged_with_errors_first() -> None:
    first, second = Finding("warning", "side-effect", "a", "b"), Finding("error", "host-sync", "c", "d")
    assert merged([first, second, first]) == [second, first]
    assert allowed(first) is first
    assert second.is_error
    assert not first.is_error


def test_a_comment_allows_the_class_that_it_names(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text("x = y.item()  # draftfuse: allow[host-sync, cpu-tensor] read once\n")
    source = SourceLine.of(str(file), 1)
    assert allowed(Finding("error", "host-sync", "a", "b", source)).allowed == "read once"
    assert allowed(Finding("error", "baked-rng", "a", "b", source)).allowed is None
