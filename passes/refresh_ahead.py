"""Move all metadata that does not depend on drafted tokens in front of draft step 1."""

from __future__ import annotations

from torch import fx

from draftfuse.passes import ir, memory

AHEAD_PHASES = ("slot_mapping", "refresh", "advance")


def refresh_ahead(graph: fx.Graph) -> int:
    """Move slots, metadata, positions and lengths of all steps before step 1 where no drafted token decides them.

    Positions and lengths mostly advance the same way whatever is drafted, so the metadata of all K-1 steps is known
    at the start. Computed together it is one launch in place of K-1, and as each step gets rows of its own there is
    no write-after-read hazard left. A node moves if its phase is one of slot_mapping, refresh and advance, it is
    pure, all that it reads moves too or lies outside the loop, and no write before it touched that memory. Needs the
    values that buffers_to_values makes; lower_metadata_refresh then outlines what stands ahead as one operator.

    Before::

        %slots1 = ...  # slot_mapping 1
        %hidden = ...  # forward 1
        %next = aten.add.Tensor(%positions, %live)  # advance 1
        %slots2 = ...  # slot_mapping 2

    After::

        %slots1 = ...  # slot_mapping 1
        %next = aten.add.Tensor(%positions, %live)  # advance 1
        %slots2 = ...  # slot_mapping 2
        %hidden = ...  # forward 1
    """
    static, chosen = _independent(graph)
    if not chosen:
        return 0
    cursor = ir.placeholders(graph)[-1]
    moved, passed = 0, False
    for node in list(graph.nodes):
        if node in chosen or node in static:
            moved += passed and node in chosen
            node.meta["ahead"] = node in chosen
            cursor.append(node)
            cursor = node
        elif node.op == "call_function":
            passed = True
    return moved


def _is_static(node: fx.Node) -> bool:
    """A view of memory outside the loop, or arithmetic on sizes: known before the loop starts."""
    if ir.is_view(node):
        return ir.root(node).op == "placeholder"
    return node.op == "call_function" and ir.is_number(node) and ir.is_pure(node)


def _independent(graph: fx.Graph) -> tuple[set[fx.Node], set[fx.Node]]:
    """Nodes known before the loop, and nodes that can be computed from them alone."""
    pinned = memory.pinned_storages(graph)
    written: set[int] = set()
    known = set(ir.placeholders(graph))
    static: set[fx.Node] = set()
    chosen: set[fx.Node] = set()
    for node in graph.nodes:
        if _is_static(node) and known.issuperset(node.all_input_nodes):
            static.add(node)
            known.add(node)
        elif ir.storages(node).isdisjoint(pinned) and _may_move(node, known, written):
            chosen.add(node)
            known.add(node)
        written |= {key for target in ir.written(node) for key in ir.storages(target)}
    return static, chosen


def _may_move(node: fx.Node, known: set[fx.Node], written: set[int]) -> bool:
    if ir.phase(node) not in AHEAD_PHASES or not ir.is_pure(node):
        return False
    return all(a in known and ir.storages(a).isdisjoint(written) for a in node.all_input_nodes)
