"""Compute once what every draft step would compute again."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from draftfuse.passes import ir


def hoist_invariants(graph: fx.Graph) -> int:
    """Merge equal pure values, so that metadata which does not change from step to step is computed before step 1.

    Two nodes are equal if operator and arguments are, and if nothing between them wrote memory that they read: reads
    of a buffer carry the number of writes to it so far. Runs after buffers_to_values, when equal values have equal
    names; what it leaves unused is dropped by drop_dead_refresh.

    Before::

        %a = aten.searchsorted.Tensor(%starts, %range)   # refresh 1
        %b = aten.searchsorted.Tensor(%starts, %range)   # refresh 2

    After::

        %a = aten.searchsorted.Tensor(%starts, %range)   # refresh 1
    """
    mutated = ir.mutated_storages(graph)
    versions: dict[int, int] = {}
    seen: dict[Any, fx.Node] = {}
    merged = 0
    for node in list(graph.nodes):
        for target in ir.written(node):
            key = ir.storage(target) or 0
            versions[key] = versions.get(key, 0) + 1
        if not _mergeable(node, mutated):
            continue
        first = seen.setdefault(_identity(node, versions), node)
        if first is not node:
            ir.replace_value(node, first)
            graph.erase_node(node)
            _gather_items(first)
            merged += 1
    return merged


def _gather_items(node: fx.Node) -> None:
    """Keep the items of a list behind it: no cut of the graph may fall between."""
    for item in [user for user in node.users if user.target is operator.getitem]:
        node.append(item)


def _mergeable(node: fx.Node, mutated: set[int]) -> bool:
    """A pure node whose own memory nobody writes; a name for the memory of others is one too."""
    return ir.is_pure(node) and (ir.storages(node).isdisjoint(mutated) or ir.is_alias(node))


def _identity(node: fx.Node, versions: dict[int, int]) -> Any:
    sources = [] if ir.is_alias(node) else [versions.get(ir.storage(a) or 0, 0) for a in node.all_input_nodes]
    return (node.target, _freeze(node.args), _freeze(node.kwargs), tuple(sources))


def _freeze(arg: Any) -> Any:
    if isinstance(arg, (list, tuple)):
        return tuple(_freeze(a) for a in arg)
    if isinstance(arg, dict):
        return tuple(sorted((k, _freeze(v)) for k, v in arg.items()))
    if isinstance(arg, slice):
        return ("slice", _freeze(arg.start), _freeze(arg.stop), _freeze(arg.step))
    if isinstance(arg, (float, complex)):
        return (type(arg).__name__, repr(arg))  # 0.0 == -0.0, and they are two values
    return (type(arg).__name__, arg)
