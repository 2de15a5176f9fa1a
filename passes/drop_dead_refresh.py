"""Drop refreshes that nobody reads and stores that are overwritten before anybody could."""

from __future__ import annotations

import torch
from torch import fx

from draftfuse.passes import ir


def drop_dead_refresh(graph: fx.Graph) -> int:
    """Erase unused pure nodes and stores overwritten by a later equal store with no reader between.

    Nothing after the last step reads its advance, and a field that no layer uses needs no refresh. Stands after
    hoist_invariants, whose merged nodes it collects, and before the refresh is outlined, so that dead fields never
    get a buffer.

    Before::

        aten.copy_.default(%view, %first)
        aten.copy_.default(%view, %second)

    After::

        aten.copy_.default(%view, %second)
    """
    return _drop_stores(graph) + ir.eliminate_dead_code(graph)


def _drop_stores(graph: fx.Graph) -> int:
    pending: dict[int, fx.Node] = {}  # storage -> a store that nobody read yet
    dropped = 0
    for node in list(graph.nodes):
        if ir.is_opaque(node):
            pending.clear()
        for arg in ir.nodes_in(node.args[1:]) if _is_store(node) else node.all_input_nodes:
            if not ir.is_view(node) and not ir.is_tap(node):
                pending.pop(ir.storage(arg) or 0, None)
        if _is_store(node):
            key = ir.storage(node.args[0]) or 0
            earlier = pending.get(key)
            if earlier is not None and earlier.args[0] is node.args[0]:
                graph.erase_node(earlier)
                dropped += 1
            pending[key] = node
    return dropped


def _is_store(node: fx.Node) -> bool:
    """A whole overwrite of a view of a buffer; another in-place operator would need what an earlier store left."""
    full = node.target is torch.ops.aten.copy_.default
    return full and ir.phase(node) == "store" and ir.root(ir.written(node)[0]).op == "placeholder"
