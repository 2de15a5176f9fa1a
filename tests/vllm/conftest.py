"""vLLM's engines, with a cache of this session's own."""

from __future__ import annotations

import pytest

from tests.vllm.processes import Engines


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    return Engines(tmp_path_factory.mktemp("vllm-cache"))
