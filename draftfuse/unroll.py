"""Extend the trace of a short loop to a long one: steps that repeat are copied in the IR instead of traced again.

Python is read for :data:`TRACED_STEPS` draft tokens, the last step of which advances like one of a longer loop, so that
one such trace serves loops of any length from there on. Steps 2 and 3 must be one program whose numbers grow evenly
from step to step; :mod:`draftfuse.step_log` runs the whole loop once to see that the steps which were not traced are
that program too. Anything else is traced in full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

from draftfuse.environment import first_line
from draftfuse.passes import ir
from draftfuse.passes.memory import geometry
from draftfuse.trace import Trace

TRACED_STEPS = 4  # draft tokens of the short loop: token 0, step 1, and two steps that must agree
LAST = TRACED_STEPS - 1
aten = torch.ops.aten


class Irregular(Exception):
    """The steps are not one program; the message says where."""


@dataclass(frozen=True)
class _Place:
    """An argument that is a node of the same step, or of the step before, by its index there."""

    steps_back: int
    index: int


@dataclass(frozen=True)
class _Number:
    """An argument that grows by ``slope`` with each step; ``value`` is that of step 3."""

    value: int
    slope: int


@dataclass(frozen=True)
class _Template:
    """One step: its nodes in step 3, and the arguments of each in terms of the step."""

    nodes: list[fx.Node]
    args: list[Any]
    without_advance: int  # how many of the nodes a last step has
    steady: set[int]  # nodes whose value has the same geometry in steps 2 and 3


def extend(traced: Trace, k: int) -> None:
    """Make the open trace of ``TRACED_STEPS`` draft tokens that of ``k``, at least as many, in place.

    Raises:
        Irregular: the steps differ in more than numbers that grow evenly; the trace is of no use then.
    """
    try:
        _extend(traced, k)
    except RuntimeError as error:  # sizes that grow with the step, or values of the last step that stay in use
        raise Irregular(first_line(error)) from error


def _extend(traced: Trace, k: int) -> None:
    if traced.output_nodes:
        raise Irregular("a value leaves the loop")
    inside = [n for n in traced.graph.nodes if n.op == "call_function"]
    places = [i for i, n in enumerate(inside) if ir.draft_step(n)]
    if not places or any(ir.draft_step(n) is None for n in inside[places[0] :]):
        raise Irregular("an operator stands outside the steps")
    steps = {step: _nodes_of(traced.graph, step) for step in range(1, TRACED_STEPS)}
    template = _template(steps)
    tail = [n for n in traced.graph.nodes if ir.phase(n) == "store"]
    first, place = _tokens(steps, tail)
    last = _Copied(steps[LAST], set(range(len(template.nodes))))
    tokens = [first, steps[2][place], steps[LAST][place]]
    with traced.fake_mode, traced.graph.inserting_before(tail[0]):
        for step in range(TRACED_STEPS, k):
            last = _copy(traced, template, last, step)
            tokens.append(last.nodes[place])
    _extend_tail(traced, tail, tokens, k)
    for node in reversed(last.nodes[template.without_advance :]):
        traced.graph.erase_node(node)
    ir.eliminate_dead_code(traced.graph)


def _nodes_of(graph: fx.Graph, step: int) -> list[fx.Node]:
    return [n for n in graph.nodes if ir.draft_step(n) == step and ir.phase(n) != "store"]


def _template(steps: dict[int, list[fx.Node]]) -> _Template:
    before, nodes = steps[2], steps[3]
    advances = [ir.phase(n) == "advance" for n in nodes]
    if len(before) != len(nodes) or advances != sorted(advances):
        raise Irregular(f"steps 2 and 3 have {len(before)} and {len(nodes)} operators")
    index = {node: (step, i) for step, found in steps.items() for i, node in enumerate(found)}
    args = []
    for a, b in zip(before, nodes, strict=True):
        if not _is_like(a, b):
            raise Irregular(f"step 3 calls {b.target} where step 2 calls {a.target}")
        args.append(_common((a.args, a.kwargs), (b.args, b.kwargs), index))
    steady = {i for i, pair in enumerate(zip(before, nodes, strict=True)) if _has_one_geometry(*pair)}
    return _Template(nodes, args, advances.count(False), steady)


def _has_one_geometry(a: fx.Node, b: fx.Node) -> bool:
    if ir.is_tensor(a) and ir.is_tensor(b):
        return geometry(ir.value(a)) == geometry(ir.value(b))
    return ir.is_number(a) and ir.is_number(b) and ir.expression(ir.value(a)) == ir.expression(ir.value(b))


def _is_like(a: fx.Node, b: fx.Node) -> bool:
    same = a.op == b.op and a.target == b.target and ir.phase(a) == ir.phase(b)
    return same and ir.source_line(a) == ir.source_line(b)


def _common(before: Any, here: Any, index: dict[fx.Node, tuple[int, int]]) -> Any:
    """What an argument is in every step, from those of steps 2 and 3."""
    if type(before) is not type(here):
        raise Irregular("an argument changes its type")
    if isinstance(here, fx.Node):
        return _common_node(before, here, index)
    if isinstance(here, (list, tuple)) and len(before) == len(here):
        return type(here)(_common(b, h, index) for b, h in zip(before, here, strict=True))
    if isinstance(here, dict) and before.keys() == here.keys():
        return {name: _common(before[name], value, index) for name, value in here.items()}
    if isinstance(here, int) and not isinstance(here, bool):
        return _Number(here, here - before)
    if before == here and repr(before) == repr(here):  # 0.0 is not -0.0
        return here
    raise Irregular(f"an argument is {before!r} in step 2 and {here!r} in step 3")


def _common_node(before: fx.Node, here: fx.Node, index: dict[fx.Node, tuple[int, int]]) -> Any:
    if before is here:
        return here
    (early, first), (late, second) = index.get(before, (0, 0)), index.get(here, (0, 0))
    if late == 3 and (early, first) == (2, second):
        return _Place(0, second)
    if late == 2 and early == 1 and _is_like(before, here):
        return _Place(1, second)
    raise Irregular(f"step 3 reads {here.name} where step 2 reads {before.name}")


def _tokens(steps: dict[int, list[fx.Node]], tail: Sequence[fx.Node]) -> tuple[fx.Node, int]:
    """The drafted token of step 1, and where in a later step the node of its token stands."""
    lists: list[Any] = [a for n in tail for a in n.args if isinstance(a, (list, tuple)) and len(a) == LAST]
    for found in lists:
        own = all(node in steps[step] for step, node in enumerate(found, start=1))
        if own and (place := steps[2].index(found[1])) == steps[3].index(found[2]):
            return found[0], place
    raise Irregular("the drafted tokens are not stored together")


@dataclass
class _Copied:
    """Nodes of one step in order, and which of them have the type and geometry of the template's."""

    nodes: list[fx.Node]
    alike: set[int]


