"""A Triton backend named ``cpu`` that compiles nothing: with ``TRITON_INTERPRET=1`` it makes vLLM's kernels run here.

Import it before vLLM. A test harness, nothing that anybody should serve with.
"""

from __future__ import annotations

import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
from triton.backends import Backend, backends
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


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


backends["cpu"] = Backend(Compiler, Driver)  # type: ignore[arg-type]
