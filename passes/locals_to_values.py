"""Turn in-place writes to tensors that the loop itself allocates into plain values."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import fx

from draftfuse.passes import ir
from draftfuse.passes.buffers_to_values import functional_form

aten = torch.ops.aten


def locals_to_values(graph: fx.Graph) -> int:
    """Replace writes to a fresh tensor by the value that it has afterwards.

    A builder that fills ``torch.full((n, width), -1)`` piece by piece writes memory which is gone after the step. As
    values the pieces can be merged, moved ahead and outlined like everything else. Tensors that an opaque operator
    writes stay as they are, because their address matters. First of the rewriting passes: all others see values.

    Before::

        %rows = aten.full.default([%n, 8], -1)
        %part = aten.slice.Tensor(%rows, 1, 0, 4)
        aten.copy_.default(%part, %indices)
        %sum = aten.sum.default(%rows)

    After::

        %rows = aten.full.default([%n, 8], -1)
        %rows1 = aten.slice_scatter.default(%rows, %indices, 1, 0, 4)
        %sum = aten.sum.default(%rows1)
    """
    return _Locals(graph).run()


@dataclass
class _Locals:
    graph: fx.Graph
    current: dict[int, fx.Node] = field(default_factory=dict)  # storage -> value of the whole root now
    rewritten: int = 0

    def run(self) -> int:
        self.convertible = self.find_convertible()
        for node in list(self.graph.nodes):
            if node.op != "call_function" or (ir.is_view(node) and ir.storage(node) in self.convertible):
                continue
            target = self.local_target(node)
            if target is not None:
                self.write(node, target)
            else:
                self.read_arguments(node)
        ir.eliminate_dead_code(self.graph)
        return self.rewritten

    def find_convertible(self) -> set[int]:
        """Storages that start inside the graph and are written by ATen operators with a functional form only."""
        good: set[int] = set()
        bad = set(ir.input_storages(self.graph))
        for node in self.graph.nodes:
            keys = {s for t in ir.written(node) if (s := ir.storage(t)) is not None}
            (good if functional_form(node) is not None else bad).update(keys)
        return good - bad

    def local_target(self, node: fx.Node) -> fx.Node | None:
        targets = ir.written(node)
        return targets[0] if len(targets) == 1 and ir.storage(targets[0]) in self.convertible else None

    def write(self, node: fx.Node, target: fx.Node) -> None:
        with self.graph.inserting_before(node):
            new = self.new_value(node, target)
            whole = self.into_root(target, new, node)
        self.current[ir.storage(target) or 0] = whole
        node.replace_all_uses_with(target)
        self.graph.erase_node(node)
        self.rewritten += 1

    def new_value(self, node: fx.Node, target: fx.Node) -> fx.Node:
        """What ``node`` leaves in ``target``: in its dtype, with its shape."""
        functional = functional_form(node)
        assert functional is not None
        before = self.resolve(target, node)
        args = fx.node.map_arg(node.args[1:], lambda n: self.resolve(n, node))
        if functional is aten.copy_.default:
            return ir.call(self.graph, aten.copy.default, (before, args[0]), {}, node)
        new = ir.call(self.graph, functional, (before, *args), dict(node.kwargs), node)
        dtype = ir.value(target).dtype
        if ir.value(new).dtype != dtype:
            new = ir.call(self.graph, aten._to_copy.default, (new,), {"dtype": dtype}, node)
        return new

    def into_root(self, target: fx.Node, new: fx.Node, at: fx.Node) -> fx.Node:
        """The whole root after ``target``, a view of it, became ``new``."""
        while ir.is_view(target):
            parent = target.args[0]
            assert isinstance(parent, fx.Node)
            new = self.scatter(target, self.resolve(parent, at), new, at)
            target = parent
        return new

    def scatter(self, view: fx.Node, parent: fx.Node, new: fx.Node, at: fx.Node) -> fx.Node:
        """``parent`` with the part that ``view`` selects replaced by ``new``."""
        if view.target in _SCATTER:
            return ir.call(self.graph, _SCATTER[view.target], (parent, new, *view.args[1:]), dict(view.kwargs), at)
        val = ir.value(view)
        sizes, strides = [list(map(self.number, seq)) for seq in (val.shape, val.stride())]
        args = (parent, new, sizes, strides, self.number(val.storage_offset()))
        return ir.call(self.graph, aten.as_strided_scatter.default, args, {}, at)

    def number(self, size: object) -> object:
        """A size as an argument: an integer, or the placeholder of the one symbol."""
        if isinstance(size, int):
            return size
        for node in ir.placeholders(self.graph):
            if ir.expression(ir.value(node)) == ir.expression(size):
                return node
        raise AssertionError(f"size {size} has no node")

    def read_arguments(self, node: fx.Node) -> None:
        node.args = fx.node.map_arg(node.args, lambda n: self.resolve(n, node))
        node.kwargs = fx.node.map_arg(node.kwargs, lambda n: self.resolve(n, node))

    def resolve(self, read: fx.Node, at: fx.Node) -> fx.Node:
        """``read`` on the value that its root has now."""
        now = self.current.get(ir.storage(read) or 0)
        if now is None or ir.storage(read) not in self.convertible:
            return read
        if not ir.is_view(read):
            return now
        parent = read.args[0]
        assert isinstance(parent, fx.Node)
        with self.graph.inserting_before(at):
            return ir.call(self.graph, read.target, (self.resolve(parent, at), *read.args[1:]), dict(read.kwargs), at)


_SCATTER = {aten.slice.Tensor: aten.slice_scatter.default, aten.select.int: aten.select_scatter.default}
