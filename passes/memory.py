"""How tensors lie in memory: what part of a storage a view covers, in which order, and what may not move elsewhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from draftfuse.passes import ir

# Views that name places of the storage. A value has a layout of its own: on it they would read something else.
LAYOUT_VIEWS = (torch.ops.aten.as_strided.default, torch.ops.aten._reshape_alias.default)


def geometry(val: Tensor) -> tuple[Any, ...]:
    """What part of its storage a tensor covers, and how: dtype, lazy bits, sizes, strides, offset (as expressions)."""
    numbers = [*val.shape, *val.stride(), val.storage_offset()]
    return (val.dtype, val.is_conj(), val.is_neg(), *map(ir.expression, numbers))


def hint(number: Any) -> int:
    """A size as an integer: the one that was traced with, where it is symbolic."""
    return int(number.node.hint) if isinstance(number, torch.SymInt) else int(number)


def memory_order(val: Tensor) -> list[int]:
    """Dimensions from the outermost in memory to the innermost, without those that no stride places."""
    sizes, strides = list(map(hint, val.shape)), list(map(hint, val.stride()))
    placed = [dim for dim in range(val.dim()) if sizes[dim] != 1 and strides[dim] != 0]
    return sorted(placed, key=lambda dim: -strides[dim])


def is_expanded(node: fx.Node) -> bool:
    """Whether several elements of ``node`` are one place in memory."""
    val = node.meta["val"]
    pairs = zip(val.shape, val.stride(), strict=True) if isinstance(val, Tensor) else ()
    return any(ir.expression(stride) == 0 and ir.expression(size) != 1 for size, stride in pairs)


def pinned_storages(graph: fx.Graph) -> set[int]:
    """Storages that no other memory can stand for: some node writes them, or names places of them."""
    named = {key for node in graph.nodes if node.target in LAYOUT_VIEWS for key in ir.storages(node)}
    return ir.mutated_storages(graph) | named


def may_overlap(a: fx.Node, b: fx.Node) -> bool:
    """Whether two tensors can share an element: they are of one storage, and may lie together in it."""
    if ir.storage(a) is None or ir.storage(a) != ir.storage(b):
        return False
    (begin, end), (other_begin, other_end) = (_span(n) or _span(ir.root(n)) or (0, float("inf")) for n in (a, b))
    return begin < other_end and other_begin < end


def _span(node: fx.Node) -> tuple[int, int] | None:
    """First byte and end of the memory that a tensor covers in its storage; None where that is not known."""
    val = ir.value(node)
    numbers = [*val.shape, *val.stride(), val.storage_offset()]
    if not all(isinstance(n, int) for n in numbers) or 0 in val.shape:
        return None
    last = val.storage_offset() + sum((s - 1) * t for s, t in zip(val.shape, val.stride(), strict=True))
    return val.storage_offset() * val.element_size(), (last + 1) * val.element_size()
