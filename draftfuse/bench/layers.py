"""Random weights on the device, and the decoder layer of the measured speculators.

Shapes: T tokens, H hidden, Q query heads, D head size, A experts of a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftfuse.bench.attention import Backend
from draftfuse.models import ModelConfig
from draftfuse.reference.llama import Cache, DecoderLayer, Limits, Shapes, Weights


class Maker:
    """Makes random tensors on one device and counts the bytes of the weights that every step reads."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int = 0) -> None:
        self.device, self.dtype, self.num_bytes = device, dtype, 0
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Normal values; not counted."""
        new = torch.empty(shape, dtype=self.dtype, device=self.device)
        return new.normal_(generator=self.generator).mul_(scale)

    def weight(self, *shape: int) -> Tensor:
        """A matrix whose product keeps the scale of what it multiplies, or the gains of a norm; counted."""
        new = 1 + self.normal(*shape, scale=0.1) if len(shape) == 1 else self.normal(*shape, scale=shape[-1] ** -0.5)
        self.num_bytes += new.numel() * new.element_size()
        return new

    def weights(self, shapes: Shapes) -> Weights:
        """All weights of ``shapes``."""
        return {name: self.weight(*shape) for name, shape in shapes.items()}

    def cache(self, config: ModelConfig, limits: Limits) -> Cache:
        """Random keys and values of one layer, room for every request."""
        shape = (limits.max_num_reqs * limits.blocks, limits.page_size, config.num_key_value_heads, config.head_dim)
        return self.normal(*shape), self.normal(*shape)

    def permutation(self, size: int) -> Tensor:
        """0..size-1 shuffled."""
        return torch.randperm(size, generator=self.generator, device=self.device)


class BenchLayer(DecoderLayer):
    """The reference layer with an attention backend of choice; attention may read something else than the residual."""

    def __init__(self, weights: Weights, prefix: str, config: ModelConfig, cache: Cache, backend: Backend) -> None:
        super().__init__(weights, prefix, config, cache)
        self.backend = backend

    def look_up(self, query: Tensor, metadata: Any) -> Tensor:
        """Paged attention of [T, Q, D] by the backend."""
        return self.backend.attend(query, *self.cache, metadata)


@dataclass(frozen=True)
class Experts:
    """Routed experts of an MLP: how many there are, how many a token uses, how wide each is."""

    count: int = 64
    active: int = 6
    width: int = 1408

    def distinct(self, tokens: int) -> float:
        """How many experts ``tokens`` tokens use together, if each chooses at random."""
        return self.count * (1 - (1 - self.active / self.count) ** tokens)


class ExpertLayer(BenchLayer):
    """A decoder layer whose MLP is a shared expert and a few of many routed ones, as grouped products.

    Rows are sorted by expert on the device, so nothing syncs; experts without a row are not read. Routed experts are
    bfloat16 whatever the rest is: the grouped product takes nothing else.
    """

    def __init__(
        self, make: Maker, weights: Weights, config: ModelConfig, cache: Cache, backend: Backend, experts: Experts
    ) -> None:
        super().__init__(weights, "", config, cache, backend)
        hidden, width = config.hidden_size, experts.width
        self.experts, self.router = experts, make.weight(experts.count, hidden)
        always = make.num_bytes
        self.into = make.weight(experts.count, 2 * width, hidden).bfloat16()
        self.out_of = make.weight(experts.count, hidden, width).bfloat16()
        self.expert_bytes = (make.num_bytes - always) / experts.count
        make.num_bytes = always

    def mlp(self, x: Tensor) -> Tensor:
        """Shared expert and routed ones."""
        return super().mlp(x) + self.routed(x)

    def routed(self, x: Tensor) -> Tensor:
        """[T, H]: the sum over the A experts of each token."""
        share, chosen = F.linear(x, self.router).float().softmax(-1).topk(self.experts.active)
        ids = chosen.flatten()
        order = ids.argsort()
        numbers = torch.arange(self.experts.count, device=x.device)
        ends = torch.searchsorted(ids[order], numbers, right=True).to(torch.int32)
        rows = x.bfloat16()[order // self.experts.active]
        gate, up = F.grouped_mm(rows, self.into.mT, offs=ends).chunk(2, dim=-1)
        each = F.grouped_mm(F.silu(gate) * up, self.out_of.mT, offs=ends)[order.argsort()]
        weighted = each.view(x.shape[0], self.experts.active, -1) * share.unsqueeze(-1)
        return weighted.sum(1).to(x.dtype)
