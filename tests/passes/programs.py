"""Random straight-line programs over a few buffers and local tensors: views, in-place writes, opaque operators.

A program is a list of :class:`Statement`; all numbers that it computes are small integers, exact in every dtype.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from tests.passes.helpers import add_in, at, log, numbers, peek, peek_hidden

PHASES = ("slot_mapping", "refresh", "forward", "sample", "advance", "")
LOCALS = 4


@dataclass(frozen=True)
class Statement:
    """One line: what it does (an index into WRITES or MAKES), where in the loop, and the seed of its operands."""

    kind: int
    phase: str
    step: int
    seed: int


def buffers() -> list[Tensor]:
    """What a program runs on; the last two are views of the first."""
    base = numbers(24)
    return [base[:16], numbers(16, first=30), numbers(12, torch.int64), numbers(16).view(4, 4), base[4:12], base[16:]]


def draw(seed: int, length: int) -> list[Statement]:
    """The program of ``seed``."""
    r = random.Random(seed)
    return [Statement(r.randrange(KINDS), r.choice(PHASES), r.randint(1, 3), r.getrandbits(30)) for _ in range(length)]


def run(program: list[Statement], *tensors: Tensor) -> None:
    """Execute ``program`` on ``tensors`` and the locals that it makes."""
    made: list[Tensor] = []
    for line in program:
        r = random.Random(line.seed)
        target, source = view(r, r.choice([*tensors, *made])), view(r, r.choice([*tensors, *made]))
        if any(stride == 0 and size > 1 for size, stride in zip(target.shape, target.stride(), strict=True)):
            target = tensors[0]
        with at(line.phase, line.step):
            if line.kind < len(WRITES):
                WRITES[line.kind](target, fitted(source, target), r)
            else:
                made = [*made, MAKES[line.kind - len(WRITES)](source, r)][-LOCALS:]


def view(r: random.Random, tensor: Tensor) -> Tensor:
    """``tensor`` behind up to three views."""
    for _ in range(r.randrange(4)):
        many = FLAT if tensor.dim() == 1 else SQUARE
        if tensor.numel() > 1 and tensor.dim() in (1, 2):
            tensor = r.choice(many)(tensor, r)
    return tensor


def cut(t: Tensor, r: random.Random) -> Tensor:
    start = r.randrange(t.shape[0])
    return t[start : r.randrange(start + 1, t.shape[0] + 1) : r.choice([1, 1, 2])]


def even(t: Tensor) -> Tensor:
    return t if t.shape[0] % 2 == 0 else t[1:]


FLAT: list[Callable[[Tensor, random.Random], Tensor]] = [
    cut,
    cut,
    lambda t, r: even(t).view(2, -1) if even(t).numel() else t,
    lambda t, r: even(t).view(2, -1).t() if even(t).numel() else t,
    lambda t, r: t.unsqueeze(r.randrange(2)),
    lambda t, r: t.split(-(-t.shape[0] // 2))[-1],
    lambda t, r: t[:1].expand(3),
    lambda t, r: t.as_strided((-(-t.shape[0] // 2),), (2 * t.stride(0),), t.storage_offset()),
]
SQUARE: list[Callable[[Tensor, random.Random], Tensor]] = [
    lambda t, r: t.t(),
    lambda t, r: t[r.randrange(t.shape[0])],
    lambda t, r: t.unbind(1)[r.randrange(t.shape[1])],
    lambda t, r: t[:, r.randrange(t.shape[1]) :],
    lambda t, r: t[1:, ::2] if t.shape[0] > 1 else t,
    lambda t, r: t.reshape(-1),
    lambda t, r: t.diagonal(),
]


def fitted(source: Tensor, target: Tensor) -> Tensor:
    """A value of the shape and dtype of ``target`` from the elements of ``source``."""
    flat = source.clone().reshape(-1) if shares(source, target) else source.reshape(-1)
    count = prod(target.shape)
    return flat.repeat(-(-count // flat.shape[0]))[:count].view(target.shape).to(target.dtype)


def shares(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


WRITES: list[Callable[[Tensor, Tensor, random.Random], object]] = [
    lambda t, x, r: t.copy_(x),
    lambda t, x, r: t.copy_((x * 2).remainder(31)),
    lambda t, x, r: t.add_(x, alpha=2).remainder_(89),
    lambda t, x, r: t.mul_(3).remainder_(53),
    lambda t, x, r: t.fill_(r.randrange(9)),
    lambda t, x, r: t.zero_(),
    lambda t, x, r: t.masked_fill_(x > 4, 2),
    lambda t, x, r: t.clamp_(max=11),
    lambda t, x, r: t.eq_(x),
    lambda t, x, r: t.index_fill_(0, torch.arange(t.shape[0])[:2], 5) if t.dim() else t,
    lambda t, x, r: torch.add(x, 1, out=t),
    lambda t, x, r: t.copy_(t),
    lambda t, x, r: log(x, t),
    lambda t, x, r: add_in(t, x),
]
MAKES: list[Callable[[Tensor, random.Random], Tensor]] = [
    lambda x, r: x,
    lambda x, r: x.clone(),
    lambda x, r: (x + 1).remainder(23),
    lambda x, r: torch.zeros(8, dtype=x.dtype),
    lambda x, r: torch.full((4, 4), float(r.randrange(5))),
    lambda x, r: torch.sort(x.reshape(-1)).values,
    lambda x, r: x.reshape(-1).topk(1).indices,
    lambda x, r: peek(x).remainder(41),
    lambda x, r: peek_hidden(x).remainder(29).to(x.dtype),
]
KINDS = len(WRITES) + len(MAKES)
