"""One pure segment through Inductor: extract it, decompose it, compile it once for all equal ones."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import TracingContext, tracing
from torch._inductor.virtualized import V
from torch.fx.experimental.proxy_tensor import make_fx

from draftfuse.lowering.check import SchedulerCheck
from draftfuse.lowering.inductor import compile_graph, decomposition_table
from draftfuse.lowering.partition import Segment
from draftfuse.lowering.stored_code import StoredCode
from draftfuse.lowering.workarounds import work_around
from draftfuse.passes import ir
from draftfuse.passes.render import canonical

aten = torch.ops.aten
_INTEGERS = (torch.int32, torch.int64, torch.bool, torch.uint8)


@dataclass
class Extracted:
    """A segment as a graph of its own: what it reads, what it returns, and where it stores in place."""

    graph: fx.Graph
    inputs: list[fx.Node]  # nodes of the outer graph, in the order of the placeholders
    outputs: list[fx.Node]
    stored: list[int]  # for each store, the input that it writes
    nodes: list[fx.Node] = field(default_factory=list)  # of the outer graph, in the order of the copies
    suffix: str = ""  # of the text that the key is made of
    key: str = ""
    text: str = ""

    def __post_init__(self) -> None:
        if self.key:
            return
        self.text = canonical(self.graph)
        self.key = hashlib.sha256(f"{self.text}{self.suffix}".encode()).hexdigest()

    @property
    def body(self) -> str:
        """The text of what it computes and stores, whatever it returns."""
        lines = self.text.splitlines()[:-1]
        return "\n".join([*lines, self.suffix])

    @property
    def results(self) -> str:
        """What it stores, which :attr:`body` does not say."""
        places = {node: i for i, node in enumerate(self.graph.nodes)}
        returned: Any = self.graph.output_node().args[0]
        return str([places[n] for n in returned[len(self.outputs) :]])

    def returning(self, outputs: Sequence[int]) -> Extracted:
        """The same segment with the values of ``outputs``, counted along :attr:`nodes`, as its results."""
        graph = fx.Graph()
        copies = dict[fx.Node, fx.Node]()
        results = list(graph.graph_copy(self.graph, copies))  # type: ignore[arg-type]
        inside = [copies[n] for n in self.graph.nodes if n.op == "call_function"]
        stores = results[len(self.outputs) :]
        graph.output((*(inside[i] for i in outputs), *stores))
        chosen = [self.nodes[i] for i in outputs]
        return Extracted(graph, self.inputs, chosen, self.stored, self.nodes, self.suffix)

    def like(self, other: Extracted, outputs: Sequence[int]) -> Extracted:
        """What :meth:`returning` gives, where it gave ``other`` for a segment that computes and stores the same."""
        return replace(other, inputs=self.inputs, outputs=[self.nodes[i] for i in outputs], nodes=self.nodes)


def extract(segment: Segment, symbol: fx.Node | None) -> Extracted:
    """Copy ``segment`` out of its graph. Misaligned static views are taken inside, from their aligned base."""
    inside = set(segment.nodes)
    nodes = _with_misaligned_views(segment, inside)
    targets = [s.args[0] for s in segment.stores]
    reads = [a for n in nodes for a in n.all_input_nodes] + [a for s in segment.stores for a in s.all_input_nodes]
    inputs = [n for n in dict.fromkeys(reads) if n not in inside]
    if symbol is not None and symbol not in inputs and _is_symbolic(inputs):
        inputs.insert(0, symbol)
    outputs = [n for n in segment.nodes if any(u not in inside and u not in segment.stores for u in n.users)]
    graph, copies = fx.Graph(), {}
    for i, node in enumerate(inputs):
        copies[node] = graph.placeholder(f"arg{i}")
        copies[node].meta["val"] = ir.value(node)
    for node in nodes:
        copies[node] = graph.node_copy(node, lambda n: copies[n])
        copies[node].meta = {"val": ir.value(node)}
    stores = [copies[s.args[1]] for s in segment.stores]  # type: ignore[index]
    graph.output((*(copies[n] for n in outputs), *stores))
    stored = [inputs.index(t) for t in targets]  # type: ignore[arg-type]
    suffix = f"\nstores {stored} hint {_hint(symbol)}"
    return Extracted(graph, inputs, outputs, stored, nodes, suffix)


def share_outputs(segments: Sequence[Extracted]) -> list[Extracted]:
    """Let segments that compute the same return the same, so that they are compiled once.

    On the CPU only, where compiling costs more than a few values that nobody reads.
    """
    wanted: dict[str, set[int]] = {}
    for segment in segments:
        places = {node: i for i, node in enumerate(segment.nodes)}
        wanted.setdefault(segment.body, set()).update(places[n] for n in segment.outputs)
    shared, made = list[Extracted](), dict[tuple[str, str], Extracted]()
    for segment in segments:
        union, same = sorted(wanted[segment.body]), (segment.body, segment.results)
        other = made.get(same)
        if len(union) == len(segment.outputs) or not all(_is_on_cpu(segment.nodes[i]) for i in union):
            shared.append(segment)
        else:
            shared.append(segment.returning(union) if other is None else segment.like(other, union))
            made[same] = shared[-1]
    return shared


def _is_on_cpu(node: fx.Node) -> bool:
    return isinstance(val := ir.value(node), Tensor) and val.device.type == "cpu"


def extract_refresh(node: fx.Node, symbol: fx.Node | None) -> Extracted:
    """The body of a generated refresh operator, with its rows as stores."""
    reads, numbers, rows = node.args
    inputs = [*reads, *numbers, *rows]  # type: ignore[misc]
    body: fx.GraphModule = node.meta["body"]
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    if symbol is not None and symbol not in inputs and _is_symbolic(inputs):
        inputs.insert(0, symbol)
    made = [graph.placeholder(f"arg{i}") for i in range(len(inputs))]
    for new, outer in zip(made, inputs, strict=True):
        new.meta["val"] = ir.value(outer)
    named = dict(zip(inputs, made, strict=True))
    given = [named[n] for n in (*reads, *numbers)]  # type: ignore[misc]
    copies.update(zip(ir.placeholders(body.graph), given, strict=True))
    graph.output(graph.graph_copy(body.graph, copies))
    stored = [inputs.index(r) for r in rows]  # type: ignore[union-attr]
    suffix = f"\nstores {stored} hint {_hint(symbol)}"
    return Extracted(graph, inputs, [], stored, suffix=suffix)


def _hint(symbol: fx.Node | None) -> object:
    return "symbolic" if symbol is not None else "static"


def _with_misaligned_views(segment: Segment, inside: set[fx.Node]) -> list[fx.Node]:
    """The segment's nodes, preceded by the static views that its kernels could not take as inputs."""
    extra: dict[fx.Node, None] = {}

    def visit(node: fx.Node) -> None:
        if node in inside or node in extra or not ir.is_view(node):
            return
        if ir.root(node).op == "placeholder" and not ir.is_aligned(node):
            visit(node.all_input_nodes[0])
            extra[node] = None

    for node in segment.nodes:
        for arg in node.all_input_nodes:
            visit(arg)
    for store in segment.stores:
        visit(store.all_input_nodes[-1])
    inside.update(extra)
    return [*extra, *segment.nodes]


