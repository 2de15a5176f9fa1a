"""The layers of the measured speculators: plain PyTorch, random weights, KV in pages.

Shapes: T tokens, H hidden, Q query heads, G KV heads, D head size, L max_model_len, N pages, P slots a page.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftfuse.bench.attention import Backend
from draftfuse.ops import write_kv

EPSILON, ROPE_THETA = 1e-5, 500_000.0
Mlp = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Widths:
    """Sizes of a speculator; ``experts`` is 0 for a dense MLP of width ``mlp``."""

    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    mlp: int
    vocab: int
    layers: int = 1
    experts: int = 0
    active: int = 0
    expert_mlp: int = 0


class Maker:
    """Makes random tensors on one device and counts the bytes of those that every step reads."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int = 0) -> None:
        self.device, self.dtype, self.num_bytes = device, dtype, 0
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Normal values; not counted."""
        new = torch.empty(shape, dtype=self.dtype, device=self.device)
        return new.normal_(generator=self.generator).mul_(scale)

    def weight(self, *shape: int) -> Tensor:
        """A matrix whose product keeps the scale of what it multiplies; counted."""
        new = self.normal(*shape, scale=shape[-1] ** -0.5)
        self.num_bytes += new.numel() * new.element_size()
        return new

    def gain(self, size: int) -> Tensor:
        """The weight of a norm; counted."""
        new = 1 + self.normal(size, scale=0.1)
        self.num_bytes += new.numel() * new.element_size()
        return new

    def permutation(self, size: int) -> Tensor:
        """0..size-1 shuffled."""
        return torch.randperm(size, generator=self.generator, device=self.device)


def rms_norm(x: Tensor, gain: Tensor) -> Tensor:
    """Root-mean-square norm in float32."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON)
    return scaled.to(x.dtype) * gain


def rope_table(max_model_len: int, head_size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """[L, D]: cosines, then sines, of each position."""
    inverse = ROPE_THETA ** -(torch.arange(0, head_size, 2, device=device).float() / head_size)
    angles = torch.arange(max_model_len, device=device).float()[:, None] * inverse
    return torch.cat([angles.cos(), angles.sin()], dim=-1).to(dtype)


def rope(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate the halves of each head; ``x`` is [T, heads, D], ``angles`` rows of :func:`rope_table`."""
    cos, sin = angles.unsqueeze(1).chunk(2, dim=-1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Attention:
    """Fused qkv product, rope, KV write, paged attention, output product."""

    def __init__(
        self, make: Maker, w: Widths, inputs: int, table: Tensor, pages: tuple[int, int], backend: Backend
    ) -> None:
        self.w, self.table, self.backend = w, table, backend
        self.qkv = make.weight((w.heads + 2 * w.kv_heads) * w.head_size, inputs)
        self.out = make.weight(w.hidden, w.heads * w.head_size)
        self.key_cache = make.normal(*pages, w.kv_heads, w.head_size)
        self.value_cache = make.normal(*pages, w.kv_heads, w.head_size)

    def __call__(self, x: Tensor, positions: Tensor, metadata: Any) -> Tensor:
        w = self.w
        heads = F.linear(x, self.qkv).view(-1, w.heads + 2 * w.kv_heads, w.head_size)
        query, key, value = torch.split(heads, [w.heads, w.kv_heads, w.kv_heads], dim=1)
        angles = self.table[positions]
        query, key = rope(query, angles), rope(key, angles)
        write_kv(key, value, self.key_cache, self.value_cache, metadata.slot_mapping)
        mixed = self.backend.attend(query, self.key_cache, self.value_cache, metadata)
        return F.linear(mixed.flatten(1), self.out)


class SwiGLU:
    """Fused gate-up product, SiLU, down product."""

    def __init__(self, make: Maker, hidden: int, mlp: int) -> None:
        self.gate_up, self.down = make.weight(2 * mlp, hidden), make.weight(hidden, mlp)

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down)


class DecoderLayer:
    """Attention and MLP with their residuals; what attention reads is normed by the caller."""

    def __init__(self, make: Maker, attention: Attention, mlp: Mlp) -> None:
        self.attention, self.mlp = attention, mlp
        self.norm = make.gain(attention.w.hidden)

    def __call__(self, x: Tensor, residual: Tensor, positions: Tensor, metadata: Any) -> Tensor:
        hidden = residual + self.attention(x, positions, metadata)
        return hidden + self.mlp(rms_norm(hidden, self.norm))
