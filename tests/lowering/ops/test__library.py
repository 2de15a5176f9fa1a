"""The shared checks: what they compare, and what they leave to the device implementation."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
import torch

from draftfuse import ops
from draftfuse.errors import MissingExtraError, OpArgumentError
from draftfuse.lowering.ops import _library


def test_public_module_exports_all_ops() -> None:
    from draftfuse import lowering

    for name in ops.__all__:
        assert getattr(ops, name) is getattr(lowering.ops, name)
    for name in ("write_kv", "paged_attention", "store"):
        assert hasattr(torch.ops.draftfuse, name)


def test_symbols_are_not_compared() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with FakeTensorMode(shape_env=ShapeEnv(), static_shapes=False):
        size = torch.empty(5, device="meta").new_empty(3).shape[0]
    assert _library.known(size)
    assert _library.known((1, (2, 3)))
    assert not _library.known((1, object()))
    _library.check_size("store", "sizes differ", object(), 3, "")
    with pytest.raises(OpArgumentError):
        _library.check_size("store", "sizes differ", (1, 2), (1, 3), "")


def test_missing_triton_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_library, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError) as caught:
        _library.require_triton("write_kv")
    assert (caught.value.came, caught.value.expected) == ("no module triton", "triton")


def test_importing_the_ops_imports_no_triton() -> None:
    code = "import sys, draftfuse.ops; raise SystemExit('triton' in sys.modules)"
    root = importlib.util.find_spec("draftfuse")
    assert root is not None
    assert root.submodule_search_locations
    folder = f"{root.submodule_search_locations[0]}/.."
    assert subprocess.run([sys.executable, "-c", code], cwd=folder, check=False, timeout=120).returncode == 0