def _is_symbolic(inputs: Sequence[fx.Node]) -> bool:
    vals = [ir.value(n) for n in inputs]
    tensors = [v for v in vals if isinstance(v, Tensor)]
    return any(isinstance(s, torch.SymInt) for t in tensors for s in t.shape)


@dataclass
class Compiled:
    """A compiled segment: call it with its inputs as a list; right where all ``guards`` hold."""

    run: Callable[[list[Any]], Sequence[Any]]
    guards: list[Any] = field(default_factory=list)  # sympy expressions in one symbol
    findings: list[str] = field(default_factory=list)


def holds(guards: Sequence[Any], num_reqs: int) -> bool:
    """Whether every guard is true at ``num_reqs`` (a guard that stays undecided does not hold)."""
    return all(guard.subs(dict.fromkeys(guard.free_symbols, num_reqs)) == True for guard in guards)  # noqa: E712


def interpreter(extracted: Extracted) -> fx.Interpreter:
    """Runs the segment as it stands; to write its Python would take longer."""
    return fx.Interpreter(torch.nn.Module(), graph=extracted.graph)


def decompose(extracted: Extracted, fake_mode: Any) -> fx.GraphModule:
    """The segment as Inductor's own operators, with its stores as trailing ``copy_``."""
    fakes = [ir.value(n) for n in extracted.inputs]
    with fake_mode:
        flat = make_fx(interpreter(extracted).run, decomposition_table=decomposition_table())(*fakes)
    work_around(flat.graph)
    _append_stores(flat.graph, extracted.stored)
    flat.recompile()
    return flat


def _append_stores(graph: fx.Graph, stored: Sequence[int]) -> None:
    results = list(graph.output_node().args[0])  # type: ignore[arg-type]
    keep = len(results) - len(stored)
    inputs = ir.placeholders(graph)
    with graph.inserting_before(graph.output_node()):
        for index, result in zip(stored, results[keep:], strict=True):
            node = graph.call_function(aten.copy_.default, (inputs[index], result))
            node.meta["val"] = ir.value(inputs[index])
    graph.output_node().args = (tuple(results[:keep]),)


def compile_segment(extracted: Extracted, fake_mode: Any, stored: StoredCode) -> Compiled:
    """Code for one segment, from disk where it was compiled before; raises what Inductor raises."""
    with torch.no_grad(), V.set_fake_mode(fake_mode), tracing(TracingContext(fake_mode)):
        inputs = [ir.value(n) for n in extracted.inputs]
        note = stored.note_of(extracted.key, inputs)
        if note is not None and (found := stored.load(note, inputs)) is not None:
            return Compiled(*found)
        flat = decompose(extracted, fake_mode)
        fakes = [ir.value(n) for n in ir.placeholders(flat.graph)]
        static = [i for i, v in enumerate(fakes) if isinstance(v, Tensor)]
        known = len(fake_mode.shape_env.guards)
        scalar = _is_row_arithmetic(flat.graph)
        check = SchedulerCheck(extracted.key)
        run, findings = compile_graph(flat, fakes, static, check, stored.with_scalars(scalar))
        guards = [g.expr for g in fake_mode.shape_env.guards[known:]]
        if note is not None and not findings:
            stored.save(note, run, scalar)
    return Compiled(run, guards, findings)


def _is_row_arithmetic(graph: fx.Graph) -> bool:
    """Whether a graph for the CPU computes integers and flags only: positions, lengths, slots, a few a row."""
    values = [ir.value(n) for n in graph.nodes if n.op == "call_function"]
    return all(isinstance(v, Tensor) and v.device.type == "cpu" and v.dtype in _INTEGERS for v in values)
