"""``marker(value)``: names the draft's forward to a compiler pass, which is told nothing else about the model it sees.

vLLM's plug-in passes one activation of the draft model through it; ``draftfuse.post_grad_pass`` recognises the graph by
it and takes it out again. Shape letters: ``...`` any shape.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftfuse.lowering.ops._library import define, fake, implement


def reference(value: Tensor) -> Tensor:
    """A copy of ``value``: what the marker costs in a graph that nobody took it out of."""
    return value.clone()


def _fake(value: Tensor) -> Tensor:
    return torch.empty_like(value)


define("marker(Tensor value) -> Tensor")
implement("marker", reference, "CPU", "CUDA")
fake("marker", _fake)


def marker(value: Tensor) -> Tensor:
    """Pass ``value`` (any tensor) through the marker of a draft's forward."""
    marked: Tensor = torch.ops.draftfuse.marker(value)
    return marked
