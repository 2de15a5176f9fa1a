"""Benchmark processes side by side: they build at once, measure in turn, and do not wait for one that died."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from draftfuse.bench import together
from draftfuse.bench.cells import Cell, speculator_for
from draftfuse.bench.modes import Workbench
from draftfuse.bench.runner import measure_cells
from draftfuse.bench.together import my_turn


def test_processes_measure_one_after_the_other(tmp_path: Path) -> None:
    inside, most = [0], [0]

    def one(name: str) -> None:
        with my_turn(tmp_path, name, 3):
            assert len(list(tmp_path.glob("*.ready"))) == 3, "measures before all have built"
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            time.sleep(0.05)
            inside[0] -= 1

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(one, ("a", "b", "c")))
    assert most == [1]


def test_nobody_waits_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "PATIENCE_SECONDS", 0.1)
    with my_turn(tmp_path, "a", 2):
        pass


def test_a_process_that_dies_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(arguments: dict[str, Any], cache: str) -> Any:
        folder, name, count = arguments["turn"]
        waits = f"while len(list(p.glob('*.ready'))) < {count}: time.sleep(0.05)"
        code = "raise SystemExit(3)" if name == "dead" else f"(p / '{name}.ready').touch()\n{waits}"
        program = f"import time\nfrom pathlib import Path\np = Path({folder!r})\n{code}"
        return subprocess.Popen([sys.executable, "-c", program])

    monkeypatch.setattr(together, "start", start)
    assert together.run_children({"dead": {}, "alive": {}}) == {"dead": 3, "alive": 0}


def test_a_mode_that_is_left_out_says_why() -> None:
    cell = Cell("draft-28", 1, 2, 64)
    spec = speculator_for([cell], torch.device("cpu"), "triton")
    (record,) = measure_cells(Workbench(spec, [1]), [cell], ["eager", "whole"], 1e9, lambda text: None, 4)
    assert record["modes"]["whole"]["error"].startswith("left out: ")
    assert "gpu_ms" in record["modes"]["eager"]
