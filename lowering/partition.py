"""Cut the IR into what Inductor compiles (segments) and what is called as it stands (opaque operators).

A segment is a maximal run of pure operators, and the stores behind it that are 16-byte aligned: those become writes
of its last kernels. Program order is kept, so a read never passes a write. What depends on nothing but the buffers'
addresses and the number of requests is *static*: evaluated once when a callable is bound to its buffers.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import fx
from torch._ops import OpOverload

from draftfuse.passes import ir, memory

aten = torch.ops.aten


@dataclass
class Segment:
    """A pure region: nodes in order, stores at its end."""

    nodes: list[fx.Node] = field(default_factory=list)
    stores: list[fx.Node] = field(default_factory=list)

    @property
    def trivial(self) -> bool:
        """Nothing to compute: views, tuple items and sizes only."""
        return not self.stores and all(ir.is_alias(n) or ir.is_number(n) for n in self.nodes)

    @property
    def reads(self) -> set[fx.Node]:
        """What its kernels take from outside."""
        inside = {*self.nodes, *self.stores}
        return {a for n in self.nodes for a in n.all_input_nodes if a not in inside}


@dataclass
class Partition:
    """The program: static nodes, then segments and single calls in order."""

    static: list[fx.Node]
    items: list[Segment | fx.Node]


def partition(graph: fx.Graph, *, compile_refresh: bool = True) -> Partition:
    """Cut ``graph``. Taps are calls of their own; generated refresh operators are calls whose body may be compiled."""
    eager = _eager_memory(graph)
    known: set[fx.Node] = set(ir.placeholders(graph))
    static: list[fx.Node] = []
    items: list[Segment | fx.Node] = []
    current = Segment()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if _is_static(node, known):
            known.add(node)
            static.append(node)
        elif ir.is_pure(node) and not _touches(node, eager) and not _is_item_of_call(node):
            current = _open(current, items)
            current.nodes.append(node)
        elif _is_foldable(node, current):
            current.stores.append(node)
        else:
            current = _close(current, items)
            items.append(node)
    _close(current, items)
    return Partition(static, items)


def _open(current: Segment, items: list[Segment | fx.Node]) -> Segment:
    """A segment that has stored takes no more nodes: they might read what it stored."""
    return _close(current, items) if current.stores else current


def _close(current: Segment, items: list[Segment | fx.Node]) -> Segment:
    if current.nodes or current.stores:
        if current.trivial:
            items.extend(current.nodes)
        else:
            items.append(current)
    return Segment()


def _is_static(node: fx.Node, known: set[fx.Node]) -> bool:
    if not known.issuperset(node.all_input_nodes):
        return False
    return ir.is_view(node) or (ir.is_pure(node) and ir.is_number(node) and bool(node.all_input_nodes))


def _eager_memory(graph: fx.Graph) -> set[int]:
    """Tensors made inside the loop whose place matters, to an opaque operator for one: Inductor must not make them."""
    inputs = ir.input_storages(graph)
    return memory.pinned_storages(graph) - inputs.keys()


def _touches(node: fx.Node, eager: set[int]) -> bool:
    """Whether ``node`` makes such a tensor, or is a view of it."""
    return not ir.storages(node).isdisjoint(eager)


def _is_item_of_call(node: fx.Node) -> bool:
    """Whether ``node`` takes one of the results of an opaque operator."""
    return node.target is operator.getitem and not ir.is_pure(node.all_input_nodes[0])


def _is_foldable(node: fx.Node, current: Segment) -> bool:
    if node.target is not aten.copy_.default or not (current.nodes or current.stores):
        return False
    target, source = node.args[0], node.args[1]
    assert isinstance(target, fx.Node)
    assert isinstance(source, fx.Node)
    if ir.root(target).op != "placeholder" or not ir.is_aligned(target) or not ir.is_tensor(source):
        return False
    if any(ir.storage(s.args[0]) == ir.storage(target) for s in current.stores):  # type: ignore[arg-type]
        return False
    others = [read for read in (*current.reads, source) if read is not target and memory.may_overlap(read, target)]
    if not all(_is_written_back(read, source, target, current) for read in others):
        return False  # to Inductor these are two tensors: it may write the one before it has read the other
    if any(memory.may_overlap(read, s.args[0]) for read in _moved(source, current) for s in current.stores):  # type: ignore[arg-type]
        return False
    have, want = ir.value(source), ir.value(target)
    return bool(have.dtype == want.dtype and have.device == want.device and have.dim() == want.dim())


def _is_written_back(read: fx.Node, source: fx.Node, target: fx.Node, segment: Segment) -> bool:
    """Whether ``read`` is the start of ``target`` and of what is stored there, and nothing else: it does not change."""
    if source.target is not aten.cat.default or source.args[0][0] is not read:  # type: ignore[index]
        return False
    places = [(*ir.value(n).stride(), ir.value(n).storage_offset(), ir.value(n).dtype) for n in (read, target)]
    same_place = [ir.expression(x) for x in places[0]] == [ir.expression(x) for x in places[1]]
    return same_place and source in segment.nodes and not any(u in segment.nodes for u in read.users if u is not source)


def _moved(source: fx.Node, segment: Segment) -> Iterator[fx.Node]:
    """What from outside a value may be a plain copy of. Inductor drops the copy, so it would be read when stored."""
    if source not in segment.nodes:
        yield source
    elif not _computes(source):
        for arg in source.all_input_nodes:
            yield from _moved(arg, segment)


def _computes(node: fx.Node) -> bool:
    """Whether ``node`` makes new numbers; Inductor reads the arguments of such an operator before they change."""
    if not isinstance(node.target, OpOverload):
        return False
    return torch.Tag.pointwise in node.target.tags and node.target.overloadpacket not in _MAY_COPY


# Elementwise, and yet a plain copy for some dtypes and arguments.
_MAY_COPY = (aten.clone, aten.copy, aten._to_copy, aten.ceil, aten.floor, aten.round, aten.trunc, aten.pow)
