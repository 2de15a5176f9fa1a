"""Turn small persistent state that the loop writes and reads again into plain values between the steps."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from draftfuse.passes import ir, memory

aten = torch.ops.aten


def buffers_to_values(graph: fx.Graph, *, hidden_reads: Callable[[fx.Node], Collection[int] | None]) -> int:
    """Forward every value written to a persistent buffer straight to its readers; store it where memory must be right.

    Ids, positions, lengths, slots and hidden states are written at the end of one step and read at the start of the
    next. As mutated views each step would inline the writes of all steps before it; as values, kernels of different
    steps are equal and are compiled once. The buffer itself is stored once at the end, and before an opaque operator
    that may read it without naming it: ``hidden_reads(node)`` gives the storages that such an operator reads beside
    its arguments, or None if that is unknown, which stores everything. Writes to elements by index stay in place: as
    a value, each would copy its whole buffer, which may be a KV pool. Runs before anything that compares values,
    because afterwards a value has one name.

    Before::

        %view = aten.slice.Tensor(%positions, 0, 0, %n)
        aten.copy_.default(%view, %next)
        %row = aten.index.Tensor(%table, [%view])

    After::

        %row = aten.index.Tensor(%table, [%next])
        aten.copy_.default(%view, %next)
    """
    return _Forwarding(graph, hidden_reads).run()


@dataclass
class _Entry:
    """What a part of a buffer holds now: ``value``; ``dirty`` until the memory holds it too."""

    view: fx.Node
    value: fx.Node
    dirty: bool = True

    @property
    def geometry(self) -> tuple[object, ...]:
        return memory.geometry(ir.value(self.view))


@dataclass
class _Forwarding:
    graph: fx.Graph
    hidden_reads: Callable[[fx.Node], Collection[int] | None]
    entries: dict[int, list[_Entry]] = field(default_factory=dict)
    forwarded: int = 0

    def run(self) -> int:
        self.inputs = ir.input_storages(self.graph)
        rows = {key for n in ir.placeholders(self.graph) if n.meta.get("owned") for key in ir.storages(n)}
        self.mutated = ir.mutated_storages(self.graph) - rows  # a row is written once, before anything reads it
        for node in list(self.graph.nodes):
            if node.op == "output":
                self.flush_all(node)
            elif node.op == "call_function" and not self.is_tracked_alias(node):
                self.visit(node)
        ir.eliminate_dead_code(self.graph)
        return self.forwarded

    def visit(self, node: fx.Node) -> None:
        targets = ir.written(node)
        functional = None if writes_elements(node) or any(map(memory.is_expanded, targets)) else functional_form(node)
        if functional is not None and len(targets) == 1 and ir.storage(targets[0]) in self.inputs:
            self.write(node, targets[0], functional)
            return
        if ir.is_opaque(node):
            self.store_hidden_reads(node)
        untouched = [*targets, *ir.hidden_reads_of(node)]
        for target in untouched:
            self.flush(ir.storage(target), node)
        self.read_arguments(node, keep=untouched)
        for target in targets:
            self.entries.pop(ir.storage(target) or 0, None)

    def write(self, node: fx.Node, target: fx.Node, functional: OpOverload | None) -> None:
        """Record the value that ``node`` writes to ``target`` instead of writing it."""
        with self.graph.inserting_before(node):
            new = self.written_value(node, target, functional)
        key, shape = ir.storage(target), memory.geometry(ir.value(target))
        assert key is not None
        if new is target:  # the buffer already holds it
            self.erase(node)
            return
        for entry in self.entries.get(key, []):
            if entry.geometry != shape:
                self.store(entry, node)
        self.entries[key] = [_Entry(target, new)]
        self.forwarded += ir.phase(node) != "store"  # a store of an earlier run comes out where it was
        self.erase(node)

    def written_value(self, node: fx.Node, target: fx.Node, functional: OpOverload | None) -> fx.Node:
        if node.target is aten.copy_.default:
            source = node.args[1]
            assert isinstance(source, fx.Node)
            new = self.resolve(source, node)
        else:
            assert functional is not None
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: self.resolve(n, node))
            new = ir.call(self.graph, functional, args, kwargs, node)
        return self.settle(new, target, node)

    def settle(self, new: fx.Node, target: fx.Node, node: fx.Node) -> fx.Node:
        """Bring a value to the type, shape and order of its buffer, in memory that nobody writes."""
        have, want = ir.value(new), ir.value(target)
        if new is target:
            return new
        if have.dtype != want.dtype or have.device != want.device:
            options = {"dtype": want.dtype, "device": want.device}
            new = ir.call(self.graph, aten._to_copy.default, (new,), options, node)
        if tuple(map(ir.expression, have.shape)) != tuple(map(ir.expression, want.shape)):
            sizes = [self.size(s, target, i) for i, s in enumerate(want.shape)]
            new = ir.call(self.graph, aten.expand.default, (new, sizes), {}, node)
        if memory.memory_order(ir.value(new)) != memory.memory_order(want):
            return self.reordered(new, want, node)
        if ir.storage(new) in self.mutated:
            new = ir.call(self.graph, aten.clone.default, (new,), {}, node)
        return new

    def reordered(self, new: fx.Node, want: Tensor, node: fx.Node) -> fx.Node:
        """A copy with dimensions in the memory order of the buffer: what readers make of it has that order too."""
        order = sorted(range(want.dim()), key=lambda dim: -memory.hint(want.stride(dim)))
        back = [order.index(dim) for dim in range(want.dim())]
        for target, args, kwargs in (
            (aten.permute.default, (order,), {}),
            (aten.clone.default, (), {"memory_format": torch.contiguous_format}),
            (aten.permute.default, (back,), {}),
        ):
            if args != (sorted(order),):
                new = ir.call(self.graph, target, (new, *args), kwargs, node)
        return new

    def size(self, number: object, target: fx.Node, dim: int) -> object:
        """A size of ``target`` as a node where it is symbolic."""
        if isinstance(number, int):
            return number
        return ir.call(self.graph, aten.sym_size.int, (target, dim), {}, target)

    def is_tracked_alias(self, node: fx.Node) -> bool:
        """A name for memory of a written buffer: it stays one, whatever value the buffer has at its place."""
        return ir.is_alias(node) and not ir.storages(node).isdisjoint(self.mutated & self.inputs.keys())

    def read_arguments(self, node: fx.Node, keep: list[fx.Node]) -> None:
        def replacement(arg: fx.Node) -> fx.Node:
            return arg if arg in keep else self.resolve(arg, node)

        node.args = fx.node.map_arg(node.args, replacement)
        node.kwargs = fx.node.map_arg(node.kwargs, replacement)

    def resolve(self, view: fx.Node, at: fx.Node) -> fx.Node:
        """What ``view`` reads at ``at``: the value written last, or the view itself once memory holds it."""
        if ir.storage(view) not in self.entries:
            return view
        found = self.lookup(view, at)
        if found is not None:
            return found
        key = ir.storage(view)
        assert key is not None
        self.flush(key, at)
        return view

    def lookup(self, view: fx.Node, at: fx.Node) -> fx.Node | None:
        shape = memory.geometry(ir.value(view))
        for entry in self.entries[ir.storage(view) or 0]:
            if entry.geometry == shape:
                return entry.value
        if not ir.is_view(view):
            return None
        parent = view.args[0]
        assert isinstance(parent, fx.Node)
        inner = self.lookup(parent, at)
        return None if inner is None else self.same_view_of(view, inner, at)

    def same_view_of(self, view: fx.Node, inner: fx.Node, at: fx.Node) -> fx.Node | None:
        """The same view operator applied to the forwarded value; None where the layout of the value forbids it."""
        if view.target in memory.LAYOUT_VIEWS:
            return None
        with self.graph.inserting_before(at):
            return ir.try_call(self.graph, view.target, (inner, *view.args[1:]), dict(view.kwargs), at)

    def store_hidden_reads(self, node: fx.Node) -> None:
        reads = self.hidden_reads(node)
        for key in list(self.entries):
            if reads is None or key in reads:
                self.flush(key, node)

    def flush_all(self, at: fx.Node) -> None:
        for key in list(self.entries):
            self.flush(key, at)

    def flush(self, key: int | None, at: fx.Node) -> None:
        for entry in self.entries.get(key or 0, []):
            self.store(entry, at)

    def store(self, entry: _Entry, at: fx.Node) -> None:
        if not entry.dirty:
            return
        entry.dirty = False
        with self.graph.inserting_before(at):
            node = self.graph.call_function(aten.copy_.default, (entry.view, entry.value))
        node.meta.update(val=ir.value(entry.view), phase="store", draft_step=ir.draft_step(at))
        node.meta["stack_trace"] = entry.value.meta.get("stack_trace", "")

    def erase(self, node: fx.Node) -> None:
        node.replace_all_uses_with(ir.written(node)[0])
        self.graph.erase_node(node)


_FROZEN_OR_RESHAPED = (torch.Tag.nondeterministic_seeded, torch.Tag.inplace_view)


def functional_form(node: fx.Node) -> OpOverload | None:
    """The operator that computes what an in-place ATen operator writes (``copy_`` stands for itself).

    None for operators that write several tensors, draw random numbers (the layout decides which element gets which)
    or change sizes instead of elements.
    """
    if not isinstance(node.target, OpOverload) or node.target.namespace != "aten" or not ir.is_mutation(node):
        return None
    if node.target is aten.copy_.default:
        return node.target
    name = node.target._schema.name.removeprefix("aten::")
    packet = getattr(aten, name.rstrip("_"), None) if name.endswith("_") and not name.endswith("__") else None
    found = getattr(packet, node.target._overloadname, None)
    return found if isinstance(found, OpOverload) and _computes_the_same(node.target, found) else None


def writes_elements(node: fx.Node) -> bool:
    """Whether ``node`` writes elements by index and leaves the others, as ``index_put_`` and ``scatter_`` do."""
    name = node.target._schema.name if isinstance(node.target, OpOverload) else ""
    return name.removeprefix("aten::").lstrip("_").startswith(("index", "scatter", "put", "masked_scatter"))


def _computes_the_same(in_place: OpOverload, functional: OpOverload) -> bool:
    mine, other = in_place._schema, functional._schema
    if any(tag in in_place.tags for tag in _FROZEN_OR_RESHAPED):
        return False
    if [(a.name, str(a.type)) for a in mine.arguments] != [(a.name, str(a.type)) for a in other.arguments]:
        return False
    writes = [a for a in mine.arguments if a.alias_info is not None and a.alias_info.is_write]
    one_tensor = len(other.returns) == 1 and str(other.returns[0].type) == "Tensor"
    return len(writes) == 1 and one_tensor and other.returns[0].alias_info is None
