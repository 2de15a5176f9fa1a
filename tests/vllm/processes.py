"""Scripts of this folder that run vLLM, each in a process of its own, and what they report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

NEEDS_VLLM = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed (bash .ci/vllm runs these)"),
    pytest.mark.slow,
    pytest.mark.timeout(900),
]


def report_of(script: str, *arguments: str, **environment: str) -> dict[str, Any]:
    """The one JSON line that ``script`` prints; nothing of draftfuse's and vLLM's settings here reaches it."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("DRAFTFUSE_", "VLLM_"))}
    command = [sys.executable, str(Path(__file__).with_name(script)), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=inherited | environment)
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert found, done.stdout[-3000:] + done.stderr[-6000:]
    report: dict[str, Any] = json.loads(found[0].removeprefix("RESULT "))
    return report


@cache
def engine(ask: str, switch: str | None, folder: Path) -> dict[str, Any]:
    """What one engine reports; ``switch`` is DRAFTFUSE_VLLM, ``folder`` holds vLLM's cache."""
    asked: Mapping[str, str] = {} if switch is None else {"DRAFTFUSE_VLLM": switch}
    return report_of("engine.py", ask, VLLM_CACHE_ROOT=str(folder), **asked)


class Engines:
    """Starts engines; one that was asked for the same before is not started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, switch: str | None = None, **values: Any) -> dict[str, Any]:
        """The report of an EAGLE-3 engine with four speculative tokens, changed by ``values``."""
        return engine(json.dumps({"method": "eagle3", "k": 4} | values), switch, self.folder)
