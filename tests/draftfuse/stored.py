"""A draft loop with something of each kind that a trace may rest on, for tests of the traces on disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from draftfuse import DraftInputs
from tests.draftfuse.stored_helper import helped
from tests.failures.small import H, Small, V, WindowBuilder

FACTOR = 1.5


def bent(hidden: Tensor) -> Tensor:
    """A function that the loop finds in a module: Dynamo guards it, and it is no value of the speculator's."""
    return hidden * FACTOR


def unbent(hidden: Tensor) -> Tensor:
    """Another one."""
    return -hidden


def shifting(amount: float) -> Callable[[Tensor], Tensor]:
    """A function with a closure."""

    def shift(hidden: Tensor) -> Tensor:
        return hidden + amount

    return shift


class Stored(Small):
    """Reads an attribute, a class attribute, globals, closures, modules, tables, and tensors that may be one."""

    bias = 0.25

    def __init__(self, k: int = 3, rows: int = V) -> None:
        super().__init__(k=k, builder=WindowBuilder(5))
        generator = torch.Generator().manual_seed(3)
        self.scale, self.options, self.scales = 2.0, {"sign": 1}, [1.0] * (k + 1)
        self.shift = shifting(0.5)
        self.activation: Callable[[Tensor], Tensor] = torch.tanh
        self.embed = torch.randn(rows, H, generator=generator)
        self.left = torch.randn(H, H, generator=generator)
        self.right = torch.randn(H, H, generator=generator)
        self.shifts = [torch.full((H,), 0.5)] * (k + 1)
        self.linear = torch.nn.Linear(H, H, bias=False)
        self.linear.weight.data.copy_(torch.randn(H, H, generator=generator))

    def enter(self, inputs: DraftInputs) -> Tensor:
        """Something of everything but the tables, which depend on the step."""
        hidden = super().enter(inputs) * self.scale + self.bias
        hidden = self.activation(self.shift(bent(helped(hidden))))
        if "flip" in self.options or self.options["sign"] < 0:
            hidden = -hidden
        self.right[:1].copy_(hidden[:1])
        return self.linear(hidden @ self.left + self.right[0])

    def sample(self, hidden: Tensor, step: int) -> Tensor:
        """A number and a tensor of the step's own."""
        return super().sample(hidden * self.scales[step] + self.shifts[step], step)


class Other(Stored):
    """Another class with the same code."""


class Window(WindowBuilder):
    """The same builder under another class."""


def stored(change: Callable[[Any], object] = lambda spec: None, **options: Any) -> Stored:
    """A speculator with one thing changed."""
    spec = Stored(**options)
    change(spec)
    return spec
