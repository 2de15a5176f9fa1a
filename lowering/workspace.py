"""The one buffer that holds the rows which generated refresh operators write."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

ROW_ALIGNMENT = 128  # bytes: a row never shares a cache line with another


class Workspace:
    """Grows to the largest binding; every capacity takes its rows from the same memory.

    Captured graphs of one compiled loop never run at the same time, and each writes its rows before it reads them.
    """

    def __init__(self) -> None:
        self.chunks: dict[torch.device, Tensor] = {}

    def start(self) -> Rows:
        """Begin to carve rows for one binding."""
        return Rows(self)

    def memory(self, device: torch.device, end: int) -> Tensor:
        """At least ``end`` bytes on ``device``. A larger chunk replaces the old one, which its graphs keep alive."""
        chunk = self.chunks.get(device)
        if chunk is None or chunk.numel() < end:
            chunk = torch.zeros(max(end, 1 << 16), dtype=torch.uint8, device=device)
            self.chunks[device] = chunk
        return chunk

    def shrink(self) -> None:
        """Let go of the memory; bound callables keep what they hold alive."""
        self.chunks.clear()

    @property
    def num_bytes(self) -> int:
        """Bytes held now."""
        return sum(chunk.numel() for chunk in self.chunks.values())


class Rows:
    """Hands out rows at aligned offsets."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self.offset = 0

    def take(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """The next row: a dense tensor of ``shape`` and ``dtype``."""
        size = prod(shape) * dtype.itemsize
        start, self.offset = self.offset, -(-(self.offset + size) // ROW_ALIGNMENT) * ROW_ALIGNMENT
        chunk = self.workspace.memory(device, self.offset)
        return chunk[start : start + size].view(dtype).view(tuple(shape))
