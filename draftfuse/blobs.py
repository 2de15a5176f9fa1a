"""Opaque blobs with absolute pointers inside: copying one elsewhere gives a plan that points at dead memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from draftfuse import loop
from draftfuse.errors import UnsafeLoopError
from draftfuse.validate import source_of

LARGEST = 1 << 16  # bytes of a blob that is looked into
_WORD = 8


def refuse_pointers(metadata: dict[str, Any], builders: Iterable[Any]) -> None:
    """Raise :class:`UnsafeLoopError` if a metadata tensor holds the address of another one.

    A split loop copies fresh metadata over the old; a blob with pointers is only right where its backend put it, so
    it has to come from a builder that refreshes it in place.
    """
    if all(hasattr(b, "refresh") for b in builders):
        return
    for layer, name in pointing(metadata):
        raise UnsafeLoopError(
            f"metadata.{layer}.{name} holds absolute addresses",
            "a blob that points at other metadata",
            "tensors that mean the same wherever they are copied",
            "Offer refresh(metadata, common) made of the backend's own registered operator.",
            source_of(type(next(iter(metadata.values())))),
        )


def pointing(metadata: dict[str, Any]) -> list[tuple[str, str]]:
    """Layer and name of each metadata tensor that holds the address of another one."""
    named = [((layer, name), t) for layer, m in metadata.items() for name, t in loop.metadata_tensors(m)]
    ranges = [(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for _, t in named]
    filled = [r for r in ranges if r[1] > 0 and r[0] > 0]
    return [place for place, tensor in named if _holds_address(tensor, filled)]


def _holds_address(tensor: Tensor, ranges: list[tuple[int, int]]) -> bool:
    """Whether a small integer tensor holds a word that lies inside one of ``ranges``."""
    size = tensor.numel() * tensor.element_size()
    if tensor.is_floating_point() or not tensor.is_contiguous() or not _WORD <= size <= LARGEST:
        return False
    raw = tensor.detach().cpu().flatten().view(torch.uint8)
    words = raw[: size // _WORD * _WORD].clone().view(torch.int64)
    return any(bool(((words >= start) & (words < start + length)).any()) for start, length in ranges)
