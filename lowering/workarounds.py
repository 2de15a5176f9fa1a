"""Faults of Inductor that are kept away from every graph given to it, one function each."""

from __future__ import annotations

import torch
from torch import fx

from draftfuse.passes import ir

aten = torch.ops.aten
_BOUNDARIES = {aten.searchsorted.Tensor: 0, aten.searchsorted.Scalar: 0, aten.bucketize.Tensor: 1}


def materialise_boundaries(graph: fx.Graph) -> int:
    """Give searches whole tensors to search in; returns how many were copied.

    Inductor's GPU lowering of ``searchsorted`` and ``bucketize`` takes the boundaries by the name of their buffer and
    forgets where in it a view begins: ``searchsorted(query_start_loc[1:], ...)`` silently searches from element 0 (seen
    with torch 2.11 on an H200, default settings). A copy of a view is a buffer of its own.
    """
    copied = 0
    for node in list(graph.nodes):
        index = _BOUNDARIES.get(node.target)
        if index is None or not ir.is_view(node.args[index]):
            continue
        with graph.inserting_before(node):
            whole = ir.call(graph, aten.clone.default, (node.args[index],), {}, node)
        node.update_arg(index, whole)
        copied += 1
    return copied
