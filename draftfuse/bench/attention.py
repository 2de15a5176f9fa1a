"""Attention of the measured speculators: draftfuse's Triton operator, or FlashAttention 3 where it is installed.

Shapes: T tokens, Q query heads, D head size, N pages, P slots a page, G KV heads.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from draftfuse.errors import InvalidOptionError
from draftfuse.lowering.backends.paged import PagedBuilder, PagedMetadata, attend_paged
from draftfuse.speculator import MetadataBuilder

BACKENDS = ("triton", "fa3")


class Backend(Protocol):
    """A metadata builder and the attention that reads its metadata."""

    @property
    def builder(self) -> MetadataBuilder:
        """Builds what :meth:`attend` reads."""

    def attend(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, metadata: Any) -> Tensor:
        """Attention of [T, Q, D] over the pages; ``metadata`` is what the builder made, with a ``slot_mapping``."""


class TritonAttention:
    """``draftfuse.ops.paged_attention``: Triton on CUDA, plain PyTorch on the CPU."""

    def __init__(self, head_size: int) -> None:
        self.builder, self.scale = PagedBuilder(), head_size**-0.5

    def attend(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, metadata: PagedMetadata) -> Tensor:
        """Paged attention at this backend's scale."""
        return attend_paged(query, key_cache, value_cache, metadata, self.scale)


def backend_named(name: str, heads: int, kv_heads: int, head_size: int) -> Backend:
    """The backend ``"triton"`` or ``"fa3"``.

    Raises:
        InvalidOptionError: another name.
    """
    if name == "triton":
        return TritonAttention(head_size)
    todo = "Pass one of these."
    raise InvalidOptionError("unknown attention backend", repr(name), f"one of {list(BACKENDS)}", todo)
