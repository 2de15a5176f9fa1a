"""Outline each refresh of metadata into one registered operator that writes persistent buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from draftfuse.passes import ir, memory
from draftfuse.passes.render import canonical

aten = torch.ops.aten
Register = Callable[[fx.GraphModule, str], OpOverload]
REFRESH_PHASES = ("slot_mapping", "refresh")


def lower_metadata_refresh(graph: fx.Graph, *, register: Register) -> int:
    """Replace a region of refresh nodes by one operator ``draftfuse_gen::refresh_<hash>``.

    Its schema is ``(Tensor[] reads, SymInt[] sizes, Tensor(a!)[] rows) -> ()``. What refresh_ahead put in front of the
    loop is one region; whatever depends on drafted tokens is one region a step. Equal regions give the same operator
    (``register`` is called with the body and its canonical text). Each value used outside its region is written to
    rows of its own in a persistent buffer that draftfuse owns: a new placeholder with ``meta["owned"]``. Memory that
    another operator writes is left alone. Stands last among the refresh passes, when only live, distinct refreshes
    are left.

    Before::

        %start = aten.sub.Tensor(%seq_lens, 4)  # refresh 1
        %low = aten.clamp.default(%start, 0)  # refresh 1
        %out = toy.attention.default(%query, %low)  # forward 1

    After::

        %row = input()
        draftfuse_gen.refresh_1f0c.default([%seq_lens], [], [%row])  # refresh 1
        %out = toy.attention.default(%query, %row)  # forward 1
    """
    lowered = 0
    for members in _regions(graph):
        lowered += _outline(graph, members, register)
    return lowered


def _regions(graph: fx.Graph) -> list[list[fx.Node]]:
    found: dict[Any, list[fx.Node]] = {}
    pinned = memory.pinned_storages(graph)  # a copy in a row would miss what another operator writes there
    for node in graph.nodes:
        ahead = bool(node.meta.get("ahead"))
        movable = ir.is_pure(node) and not _is_static(node) and ir.storages(node).isdisjoint(pinned)
        if movable and (ahead or ir.phase(node) in REFRESH_PHASES):
            found.setdefault("ahead" if ahead else ir.draft_step(node), []).append(node)
    return list(found.values())


def _is_static(node: fx.Node) -> bool:
    return ir.is_number(node) or ir.is_static_view(node)


def _outline(graph: fx.Graph, members: list[fx.Node], register: Register) -> int:
    inside = set(members)
    results = [n for n in members if any(u not in inside for u in n.users)]
    if not results or not all(map(ir.is_tensor, results)) or not _contiguous(graph, members, inside):
        return 0
    inner = _misaligned_views(members, inside)
    reads = _unique(a for n in [*inner, *members] for a in n.all_input_nodes if a not in inside and a not in inner)
    tensors = [n for n in reads if ir.is_tensor(n)]
    numbers = [n for n in reads if ir.is_number(n)]
    if len(tensors) + len(numbers) < len(reads):
        return 0
    body = _body([*inner, *members], tensors + numbers, results)
    operator = register(body, canonical(body.graph))
    rows = [_row(graph, node) for node in results]
    views = [_view_of_row(graph, row, node) for row, node in zip(rows, results, strict=True)]
    with graph.inserting_before(_first_outside_user(graph, inside)):
        call = graph.call_function(operator, (tensors, numbers, rows))
    call.meta.update(val=None, body=body, phase="refresh", draft_step=ir.draft_step(members[0]))
    call.meta["stack_trace"] = members[0].meta.get("stack_trace", "")
    for node, view in zip(results, views, strict=True):
        ir.replace_value(node, view, where=lambda user: user not in inside)
    for node in reversed(members):
        graph.erase_node(node)
    return 1


def _contiguous(graph: fx.Graph, members: list[fx.Node], inside: set[fx.Node]) -> bool:
    """Whether each member may stand at the first user of the results: its reads are there, and see the same memory."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    first = order[_first_outside_user(graph, inside)]
    writes = [(order[n], key) for n in graph.nodes for target in ir.written(n) for key in ir.storages(target)]

    def same(reader: fx.Node, read: fx.Node) -> bool:
        begin, end = sorted((order[reader], first))  # a write by the first user itself comes after the region
        passed = {key for at, key in writes if begin <= at < end}
        return order[read] < first and ir.storages(read).isdisjoint(passed)

    return all(same(n, a) for n in members for a in n.all_input_nodes if a not in inside)


def _first_outside_user(graph: fx.Graph, inside: set[fx.Node]) -> fx.Node:
    users = {u for n in inside for u in n.users if u not in inside}
    nodes: list[fx.Node] = list(graph.nodes)
    return next(n for n in nodes if n in users)


def _misaligned_views(members: list[fx.Node], inside: set[fx.Node]) -> list[fx.Node]:
    """Static views that start inside a 16-byte word: the body takes them itself, from their base."""
    found: dict[fx.Node, None] = {}

    def visit(node: fx.Node) -> None:
        if node not in inside and node not in found and ir.is_view(node) and not ir.is_aligned(node):
            visit(node.all_input_nodes[0])
            found[node] = None

    for node in members:
        for arg in filter(ir.is_static_view, node.all_input_nodes):
            visit(arg)
    return list(found)


def _unique(nodes: Any) -> list[fx.Node]:
    return list(dict.fromkeys(nodes))


def _body(members: list[fx.Node], reads: list[fx.Node], results: list[fx.Node]) -> fx.GraphModule:
    body = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for i, node in enumerate(reads):
        copies[node] = body.placeholder(f"arg{i}")
        copies[node].meta["val"] = ir.value(node)
    for node in members:
        copies[node] = body.node_copy(node, lambda n: copies[n])
        copies[node].meta = {"val": ir.value(node)}
    body.output(tuple(_in_memory_order(body, copies[n]) for n in results))
    return fx.GraphModule(torch.nn.Module(), body)


def _memory_order(node: fx.Node) -> list[int]:
    """Dimensions of a value from the outermost in memory to the innermost."""
    hints = list(map(memory.hint, ir.value(node).stride()))
    return sorted(range(len(hints)), key=lambda dim: -hints[dim])


def _in_memory_order(body: fx.Graph, result: fx.Node) -> fx.Node:
    order = _memory_order(result)
    if order == sorted(order):
        return result
    return ir.call(body, aten.permute.default, (result, order), {}, result)


def _view_of_row(graph: fx.Graph, row: fx.Node, node: fx.Node) -> fx.Node:
    """A row is dense; seen through this, its dimensions lie in the order of ``node``, on which later views may rely."""
    order = _memory_order(node)
    if order == sorted(order):
        return row
    with graph.inserting_after(ir.placeholders(graph)[-1]):
        return ir.call(graph, aten.permute.default, (row, [order.index(d) for d in range(len(order))]), {}, node)


def _row(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """A new owned placeholder for one result: same dtype and sizes, dense in the order of the result's memory."""
    val, order = ir.value(node), _memory_order(node)
    with graph.inserting_after(ir.placeholders(graph)[-1]):
        row = graph.placeholder(f"row_{node.name}")
    with val.fake_mode:
        row.meta["val"] = torch.empty([val.shape[d] for d in order], dtype=val.dtype, device=val.device)
    step = ir.draft_step(node)
    row.meta.update(owned=True, path=f"draftfuse.rows[{step}].{node.name}")
    ir.copy_meta(row, node)
    return row
