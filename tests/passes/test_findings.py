"""Findings: each once, errors first; a comment on the line allows one class."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftfuse.errors import SourceLine
from draftfuse.passes.findings import CLASSES, Finding, allowed, merged, unread_comments


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


def test_one_finding_a_line_and_class_is_left_and_it_is_the_gravest(tmp_path: Path) -> None:
    line, other = SourceLine(str(tmp_path / "model.py"), 1), SourceLine(str(tmp_path / "model.py"), 2)
    first = Finding("warning", "host-sync", "a", "b", line)
    worse = Finding("error", "host-sync", "c", "d", line)
    others = [Finding("error", "baked-rng", "c", "d", line), Finding("error", "host-sync", "c", "d", other)]
    assert merged([first, worse, *others]) == [worse, *others]
    assert merged([worse, first]) == [worse]


def test_what_compiling_cannot_do_without_is_not_allowed(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text("self.x = y  # draftfuse: allow[fresh-allocation] it is small\n")
    finding = Finding("error", "fresh-allocation", "a", "Do that.", SourceLine.of(str(file), 1), needed="no reason")
    (found,) = merged([finding])
    assert found.is_error
    assert found.todo == "Do that. It cannot be allowed: no reason."


@pytest.mark.parametrize(
    ("comment", "words"),
    [
        ("allow[host-sink] once", "allow[host-sink] names no class of findings"),
        ("allow[host-sync, cpu_tensor] once", "allow[cpu_tensor] names no class of findings"),
        ("allow[]", "this comment allows nothing"),
        ("allow host-sync", "this comment allows nothing"),
        ("ignore[host-sync]", "this comment allows nothing"),
    ],
)
def test_a_comment_that_names_no_class_is_a_warning_with_the_classes(tmp_path: Path, comment: str, words: str) -> None:
    file = tmp_path / "model.py"
    file.write_text(f"x = y.item()  # draftfuse: {comment}\n")
    line = SourceLine.of(str(file), 1)
    (found,) = unread_comments([line])
    assert (found.severity, found.name, found.text, found.source) == ("warning", "comment", words, line)
    assert all(name in found.todo for name in CLASSES)
    assert found in merged([Finding("error", "baked-rng", "a", "b", line)])


def test_a_comment_with_a_class_is_read(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text("x = y.item()  # draftfuse: allow[host-sync, cpu-tensor] read once\n")
    assert list(unread_comments([SourceLine.of(str(file), 1)])) == []
