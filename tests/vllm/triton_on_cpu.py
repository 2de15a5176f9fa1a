"""A Triton backend named ``cpu`` that compiles nothing: with ``TRITON_INTERPRET=1`` it makes vLLM's kernels run here.

Import it before vLLM. A test harness, nothing that anybody should serve with.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton.language as tl
from triton.backends import Backend, backends
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.language.extra import libdevice
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


class Driver(DriverBase):
    """Answers what Triton and vLLM ask a driver before the interpreter takes over."""

    def __init__(self) -> None:
        super().__init__()

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cpu", "x86", 0)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        return torch.cpu

    def get_benchmarker(self) -> Any:
        raise NotImplementedError

    def get_empty_cache_for_benchmark(self) -> Any:
        raise NotImplementedError

    def clear_cache(self, cache: Any) -> None:
        """There is none."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        """There is one."""


class Compiler:
    """Inductor asks whether this backend compiles for a target."""

    @staticmethod
    def supports_target(target: Any) -> bool:
        return False


def splat(original: Any) -> Any:
    """The interpreter gives the result of a comparison its operands' type, so a scalar mask spread over a block became
    a block of int64, which loads and stores refuse: vLLM's sampling has one."""

    def create_splat(self: Any, block: Any, value: Any) -> Any:
        if value.data.dtype == np.bool_:
            return TensorHandle(np.full(block.shape, value.data), tl.int1)
        return original(self, block, value)

    return create_splat


def log1p(value: Any, _semantic: Any = None) -> Any:
    """The interpreter has no functions of the vendor's library; vLLM's draw of a rejected token needs this one."""
    with np.errstate(invalid="ignore"):  # of lanes that a ``where`` drops
        return tl.tensor(TensorHandle(np.log1p(value.handle.data), value.handle.dtype), value.type)


def interpret_for_good() -> None:
    """The interpreter changes the language for one kernel, and again for each function that it calls, which is half of
    the time: here nothing compiles, so once is enough."""
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda function: SimpleNamespace(restore=lambda: None)


libdevice.log1p = log1p
interpret_for_good()
InterpreterBuilder.create_splat = splat(InterpreterBuilder.create_splat)
backends["cpu"] = Backend(Compiler, Driver)  # type: ignore[arg-type]
