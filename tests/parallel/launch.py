"""Start the ranks of a test: one process each, a file to meet on, and an end after a fixed time, whatever happens."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
SECONDS = 150  # after which all ranks are killed


def run(folder: Path, world_size: int, *checks: str, dies: tuple[int, ...] = ()) -> list[str]:
    """Run ``checks`` (functions of tests/parallel/worker.py) in this order on each rank; what the ranks print.

    Raises:
        AssertionError: a rank that is not in ``dies`` fails, or has not ended in time.
    """
    logs = [folder / f"rank{rank}.txt" for rank in range(world_size)]
    processes = [_start(folder, rank, world_size, checks, logs[rank]) for rank in range(world_size)]
    end = time.monotonic() + SECONDS
    try:
        codes = [process.wait(max(0.1, end - time.monotonic())) for process in processes]
    except subprocess.TimeoutExpired:
        codes = [-1] * world_size
    finally:
        for process in processes:
            process.kill()
            process.wait()
    texts = [log.read_text() for log in logs]
    failed = {rank: texts[rank] for rank, code in enumerate(codes) if code != 0 and rank not in dies}
    assert not failed, "\n".join(
        f"--- rank {rank}, exit {codes[rank]}\n{text[-4000:]}" for rank, text in failed.items()
    )
    return texts


def _start(folder: Path, rank: int, world_size: int, checks: tuple[str, ...], log: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DRAFTFUSE_CHECK": "1"}
    script = str(Path(__file__).with_name("worker.py"))
    command = [sys.executable, script, str(rank), str(world_size), str(folder / "meet"), *checks]
    with log.open("w") as file:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, text=True)
