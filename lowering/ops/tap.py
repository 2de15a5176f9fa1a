"""``tap(value, name, step)``: a marker that names a value of the traced loop.

The compiler erases taps from what it ships; the audit builds the same graph with the taps kept and reads each value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftfuse.lowering.ops._library import define, fake, implement


def _nothing(value: Tensor, name: str, step: int) -> None:
    """A tap computes nothing on any device."""


define("tap(Tensor value, str name, int step) -> ()")
implement("tap", _nothing, "CPU", "CUDA")
fake("tap", _nothing)
torch.fx.node.has_side_effect(torch.ops.draftfuse.tap.default)


def tap(value: Tensor, name: str, step: int) -> None:
    """Name ``value`` (any tensor) at draft step ``step``; does nothing when it runs."""
    torch.ops.draftfuse.tap(value, name, step)
