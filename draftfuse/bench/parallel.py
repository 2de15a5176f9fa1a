"""The measured EAGLE head split over ranks: two all-reduces a layer, one of a number a request for the likeliest token.

Every rank draws the whole random weights and KV and keeps its part, so the head is that of one device, split.

Shapes: R requests, T tokens, H hidden, M KV heads.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from draftfuse.bench.attention import Backend
from draftfuse.bench.layers import BenchLayer
from draftfuse.bench.speculators import EagleHead
from draftfuse.models import ModelConfig
from draftfuse.reference.llama import Limits
from draftfuse.reference.parallel import AllReduced, parallel_argmax, shard_config, shard_weights


class ParallelLayer(AllReduced, BenchLayer):
    """A rank's part of a layer."""


class ParallelHead(EagleHead):
    """:class:`EagleHead` over the ranks of ``group``; ``backend`` is for one rank's heads."""

    def __init__(
        self,
        config: ModelConfig,
        limits: Limits,
        backend: Backend,
        device: torch.device,
        dtype: torch.dtype,
        group: Any,
    ) -> None:
        self.group, self.rank, self.world_size = group, dist.get_rank(group), dist.get_world_size(group)
        super().__init__(config, limits, backend, device, dtype)
        self.lm_head = self.lm_head.chunk(self.world_size)[self.rank].clone()
        self.first_token = self.rank * self.lm_head.shape[0]

    def build_layers(self) -> list[BenchLayer]:
        """This rank's part of the one layer."""
        self.embedding_norm, self.hidden_norm = self.gains(), self.gains()
        weights = shard_weights(self.make.weights(self.layer_shapes()), self.rank, self.world_size)
        keys, values = (c.chunk(self.world_size, 2) for c in self.make.cache(self.config, self.limits))
        cache = keys[self.rank].contiguous(), values[self.rank].contiguous()
        layer = ParallelLayer(weights, "", shard_config(self.config, self.world_size), cache, self.backend)
        layer.group = self.group
        return [layer]

    def sample(self, hidden: Tensor, step: int) -> Tensor:
        """The likeliest token of the whole vocabulary."""
        return parallel_argmax(self.logits(hidden), self.first_token, self.group)
