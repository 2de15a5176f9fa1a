"""Attention of the measured speculators: draftfuse's Triton operator, or FlashAttention 3 where its library is.

Shapes: T tokens, Q query heads, D head size.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from draftfuse.errors import InvalidOptionError
from draftfuse.lowering.backends.flash_attn3 import FlashAttn3Builder, attend_fa3
from draftfuse.lowering.backends.paged import PagedBuilder, attend_paged
from draftfuse.models import ModelConfig
from draftfuse.speculator import MetadataBuilder

BACKENDS = ("triton", "fa3")


class Backend(Protocol):
    """A metadata builder and the attention that reads its metadata."""

    @property
    def builder(self) -> MetadataBuilder:
        """Builds what :meth:`attend` reads."""

    def attend(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, metadata: Any) -> Tensor:
        """Attention of [T, Q, D] over the pages."""


class TritonAttention:
    """``draftfuse.ops.paged_attention``: Triton on CUDA, plain PyTorch on the CPU."""

    def __init__(self, head_size: int) -> None:
        self.builder, self.scale = PagedBuilder(), head_size**-0.5

    def attend(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, metadata: Any) -> Tensor:
        """Paged attention at this backend's scale."""
        return attend_paged(query, key_cache, value_cache, metadata, self.scale)


class Fa3Attention:
    """FlashAttention 3, its schedule made ahead by a registered refresh; a stand-in on the CPU."""

    def __init__(self, config: ModelConfig, max_num_reqs: int, device: torch.device, dtype: torch.dtype) -> None:
        heads = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        self.builder = FlashAttn3Builder(*heads, dtype, max_num_reqs, device=device)
        self.scale = config.head_dim**-0.5

    def attend(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, metadata: Any) -> Tensor:
        """Paged attention by the schedule of ``metadata``."""
        return attend_fa3(query, key_cache, value_cache, metadata, self.scale)


def backend_named(
    name: str, config: ModelConfig, max_num_reqs: int, device: torch.device, dtype: torch.dtype
) -> Backend:
    """The backend ``"triton"`` or ``"fa3"``.

    Raises:
        InvalidOptionError: another name.
    """
    if name == "triton":
        return TritonAttention(config.head_dim)
    if name == "fa3":
        return Fa3Attention(config, max_num_reqs, device, dtype)
    raise InvalidOptionError("unknown attention backend", repr(name), f"one of {list(BACKENDS)}", "Pass one of these.")
