"""Faults of Inductor that are kept away from every graph given to it, one function each."""

from __future__ import annotations

import torch
from torch import fx

from draftfuse.passes import ir

aten = torch.ops.aten
_SORTS = (aten.sort.default, aten.sort.stable)
_PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default)
_LOGITS = (torch.bfloat16, torch.float16, torch.float32)
LONG = 8192  # columns from which one program a row is slower than the two kernels of draftfuse::argmax
_BOUNDARIES = {aten.searchsorted.Tensor: 0, aten.searchsorted.Scalar: 0, aten.bucketize.Tensor: 1}


def work_around(graph: fx.Graph) -> int:
    """All of them; returns in how many places."""
    return materialise_boundaries(graph) + keep_wide_sorts_eager(graph) + share_long_rows(graph)


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


def keep_wide_sorts_eager(graph: fx.Graph) -> int:
    """Call ``draftfuse::sort`` for sorts along a symbolic size on a GPU; returns how many.

    Inductor sorts as many elements as the symbol's upper bound allows, in one program: 53 us for 512 elements of which
    24 are there, where a sort of 24 takes 5 (torch 2.11 on an H200). A sort of a known size stays as it is.
    """
    kept = 0
    for node in [n for n in graph.nodes if n.target in _SORTS]:
        given = {arg.name: value for arg, value in ir.arguments(node)}
        x, dim = ir.value(given["self"]), given.get("dim", -1)
        if x.device.type != "cuda" or not isinstance(x.shape[dim], torch.SymInt):
            continue
        args = (given["self"], dim, given.get("descending", False), bool(given.get("stable", False)))
        with graph.inserting_before(node):
            node.replace_all_uses_with(ir.call(graph, torch.ops.draftfuse.sort.default, args, {}, node))
        graph.erase_node(node)
        kept += 1
    return kept


def share_long_rows(graph: fx.Graph) -> int:
    """Call ``draftfuse::argmax`` for the argmax of long rows that are in memory on a GPU; returns how many.

    Where the number of rows is symbolic, Inductor gives each row to one program: 33 us for 4 rows of 151,936 logits,
    where PyTorch's kernel takes 10 (torch 2.11 on an H200). Logits that generated code computes are left to it, for it
    reduces them as it makes them.
    """
    found = 0
    for node in list(graph.find_nodes(op="call_function", target=aten.argmax.default)):
        given = {arg.name: value for arg, value in ir.arguments(node)}
        logits = given["self"]
        if given.get("keepdim", False) or not _are_long_rows(ir.value(logits), given.get("dim")):
            continue
        if not _is_stored(ir.root(logits)):
            continue
        with graph.inserting_before(node):
            node.replace_all_uses_with(ir.call(graph, torch.ops.draftfuse.argmax.default, (logits,), {}, node))
        graph.erase_node(node)
        found += 1
    return found


def _is_stored(node: fx.Node) -> bool:
    """Whether the tensor is in memory whatever Inductor does: it comes from outside, or from a product."""
    return node.op == "placeholder" or node.target in _PRODUCTS


def _are_long_rows(x: torch.Tensor, dim: int | None) -> bool:
    if x.device.type != "cuda" or x.dim() != 2 or dim not in (-1, 1) or x.dtype not in _LOGITS:
        return False
    return isinstance(x.shape[1], int) and x.shape[1] >= LONG
