"""Shared by all tests: the ``cuda`` marker, seeds, threads, and an Inductor cache that lives as long as the session."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from typing import Any

import hypothesis
import numpy
import pytest
import torch

CACHE = "TORCHINDUCTOR_CACHE_DIR"
hypothesis.settings.register_profile("draftfuse", deadline=None, derandomize="CI" in os.environ, print_blob=True)


def pytest_configure(config: pytest.Config) -> None:
    """A cache of this session's own, unless one was given: no test may pass thanks to an older artefact."""
    hypothesis.settings.load_profile("draftfuse")
    torch.set_num_threads(2)
    # Tests count traces and change what is traced; those of the stored traces switch them on. With =1, all use them.
    os.environ.setdefault("DRAFTFUSE_TRACE_CACHE", "0")
    if CACHE not in os.environ:
        folder = os.environ[CACHE] = tempfile.mkdtemp(prefix="draftfuse-inductor-")
        config.add_cleanup(lambda: drop_cache(folder))


def drop_cache(folder: str) -> None:
    os.environ.pop(CACHE, None)
    shutil.rmtree(folder, ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, none is visible")
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def seed() -> int:
    """Every test starts from the same random state."""
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    return 0


@pytest.fixture(scope="session")
def compiled_toy() -> Any:
    """A toy compiled with Inductor, its eager twin, and what both drafted: one compile for all tests."""
    from tests.lowering.compiled_toy import CompiledToy

    return CompiledToy()
