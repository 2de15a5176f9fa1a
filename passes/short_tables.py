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
    may hold, a masked advance does not, and what is written over them takes its place.
    """
    names = {ir.storage(n) for n in ir.placeholders(graph) if n.name in positions}
    bounds: Bounds = {}
    largest = max_model_len - 1
    for node in graph.nodes if max_model_len > 0 and names else ():
        if ir.is_mutation(node) and ir.storage(ir.written(node)[0]) in names:
            largest = _after(node, bounds, largest, max_model_len - 1)
            bounds = {n: largest if ir.storage(n) in names else b for n, b in bounds.items()}
        elif ir.is_tensor(node) and ir.storage(node) in names:
            bounds[node] = largest
        elif node.op == "call_function":
            bound = _bound_of(node, bounds)
            if bound is not None:
                bounds[node] = bound
        yield from _reads(node, bounds, names, largest)


def _after(node: fx.Node, bounds: Bounds, largest: int, at_entry: int) -> int:
    """What positions hold after ``node`` wrote them; rows that it left out still hold what they came with."""
    given = node.args[1] if len(node.args) > 1 else 0
    if node.target is aten.copy_.default and isinstance(given, fx.Node) and given in bounds:
        return max(bounds[given], at_entry)
    return largest + given if node.target is aten.add_.Tensor and isinstance(given, int) else largest


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
    if (chosen := _chosen(node)) is not None:
        condition, yes, no = chosen
        sides = [_side(yes, bounds, condition, True), _side(no, bounds, condition, False)]
        return None if None in sides else max(s for s in sides if s is not None)
    first = bounds.get(node.args[0])
    rule = _RULES.get(node.target)
    if first is None or (rule is None and not _keeps(node)):
        return None
    return first if rule is None else rule(first, *node.args[1:], **node.kwargs)


def _chosen(node: fx.Node) -> tuple[fx.Node, Any, Any] | None:
    """(condition, value where it holds, value elsewhere) of a choice between two values."""
    args: Any = node.args
    if node.target in (aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf):
        return args[0], args[1], args[2]
    return (args[1], args[2], args[0]) if node.target is aten.masked_fill.Scalar else None


def _side(arg: Any, bounds: Bounds, condition: fx.Node, holds: bool) -> int | None:
    if isinstance(arg, fx.Node) and arg not in bounds and arg.target in (aten.scalar_tensor.default, aten.full.default):
        arg = arg.args[0 if arg.target is aten.scalar_tensor.default else 1]
    if not isinstance(arg, fx.Node):
        return arg if isinstance(arg, int) else None
    limit, bound = _limit(condition, arg, holds), bounds.get(arg)
    return min(bound, limit) if bound is not None and limit is not None else bound


def _limit(condition: Any, value: fx.Node, holds: bool) -> int | None:
    """The largest ``value`` where ``condition`` holds (or does not), as far as its comparisons say."""
    args: Any = condition.args if isinstance(condition, fx.Node) else ()
    if isinstance(condition, fx.Node) and condition.target in _JOINS[holds]:
        found = [_limit(part, value, holds) for part in args[:2]]
        return min((f for f in found if f is not None), default=None)
    below = _COMPARISONS[holds].get(condition.target) if isinstance(condition, fx.Node) else None
    return args[1] - below if below is not None and args[0] is value and isinstance(args[1], int) else None


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
_JOINS = {  # all parts hold where the first kind holds, none where the second does not
    True: (aten.bitwise_and.Tensor, aten.logical_and.default),
    False: (aten.bitwise_or.Tensor, aten.logical_or.default),
}
_COMPARISONS: dict[bool, dict[Any, int]] = {  # what a value keeps below the number it is compared with
    True: {aten.lt.Scalar: 1, aten.le.Scalar: 0},
    False: {aten.ge.Scalar: 1, aten.gt.Scalar: 0},
}
