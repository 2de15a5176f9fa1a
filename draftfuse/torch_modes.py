"""Settings of PyTorch for the whole process that decide what a loop computes."""

from __future__ import annotations

from typing import Any

import torch

_DEVICES = [kind for kind in ("cpu", "cuda") if torch._C._is_autocast_available(kind)]
_NAMES = (
    "the default dtype of torch",
    "autocast",
    "torch.are_deterministic_algorithms_enabled()",
    *(f"the autocast dtype of {kind}" for kind in _DEVICES),
)
_default_dtype, _deterministic = torch.get_default_dtype, torch._C._get_deterministic_algorithms
_autocast, _autocast_dtype = torch._C._is_any_autocast_enabled, torch.get_autocast_dtype


def modes_of_torch() -> tuple[Any, ...]:
    """Each setting now; this runs before every replay."""
    return _default_dtype(), _autocast(), _deterministic(), *map(_autocast_dtype, _DEVICES)


def changed_modes(old: tuple[Any, ...]) -> list[str]:
    """Each setting that is not what it was, as text."""
    rows = zip(_NAMES, old, modes_of_torch(), strict=True)
    return [f"{name}: traced with {was!r}, now {now!r}" for name, was, now in rows if now != was]
