"""Let each matrix product of a graph for any number of rows choose its kernel by the rows that it gets."""

from __future__ import annotations

import torch
from torch import fx

from draftfuse.passes import ir
from draftfuse.passes.fuse_small_linears import Applies, transposed_weight

aten = torch.ops.aten


def linears_by_rows(graph: fx.Graph, *, applies: Applies) -> int:
    """Rewrite ``x @ weight.T`` to ``draftfuse::linear_by_rows`` where ``applies(product)``.

    A compiled graph of vLLM's serves every number of rows; with one row, a draft step streams weights, and the kernel
    for it begins to before what stands in front has ended. Products of a written or derived weight stay.

    Before::

        %t = aten.permute.default(%weight, [1, 0])
        %mm = aten.mm.default(%x, %t)

    After::

        %linear = draftfuse.linear_by_rows.default(%x, %weight)
    """
    found = 0
    mutated = ir.mutated_storages(graph) | _held_by_sub_graphs(graph)
    for node in list(graph.find_nodes(op="call_function", target=aten.mm.default)):
        weight = transposed_weight(node.args[1])
        if weight is None or not ir.storages(weight).isdisjoint(mutated) or not applies(node):
            continue
        with graph.inserting_before(node):
            op = torch.ops.draftfuse.linear_by_rows.default
            node.replace_all_uses_with(ir.call(graph, op, (node.args[0], weight), {}, node))
        transposed = node.args[1]
        graph.erase_node(node)
        if isinstance(transposed, fx.Node) and not transposed.users:
            graph.erase_node(transposed)
        found += 1
    return found


def _held_by_sub_graphs(graph: fx.Graph) -> set[int]:
    """Storages of what a higher-order operator is given: it may hide a write to them."""
    opaque = [n for n in graph.nodes if isinstance(n.target, torch._ops.HigherOrderOperator)]
    return {key for n in opaque for given in n.all_input_nodes for key in ir.storages(given)}
