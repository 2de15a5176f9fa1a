"""Processes that build side by side and measure one after the other: compiling is most of a benchmark's time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from draftfuse.lowering.file_lock import locked
from draftfuse.trace_cache import SWITCH

POLL_SECONDS = 0.2
PATIENCE_SECONDS = 300.0  # for one that builds longer, nobody waits: it measures last


@contextmanager
def my_turn(folder: Path, name: str, count: int) -> Iterator[None]:
    """Wait until all ``count`` processes have built, :data:`PATIENCE_SECONDS` at most, then hold the device alone.

    Args:
        folder: shared by the processes, empty at first.
        name: of this process.
    """
    (folder / f"{name}.ready").touch()
    end = time.monotonic() + PATIENCE_SECONDS
    while len(list(folder.glob("*.ready"))) < count and time.monotonic() < end:
        time.sleep(POLL_SECONDS)
    with locked(folder / "device"):
        yield


def run_children(arguments: dict[str, dict[str, Any]]) -> dict[str, int]:
    """Run ``python -m draftfuse.bench`` with each of ``arguments`` at once; exit codes by name.

    A process that dies does not hold the others up. Compiler caches are shared, and empty at first.
    """
    with tempfile.TemporaryDirectory(prefix="draftfuse-together-") as place:
        folder = Path(place) / "turns"
        folder.mkdir()
        running = {
            name: start(given | {"turn": [str(folder), name, len(arguments)]}, place)
            for name, given in arguments.items()
        }
        codes: dict[str, int] = {}
        while len(codes) < len(running):
            time.sleep(POLL_SECONDS)
            for name, process in running.items():
                if name not in codes and process.poll() is not None:
                    codes[name] = process.returncode
                    (folder / f"{name}.ready").touch()
        return codes


def start(arguments: dict[str, Any], cache: str) -> subprocess.Popen[bytes]:
    """Start :func:`draftfuse.bench.command.work` in another process, with compiler caches in ``cache``."""
    caches = {"TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor", "TRITON_CACHE_DIR": f"{cache}/triton", SWITCH: "1"}
    command: Sequence[str] = [sys.executable, "-m", "draftfuse.bench", json.dumps(arguments)]
    return subprocess.Popen(command, env=os.environ | caches)
