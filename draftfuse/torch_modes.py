"""Settings of PyTorch for the whole process that decide what a loop computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Setting = tuple[str, Callable[..., Any], tuple[str, ...]]


def modes_of_torch() -> list[Setting]:
    """Each setting by its name, with the function that reads it: one of C, as all run before every replay."""
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    return [
        ("the default dtype of torch", torch.get_default_dtype, ()),
        ("autocast", torch._C._is_any_autocast_enabled, ()),
        ("torch.are_deterministic_algorithms_enabled()", torch._C._get_deterministic_algorithms, ()),
        *((f"the autocast dtype of {kind}", torch.get_autocast_dtype, (kind,)) for kind in devices),
    ]
