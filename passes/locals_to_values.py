"""Turn in-place writes to tensors that the loop itself allocates into plain values."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from draftfuse.passes import ir, memory
from draftfuse.passes.buffers_to_values import functional_form

aten = torch.ops.aten


def locals_to_values(graph: fx.Graph) -> int:
    """Replace writes to a fresh tensor by the value that it has afterwards.

    A builder that fills ``torch.full((n, width), -1)`` piece by piece writes memory which is gone after the step. As
    values the pieces can be merged, moved ahead and outlined like everything else. Tensors that an opaque operator
    writes stay as they are, because their address matters, and so do tensors with views whose write has no
    counterpart on values. First of the rewriting passes: all others see values.

    Before::

        %rows = aten.full.default([%n, 8], -1)
        %part = aten.slice.Tensor(%rows, 1, 0, 4)
        aten.copy_.default(%part, %indices)
        %sum = aten.sum.default(%rows)

    After::

        %rows = aten.full.default([%n, 8], -1)
        %part = aten.slice.Tensor(%rows, 1, 0, 4)
        %new = aten.copy.default(%part, %indices)
        %rows1 = aten.slice_scatter.default(%rows, %new, 1, 0, 4)
        %sum = aten.sum.default(%rows1)
    """
    return _Locals(graph).run()


@dataclass
class _Locals:
    graph: fx.Graph
    current: dict[int, fx.Node] = field(default_factory=dict)  # storage -> value of the whole root now
    numbers: dict[Any, fx.Node] = field(default_factory=dict)  # size -> the first node that is this size
    rewritten: int = 0

    def run(self) -> int:
        ir.eliminate_dead_code(self.graph)  # a view that nobody reads is no reason to keep its memory
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
        """Storages that start inside the graph, and of which every view and every write has a form on values."""
        good: set[int] = set()
        bad = set(ir.input_storages(self.graph))
        for node in self.graph.nodes:
            if ir.is_number(node):
                self.numbers.setdefault(ir.expression(ir.value(node)), node)
            if ir.is_alias(node) and not _starts(node) and not _is_logical_view(node):
                bad |= ir.storages(node)
            for target in ir.written(node):
                fits = functional_form(node) is not None and self.is_invertible(target)
                (good if fits else bad).update(ir.storages(target))
        return good - bad

    def is_invertible(self, target: fx.Node) -> bool:
        """Whether each view between ``target`` and the start of its memory can be undone."""
        while ir.is_view(target):
            parent = target.args[0]
            assert isinstance(parent, fx.Node)
            known = all(isinstance(s, int) or ir.expression(s) in self.numbers for s in ir.value(parent).shape)
            if not (target.target in _SCATTER or target.target in _UNDO or (target.target in _RESHAPES and known)):
                return False
            target = parent
        return True

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
        args, kwargs = fx.node.map_arg((node.args[1:], node.kwargs), lambda n: self.resolve(n, node))
        if functional is aten.copy_.default:
            return ir.call(self.graph, aten.copy.default, (before, args[0]), {}, node)
        new = ir.call(self.graph, functional, (before, *args), kwargs, node)
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
        if view.target in _UNDO:
            target, args = _UNDO[view.target](*view.args[1:])
            return ir.call(self.graph, target, (new, *args), {}, at)
        sizes = [s if isinstance(s, int) else self.numbers[ir.expression(s)] for s in ir.value(parent).shape]
        return self.view(aten.view.default, new, (sizes,), {}, at)

    def view(self, target: Any, value: fx.Node, args: Any, kwargs: Any, at: fx.Node) -> fx.Node:
        """A view operator on a value, made dense first where its layout asks for that."""
        seen = ir.try_call(self.graph, target, (value, *args), kwargs, at)
        if seen is None:
            dense = ir.call(self.graph, aten.clone.default, (value,), {"memory_format": torch.contiguous_format}, at)
            seen = ir.call(self.graph, target, (dense, *args), kwargs, at)
        return seen

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
            return self.view(read.target, self.resolve(parent, at), read.args[1:], dict(read.kwargs), at)


def _starts(node: fx.Node) -> bool:
    """One result of an operator that makes several."""
    return node.target is operator.getitem and not ir.is_alias(node.all_input_nodes[0])


def _is_logical_view(node: fx.Node) -> bool:
    """A view that selects or orders elements, whatever their layout."""
    return ir.is_view(node) and node.target not in memory.LAYOUT_VIEWS


def _inverse(dims: list[int]) -> list[int]:
    return sorted(range(len(dims)), key=lambda i: dims[i] % len(dims))


_SCATTER = {
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.select.int: aten.select_scatter.default,
    aten.diagonal.default: aten.diagonal_scatter.default,
}
# View -> its arguments -> the operator that takes a value of the view back to the shape of what it is a view of.
_UNDO: dict[Any, Callable[..., tuple[Any, tuple[Any, ...]]]] = {
    aten.alias.default: lambda: (aten.alias.default, ()),
    aten.t.default: lambda: (aten.t.default, ()),
    aten.transpose.int: lambda a, b: (aten.transpose.int, (a, b)),
    aten.permute.default: lambda dims: (aten.permute.default, (_inverse(dims),)),
    aten.unsqueeze.default: lambda dim: (aten.squeeze.dim, (dim,)),
}
_RESHAPES = (
    aten.view.default,
    aten._unsafe_view.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
)
