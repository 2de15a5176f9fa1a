"""What is kept on disk beside Inductor's cache: damaged, unreadable or unwritable files cost time, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from draftfuse.lowering import check, tune
from draftfuse.lowering.file_lock import locked

DAMAGED = ("", "[", "3", '{"a": 3}', "[3]", "\xff")
CPU = torch.device("cpu")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the files of both."""
    monkeypatch.setattr(tune, "_file", lambda device: tmp_path / "kept" / "tiles.json")
    monkeypatch.setattr(check, "verdict_file", lambda key: tmp_path / "kept" / f"{key}.json")
    return tmp_path / "kept"


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_file_is_as_none(text: str, place: Path) -> None:
    place.mkdir()
    for name in ("tiles.json", "key.json"):
        (place / name).write_text(text, encoding="latin-1")
    assert check.SchedulerCheck("key").verdict() is None
    pytest.importorskip("triton")
    assert tune._load(CPU) == {}


@pytest.mark.parametrize("way", ["a file in the folder's place", "a folder in the file's place", "a full disk"])
def test_what_cannot_be_kept_is_used_all_the_same(way: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "a full disk":
        monkeypatch.setattr(Path, "write_text", full)
        monkeypatch.setattr(Path, "open", full)
    elif way == "a file in the folder's place":
        place.write_text("")
    else:
        for name in ("tiles.json", "key.json", "tiles.lock"):
            (place / name).mkdir(parents=True)
    ran = check.SchedulerCheck("key")
    ran([])
    assert ran.verdict() == []
    assert check.SchedulerCheck("key").verdict() is None
    pytest.importorskip("triton")
    monkeypatch.setattr(tune, "measure", lambda *args: tune.VENDOR)
    assert tune.choose(8, 8, torch.float32, CPU) is False


def full(*args: Any, **kwargs: Any) -> Any:
    raise OSError(28, "No space left on device")


def test_what_was_kept_is_found(place: Path) -> None:
    ran = check.SchedulerCheck("key")
    ran([])
    ran.findings = ["a fault"]
    assert ran.verdict() == check.SchedulerCheck("key").verdict() == ["a fault"]
    pytest.importorskip("triton")
    tune._save(CPU, {"a": tune.VENDOR, "b": [1, 2048, 4]})
    assert tune._load(CPU) == {"a": tune.VENDOR, "b": [1, 2048, 4]}


def test_a_lock_is_given_back_where_the_work_inside_fails(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(OSError, match="inside"), locked(tmp_path / "lock"):
            raise OSError("inside")
