"""The EAGLE head of this package over several ranks: Megatron-style tensor parallelism on functional collectives.

Query, key and value heads, gate and up are split by rows, ``o`` and ``down`` by columns, so that a layer needs two
all-reduces; ``lm_head`` is split by vocabulary, and the likeliest token comes out of one small all-reduce instead of a
gather of logits. Every rank holds the same inputs and drafts the same tokens.

R requests, T tokens, H hidden, V vocabulary, W ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import _functional_collectives as collectives

from draftfuse.errors import InvalidOptionError
from draftfuse.models import ModelConfig
from draftfuse.reference.eagle import EagleSpeculator, packaged_head
from draftfuse.reference.llama import DecoderLayer, Limits, Weights

ROW_PARALLEL, COLUMN_PARALLEL = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")


def shard_config(config: ModelConfig, world_size: int) -> ModelConfig:
    """The sizes of one rank's part.

    Raises:
        InvalidOptionError: heads, MLP or vocabulary do not divide by ``world_size``.
    """
    names = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
    for name in names:
        if getattr(config, name) % world_size:
            todo = "Use a number of ranks that divides it."
            raise InvalidOptionError(f"{name} cannot be split", getattr(config, name), f"n * {world_size}", todo)
    parts = {name: getattr(config, name) // world_size for name in names if name != "vocab_size"}
    return ModelConfig(**{**vars(config), **parts})


def shard_weights(weights: Weights, rank: int, world_size: int) -> dict[str, Tensor]:
    """The part of ``weights`` (transformers' names) that ``rank`` of ``world_size`` holds."""

    def part(name: str, weight: Tensor) -> Tensor:
        if any(p in name for p in ROW_PARALLEL):
            return weight.chunk(world_size, dim=0)[rank].contiguous()
        return weight.chunk(world_size, dim=1)[rank].contiguous() if any(p in name for p in COLUMN_PARALLEL) else weight

    return {name: part(name, weight) for name, weight in weights.items()}


def all_reduce(x: Tensor, group: Any, operation: str = "sum") -> Tensor:
    """The reduction of ``x`` over ``group``, as a new tensor, ready."""
    reduced: Tensor = collectives.wait_tensor(collectives.all_reduce(x, operation, group))
    return reduced


class AllReduced:
    """A decoder layer of which this rank has a part: an all-reduce behind attention, another behind the MLP."""

    group: Any = None

    def reduced(self, x: Tensor) -> Tensor:
        """The sum of the parts, the same on every rank."""
        return all_reduce(x, self.group)


class ParallelDecoderLayer(AllReduced, DecoderLayer):
    """A rank's part of :class:`DecoderLayer`."""


class ParallelEagleSpeculator(EagleSpeculator):
    """:class:`EagleSpeculator`, greedy, split over the ranks of ``group``.

    Args:
        config, weights, embed, lm_head: of the whole head, as for :class:`EagleSpeculator`.
        group: the process group of these ranks; NCCL for CUDA tensors, gloo for CPU ones.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        embed: Tensor,
        lm_head: Tensor,
        limits: Limits,
        group: Any,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        rank, world_size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
        part = shard_config(config, world_size)
        own = shard_weights(weights, rank, world_size)
        rows = lm_head.chunk(world_size)[rank].contiguous()
        super().__init__(part, own, embed, rows, limits, device, dtype)
        self.group, self.first_token = group, rank * rows.shape[0]
        self.layer = ParallelDecoderLayer(own, "layers.0.", part, self.layer.cache)
        self.layer.group = group

    @classmethod
    def split_packaged(
        cls, limits: Limits, group: Any, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> ParallelEagleSpeculator:
        """The trained head that ships with draftfuse, split over ``group`` (of one or two ranks)."""
        return cls(*packaged_head(device, dtype), limits, group, device, dtype)

    def sample(self, hidden: Tensor, step: int) -> Tensor:
        """The likeliest token of the whole vocabulary; the lower id where two are equally likely."""
        return parallel_argmax(F.linear(hidden, self.lm_head), self.first_token, self.group)


def parallel_argmax(logits: Tensor, first_token: int, group: Any) -> Tensor:
    """i64[R] over ranks from each rank's [R, V / W]: one all-reduce of R numbers.

    A logit's bits, made to sort as integers, stand above the token's id counted from the end: the maximum of these is
    that of the largest logit, and of the lowest id among equals.
    """
    best, index = logits.float().max(dim=-1)
    bits = best.view(torch.int32).to(torch.int64)
    ordered = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    packed = (ordered << 32) + (0xFFFFFFFF - (index + first_token))
    return 0xFFFFFFFF - (all_reduce(packed, group, "max") & 0xFFFFFFFF)
