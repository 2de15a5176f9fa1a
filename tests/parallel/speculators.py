"""Small draft loops over several ranks.

R requests, T tokens, H hidden, V vocabulary, W ranks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import _functional_collectives as collectives

from draftfuse import DraftInputs, ops
from draftfuse.reference.eagle import EagleSpeculator
from draftfuse.reference.llama import Limits, layer_shapes, random_weights, small_config
from draftfuse.reference.parallel import ParallelEagleSpeculator, parallel_argmax
from tests.failures.small import Small, WindowMetadata

CONFIG = small_config(num_heads=4, num_kv_heads=4)


class ParallelSmall(Small):
    """:class:`Small` with the matrix behind attention split by columns and the vocabulary by rows."""

    def __init__(self, group: Any = None, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.group = dist.group.WORLD if group is None else group
        rank, ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.first, self.last = (round(r * 8 / ranks) for r in (rank, rank + 1))
        self.rows = self.embed.chunk(ranks)[rank]
        self.first_token = sum(part.shape[0] for part in self.embed.chunk(ranks)[:rank])

    def forward(self, inputs: DraftInputs, metadata: Mapping[str, WindowMetadata]) -> tuple[Tensor, Tensor]:
        meta, x = metadata["draft"], self.enter(inputs)
        heads = x.view(-1, 2, 4)
        ops.write_kv(heads, heads * 0.5, self.key, self.value, meta.slot_mapping)
        starts = None if x.shape[0] == meta.seq_lens.shape[0] else inputs.query_start_loc
        seen = ops.paged_attention(heads, self.key, self.value, meta.block_table, meta.seq_lens, starts, 0.5)
        part = seen.flatten(1)[:, self.first : self.last] @ self.mix[self.first : self.last]
        hidden = torch.tanh(x + self.reduced(part))
        if starts is None:
            hidden = hidden + (meta.start * 0.01 + meta.length * 0.1).unsqueeze(1).to(hidden.dtype)
        return hidden, torch.tanh(hidden)

    def reduced(self, part: Tensor) -> Tensor:
        """The sum over ranks, as a user writes it who never heard of functional collectives."""
        dist.all_reduce(part, group=self.group)
        return part

    def sample(self, hidden: Tensor, step: int) -> Tensor:
        return parallel_argmax(F.linear(hidden, self.rows), self.first_token, self.group)


class Twice(ParallelSmall):
    """Reduces the same value twice, and once more for nothing."""

    def reduced(self, part: Tensor) -> Tensor:
        first = collectives.wait_tensor(collectives.all_reduce(part, "sum", self.group))
        second = collectives.wait_tensor(collectives.all_reduce(part, "sum", self.group))
        collectives.wait_tensor(collectives.all_reduce(part, "max", self.group))
        return (first + second) / 2


class Branching(ParallelSmall):
    """One more all-reduce on rank 1."""

    def sample(self, hidden: Tensor, step: int) -> Tensor:
        if dist.get_rank(self.group) == 1:
            hidden = hidden + 0 * super().reduced(hidden.clone())
        return super().sample(hidden, step)


class BadBranch(ParallelSmall):
    """Branches on the rank without another collective: only the lint can know."""

    def sample(self, hidden: Tensor, step: int) -> Tensor:
        if dist.get_rank(self.group) == 0:
            hidden = hidden * 1.0
        return super().sample(hidden, step)


class Faulty(ParallelSmall):
    """Brings a tensor to the host, on rank 1 alone: a build that fails there."""

    def enter(self, inputs: DraftInputs) -> Tensor:
        x = super().enter(inputs)
        return x.cpu() if self.first_token > 0 else x


class Coupled(Small):
    """Data parallel: ranks have batches of their own, and a feature that all of them add to, of a fixed size."""

    group: Any = None

    def enter(self, inputs: DraftInputs) -> Tensor:
        x = super().enter(inputs)
        total = x.mean(0)
        dist.all_reduce(total, group=self.group)
        return x + 0.1 * total


ARMED: dict[str, Any] = {}  # rank, step, how (die or sleep), seconds


@torch.library.custom_op("draftfuse_test::stumble", mutates_args=())
def stumble(x: Tensor, step: int) -> Tensor:
    """A copy of ``x``; what :data:`ARMED` says happens at its draft step."""
    if ARMED.get("step") == step and dist.get_rank() == ARMED["rank"]:
        if ARMED["how"] == "die":
            os._exit(7)
        ARMED["step"] = None
        time.sleep(ARMED["seconds"])
    return x.clone()


@stumble.register_fake
def _(x: Tensor, step: int) -> Tensor:
    return torch.empty_like(x)


class Stumbling(ParallelSmall):
    """May be late, or dead, in front of the all-reduce of its sampling."""

    def sample(self, hidden: Tensor, step: int) -> Tensor:
        return super().sample(torch.ops.draftfuse_test.stumble(hidden, step), step)


def limits() -> Limits:
    """Of the EAGLE heads below."""
    return Limits(num_speculative_tokens=4, max_num_reqs=4, max_model_len=64)


def parallel_eagle(group: Any) -> ParallelEagleSpeculator:
    """The weights of :meth:`EagleSpeculator.random`, split over ``group``."""
    table = (CONFIG.vocab_size, CONFIG.hidden_size)
    shapes: dict[str, tuple[int, ...]]
    shapes = {"embed_tokens": table, "lm_head": table, "fc.weight": (CONFIG.hidden_size, 2 * CONFIG.hidden_size)}
    weights = random_weights(shapes | layer_shapes(CONFIG, "layers.0.", input_norm=False), 0)
    return ParallelEagleSpeculator(CONFIG, weights, weights["embed_tokens"], weights["lm_head"], limits(), group)


def single_eagle() -> EagleSpeculator:
    """The same head on one rank."""
    return EagleSpeculator.random(CONFIG, limits(), seed=0)