def _copy(trace: Trace, template: _Template, before: _Copied, step: int) -> _Copied:
    """Step ``step``, with fake values of its own."""
    here = _Copied([], set())
    places = {0: here, 1: before}

    def at(argument: Any) -> Any:
        if isinstance(argument, _Place):
            return places[argument.steps_back].nodes[argument.index]
        if isinstance(argument, _Number):
            return argument.value + argument.slope * (step - 3)
        if isinstance(argument, dict):
            return {name: at(value) for name, value in argument.items()}
        return type(argument)(map(at, argument)) if isinstance(argument, (list, tuple)) else argument

    def is_alike(argument: Any) -> bool:
        if isinstance(argument, _Place):
            known = places[argument.steps_back].alike
            return argument.index in (known if argument.steps_back == 0 else known & template.steady)
        if isinstance(argument, (list, tuple, dict)):
            return all(map(is_alike, argument.values() if isinstance(argument, dict) else argument))
        return not (isinstance(argument, _Number) and argument.slope)

    for index, (node, given) in enumerate(zip(template.nodes, template.args, strict=True)):
        args, kwargs = at(given)
        copy = trace.graph.create_node(node.op, node.target, args, kwargs)
        copy.meta = {**node.meta, "draft_step": step}
        if is_alike(given):
            here.alike.add(index)
            copy.meta["val"] = _value_like(node, copy, trace.fake_mode)
        else:
            copy.meta["val"] = evaluate(copy)
        here.nodes.append(copy)
    return here


def _value_like(node: fx.Node, copy: fx.Node, mode: FakeTensorMode) -> Any:
    """The fake value of ``copy``, a call with arguments of the same geometry as those of ``node``.

    Evaluating costs a millisecond a call where sizes are symbolic; a fresh value differs in its memory alone, and a
    view in what it is a view of.
    """
    val = ir.value(node)
    mine = ir.storages(node)
    bases = [i for i, a in enumerate(node.all_input_nodes) if not ir.storages(a).isdisjoint(mine)]
    if ir.is_number(node) or (bases and all(node.all_input_nodes[i] in copy.all_input_nodes for i in bases)):
        return val  # a view of what stands outside the steps
    if not isinstance(val, FakeTensor) or len(bases) > 1:
        return evaluate(copy)
    with in_kernel_invocation_manager(mode):
        if not bases:
            memory = torch._lazy_clone(val)  # the same sizes and strides on another storage
        elif isinstance(base := ir.value(copy.all_input_nodes[bases[0]]), FakeTensor):
            memory = torch.as_strided(base, val.size(), val.stride(), val.storage_offset())
        else:
            memory = None
    if memory is None or geometry(memory) != geometry(val):  # bits, another dtype, one of a list of views
        return evaluate(copy)
    return FakeTensor(mode, memory, val.fake_device)


def evaluate(node: fx.Node) -> Any:
    """The fake value of a call, from those of its arguments."""
    assert callable(node.target)
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), ir.value)
    return node.target(*args, **kwargs)


def _extend_tail(traced: Trace, tail: Sequence[fx.Node], tokens: list[fx.Node], k: int) -> None:
    """The store of all tokens, for ``k`` of them."""

    def longer(argument: Any) -> Any:
        is_tokens = isinstance(argument, (list, tuple)) and len(argument) == LAST and tokens[0] in argument
        return list(tokens) if is_tokens else argument

    with traced.fake_mode:
        for node in tail:
            node.args = tuple(map(longer, node.args))
            if node.target is aten.slice.Tensor and node.args[1:] == (1, 0, TRACED_STEPS):
                node.args = (*node.args[:3], k)
            node.meta["draft_step"] = k - 1
            node.meta["val"] = evaluate(node)
