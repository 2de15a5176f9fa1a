"""Questions of the IR about collectives: torch's functional operators, which the loop calls in one order on all ranks.

No pass removes, merges or moves them: they are opaque, and what is opaque keeps its place. They read their arguments
only, so nothing needs to be stored before one.
"""

from __future__ import annotations

from torch import fx
from torch._ops import OpOverload

from draftfuse.passes import ir

NAMESPACES = ("_c10d_functional", "c10d_functional", "_dtensor")


def is_functional_collective(target: object) -> bool:
    """Whether ``target`` is an operator of functional collectives, ``wait_tensor`` included."""
    return isinstance(target, OpOverload) and target.namespace in NAMESPACES


def is_collective(target: object) -> bool:
    """The same, or one of those that write in place, which eager code calls and no trace holds."""
    return is_functional_collective(target) or (isinstance(target, OpOverload) and target.namespace == "c10d")


def is_wait(node: fx.Node) -> bool:
    """Whether ``node`` only waits for a collective."""
    return is_functional_collective(node.target) and "wait_tensor" in str(node.target)


def collectives_of(graph: fx.Graph) -> list[fx.Node]:
    """All collectives of ``graph`` in order, without the waits for them."""
    return [n for n in graph.nodes if is_functional_collective(n.target) and not is_wait(n)]


def waited_for(node: fx.Node) -> fx.Node:
    """The collective behind ``node``: itself, or what it waits for (through an item of a list)."""
    while not (is_functional_collective(node.target) and not is_wait(node)) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def group_of(node: fx.Node) -> str:
    """The name of the process group that a collective runs on."""
    given = {arg.name: value for arg, value in ir.arguments(node)}
    found = given.get("group_name", given.get("ranks", ""))
    return str(getattr(found, "group_name", found))


def settings_of(node: fx.Node) -> list[str]:
    """What else a collective is given by value: the reduction, sizes, a source."""
    by_value = [(arg.name, value) for arg, value in ir.arguments(node) if not ir.nodes_in(value)]
    return [f"{name}={value}" for name, value in by_value if name not in ("group_name", "tag", "ranks")]
