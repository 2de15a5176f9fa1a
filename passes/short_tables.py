"""Largest index that positions give, followed through integer arithmetic: a table shorter than that is a fault."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import fx

from draftfuse.passes import ir

aten = torch.ops.aten
Bounds = dict[fx.Node, int]  # value -> the largest number that it can hold


def short_tables(graph: fx.Graph, positions: Collection[str], max_model_len: int) -> Iterator[tuple[fx.Node, int, int]]:
    """Reads of a table by positions that it is too short for: (node, rows that it has, rows that it needs).

    Positions enter below ``max_model_len``; an unconditional ``positions += c`` in the loop raises what later steps
    may hold, a masked advance does not.
    """
    names = {ir.storage(n) for n in ir.placeholders(graph) if n.name in positions}
    bounds: Bounds = {}
    largest = max_model_len - 1
    for node in graph.nodes if max_model_len > 0 and names else ():
        if ir.is_mutation(node) and ir.storage(ir.written(node)[0]) in names:
            largest += _increment(node)
            bounds = {n: b for n, b in bounds.items() if ir.storage(n) not in names}
        elif ir.is_tensor(node) and ir.storage(node) in names:
            bounds[node] = largest
        elif node.op == "call_function":
            bound = _bound_of(node, bounds)
            if bound is not None:
                bounds[node] = bound
        yield from _reads(node, bounds, names, largest)


def _increment(node: fx.Node) -> int:
    given = node.args[1] if len(node.args) > 1 else 0
    return given if node.target is aten.add_.Tensor and isinstance(given, int) else 0


def _reads(
    node: fx.Node, bounds: Bounds, names: Collection[int | None], largest: int
) -> Iterator[tuple[fx.Node, int, int]]:
    for table, dim, index in _lookups(node):
        if ir.storage(index) in names:
            bounds[index] = largest
        rows = ir.value(table).shape[dim] if ir.is_tensor(table) and ir.value(table).dim() > dim else None
        if index in bounds and isinstance(rows, int) and bounds[index] >= rows:
            yield node, rows, bounds[index] + 1


def _lookups(node: fx.Node) -> Iterator[tuple[fx.Node, int, fx.Node]]:
    """(table, dim, index) of each indexed read."""
    if node.op != "call_function" or not node.args:
        return
    args: Any = node.args
    if node.target is aten.embedding.default:
        yield args[0], 0, args[1]
    elif node.target is aten.index_select.default or node.target is aten.gather.default:
        yield args[0], args[1], args[2]
    elif node.target is aten.index.Tensor:
        yield from ((args[0], dim, i) for dim, i in enumerate(args[1]) if isinstance(i, fx.Node))


def _bound_of(node: fx.Node, bounds: Bounds) -> int | None:
    """The largest value of ``node``, None where that is not known."""
    if not node.args or not isinstance(node.args[0], fx.Node):
        return None
    if node.target in (aten.where.self, aten.where.ScalarOther):
        sides = [_side(a, bounds) for a in node.args[1:3]]
        return None if None in sides else max(s for s in sides if s is not None)
    first = bounds.get(node.args[0])
    rule = _RULES.get(node.target)
    if first is None or (rule is None and not _keeps(node)):
        return None
    return first if rule is None else rule(first, *node.args[1:], **node.kwargs)


def _side(arg: Any, bounds: Bounds) -> int | None:
    if isinstance(arg, fx.Node) and arg not in bounds and arg.target in (aten.scalar_tensor.default, aten.full.default):
        arg = arg.args[0 if arg.target is aten.scalar_tensor.default else 1]
    return arg if isinstance(arg, int) else bounds.get(arg)


def _keeps(node: fx.Node) -> bool:
    return ir.is_view(node) or node.target in (aten._to_copy.default, aten.clone.default, aten.expand.default)


def _add(first: int, other: Any, alpha: int = 1) -> int | None:
    return first + other * alpha if isinstance(other, int) else None


def _sub(first: int, other: Any, alpha: int = 1) -> int | None:
    return first - other * alpha if isinstance(other, int) else None


def _mul(first: int, other: Any) -> int | None:
    return first * other if isinstance(other, int) and other >= 0 else None


def _floor(first: int, other: Any, rounding_mode: str | None = None) -> int | None:
    return first // other if isinstance(other, int) and other > 0 else None


def _rest(first: int, other: Any) -> int | None:
    return min(first, other - 1) if isinstance(other, int) and other > 0 else None


def _clamp(first: int, low: Any = None, high: Any = None, **named: Any) -> int | None:
    low, high = named.get("min", low), named.get("max", high)
    if not all(isinstance(b, int) or b is None for b in (low, high)):
        return None
    first = first if low is None else max(first, low)
    return first if high is None else min(first, high)


def _at_most(first: int, high: Any) -> int | None:
    return min(first, high) if isinstance(high, int) else None


_RULES: dict[Any, Callable[..., int | None]] = {
    aten.add.Tensor: _add,
    aten.sub.Tensor: _sub,
    aten.mul.Tensor: _mul,
    aten.floor_divide.default: _floor,
    aten.div.Tensor_mode: _floor,
    aten.remainder.Scalar: _rest,
    aten.clamp.default: _clamp,
    aten.clamp_max.default: _at_most,
}
