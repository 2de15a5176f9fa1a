"""The Triton kernels without a GPU: interpreted, and compiled for Hopper; in processes of their own."""

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


def run(*arguments: str, **environment: str) -> None:
    names = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_DEFAULT_FP_FUSION": "1", **environment}
    done = subprocess.run([sys.executable, *arguments], env=names, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stdout + done.stderr


def test_interpreted() -> None:
    root = str(HERE.parents[2])
    run("-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", root, str(HERE / "interpreted_kernels.py"),
        TRITON_INTERPRET="1")  # fmt: skip


def test_compiles_for_hopper(tmp_path: Path) -> None:
    run(str(HERE / "compiled_kernels.py"), TRITON_CACHE_DIR=str(tmp_path), PYTHONPATH=str(HERE.parents[2]))
