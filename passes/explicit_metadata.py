"""Give every operator that touches persistent state behind its back that state as arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import fx
from torch._ops import OpOverload

from draftfuse.passes import ir

Effects = Callable[[fx.Node], tuple[Sequence[fx.Node], Sequence[fx.Node]] | None]
Wrap = Callable[[OpOverload], OpOverload]


def explicit_metadata(graph: fx.Graph, *, effects: Effects, wrap: Wrap) -> int:
    """Replace an operator with hidden reads or writes by a generated one that takes them as arguments.

    An attention operator may read lengths through a closure or a forward context. Unless the graph says so, a
    compiler moves the advance of the lengths above it, and every step reads what the last step leaves.
    ``effects(node)`` gives the placeholders that an operator reads and writes beyond its arguments, or None if nobody
    has said: then it may touch everything that the loop writes. First of the rewriting passes, because all others
    take arguments at their word.

    Before::

        %out = toy.attend.default(%query)

    After::

        %out = draftfuse_gen.hidden_toy_attend_default([%seq_lens], [], %query)
    """
    mutated = _mutated_inputs(graph)
    wrapped = 0
    for node in list(graph.nodes):
        if not ir.is_opaque(node) or not isinstance(node.target, OpOverload) or ir.is_own(node):
            continue
        found = effects(node)
        reads, writes = found if found is not None else (mutated, mutated)
        reads = [r for r in reads if r in mutated and r not in writes]
        if reads or writes:
            node.args = (reads, list(writes), *node.args)
            node.target = wrap(node.target)
            wrapped += 1
    return wrapped


def _mutated_inputs(graph: fx.Graph) -> list[fx.Node]:
    """One placeholder for each storage from outside that the loop writes."""
    written = {ir.storage(t) for n in graph.nodes for t in ir.written(n)}
    return [node for key, node in ir.input_storages(graph).items() if key in written]
