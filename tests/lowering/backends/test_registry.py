"""The table: every row is there on any machine, and anybody may add one."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from ast import literal_eval
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import draftfuse
from draftfuse.backends import PagedBuilder, backends, get_backend, unregister_backend
from draftfuse.backends_cli import render_backends
from draftfuse.errors import InvalidOptionError
from draftfuse.lint import lint
from draftfuse.lowering.backends import table
from tests.lowering.backends.rows import ROWS

ROOT = Path(__file__).parents[3]
NAMES = [*ROWS, "position_static", "flashinfer", "dcp", "other"]
FIELDS = {
    "name",
    "refresh",
    "refreshes",
    "persistent_buffers",
    "frozen_host_decisions",
    "kernel",
    "status",
    "reason",
}


@pytest.fixture
def name() -> Iterator[str]:
    yield "made_here"
    unregister_backend("made_here")


def test_json_lists_every_row() -> None:
    rows = json.loads(render_backends(as_json=True))
    assert [row["name"] for row in rows] == NAMES
    assert all(row.keys() == FIELDS and row["reason"] for row in rows)
    assert {row["status"] for row in rows} <= {"fused", "reference", "split"}


def test_command_prints_json() -> None:
    code = "from draftfuse.cli import app; app(['backends', '--json'])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert [row["name"] for row in json.loads(done.stdout)] == NAMES


def test_table_is_aligned_text() -> None:
    lines = render_backends(as_json=False).splitlines()
    assert lines[0].split() == ["name", "refresh", "status", "reason"]
    assert [line.split()[0] for line in lines[1:]] == NAMES


@pytest.mark.parametrize("row", [*ROWS, "position_static", "flashinfer", "dcp"])
def test_row_says_what_it_freezes(row: str) -> None:
    backend = get_backend(row)
    if "registered" in backend.refresh and row != "flashinfer":
        assert backend.buffers
        assert hasattr(backend.builder, "refresh")
    assert backend.frozen


def test_registering_a_backend(name: str) -> None:
    row = draftfuse.register_backend(name, builder=PagedBuilder, refresh="aliased", kernel="mine")
    assert backends()[-1] is row
    assert row.row()["status"] == "fused"
    with pytest.raises(InvalidOptionError, match="registered already: got made_here"):
        draftfuse.register_backend(name, builder=PagedBuilder)
    assert draftfuse.register_backend(name, builder=PagedBuilder, replace=True).refresh == ("derived",)


def test_unknown_kind_and_name() -> None:
    with pytest.raises(InvalidOptionError, match="unknown kind of refresh"):
        draftfuse.register_backend("made_here", builder=PagedBuilder, refresh="magic")
    with pytest.raises(InvalidOptionError, match="no backend has this name: got nothing_like_it"):
        get_backend("nothing_like_it")


def test_status_on_a_cuda_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(table, "find_spec", lambda name: object() if name == "triton" else None)
    monkeypatch.delenv("FA3_LIBRARY", raising=False)
    if not table.has_op("_vllm_fa3_C", "fwd"):
        assert table.flash_attn3()[0] == "split"
    assert table.own_kernel() == ("fused", "draftfuse's Triton kernel")
    assert table.flash_attn2()[0] == "reference"
    monkeypatch.setenv("FA3_LIBRARY", "/somewhere/fa3.so")
    assert table.flash_attn3()[0] == "fused"


def test_example_adds_one_and_runs_fused(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        made = runpy.run_path(str(ROOT / "examples" / "custom_backend.py"), run_name="__main__")
    finally:
        unregister_backend("attention_sinks")
    printed = capsys.readouterr().out
    assert "equal to rebuilding at every step: True" in printed
    drafts = literal_eval(printed.split("drafts ")[1].splitlines()[0])
    assert len({token for row in drafts for token in row}) > 5
    assert lint(made["make"](), k=1) == []  # draft prefill, with several tokens a request
