"""The backends' Triton kernels without a GPU: interpreted, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("triton") is None, reason="needs triton, which is not installed"),
]


def test_interpreted() -> None:
    root = HERE.parents[3]
    command = [
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(root),
        str(HERE / "interpreted_kernels.py"),
    ]
    names = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_DEFAULT_FP_FUSION": "1", "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, *command], env=names, cwd=root, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stdout + done.stderr
