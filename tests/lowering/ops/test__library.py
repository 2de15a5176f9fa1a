"""The shared checks: what they compare, and what they leave to the device implementation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from draftfuse import ops
from draftfuse.errors import MissingExtraError, OpArgumentError
from draftfuse.lowering.ops import _library

ROOT = Path(__file__).parents[3]


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


def test_the_ops_run_without_triton() -> None:
    code = """if True:
        import sys
        sys.modules["triton"] = None
        import torch
        from draftfuse.ops import write_kv
        cache, row = torch.zeros(2, 2, 1, 4), torch.ones(1, 1, 4)
        write_kv(row, row, cache, cache.clone(), torch.tensor([3]))
        assert int(cache.sum()) == 4
    """
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, timeout=300)
    assert done.returncode == 0
