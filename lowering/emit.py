"""From the IR to a callable: segments compiled, opaque operators called as they stand, one straight line of Python.

An :class:`Emission` belongs to one graph (one k, symbolic or static number of requests). :meth:`Emission.bind` gives
the callable for one request capacity: static views are taken once, so a call passes tensors that exist already.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from draftfuse.errors import EmissionError
from draftfuse.lowering.partition import Partition, Segment, partition
from draftfuse.lowering.segment import (
    Compiled,
    Extracted,
    compile_segment,
    extract,
    extract_refresh,
    holds,
    share_outputs,
)
from draftfuse.lowering.stored_code import StoredCode
from draftfuse.lowering.whole import compile_whole, extract_whole
from draftfuse.lowering.workspace import Workspace
from draftfuse.passes import ir
from draftfuse.passes.collectives import is_functional_collective

Call = tuple[Callable[..., Any], list[fx.Node], list[fx.Node]]
EMISSION_FILE, PLACES = "<draftfuse emission>", "places"  # where a traceback finds the node of a line
_COMPILED: dict[tuple[str, str], Compiled] = {}  # equal segments of all loops of this process are compiled once


@dataclass
class Bound:
    """A callable on fixed buffers, and the tensors that it must keep alive."""

    run: Callable[[], None]
    num_reqs: int
    tensors: list[Tensor]


@dataclass
class Emission:
    """Generated code for one graph."""

    graph: fx.Graph
    fake_mode: Any
    tensors: dict[str, Tensor]
    symbol: fx.Node | None
    program: Partition
    calls: dict[int, Compiled] = field(default_factory=dict)  # index of a segment item -> code
    extracted: dict[int, Extracted] = field(default_factory=dict)
    seconds: float = 0.0
    unique: int = 0

    @property
    def sources(self) -> dict[str, Tensor]:
        """Tensors that the loop read from Python objects, by the path that they were read from."""
        named = [(n.meta.get("source", n.name), n.name) for n in ir.placeholders(self.graph)]
        return {path: self.tensors[name] for path, name in named if name in self.tensors}

    def guards_hold(self, num_reqs: int) -> bool:
        """Whether the generated code is right for ``num_reqs`` rows."""
        traced = [g.expr for g in self.fake_mode.shape_env.guards] if self.symbol is not None else []
        return holds(traced, num_reqs) and all(holds(c.guards, num_reqs) for c in self.calls.values())

    def bind(self, num_reqs: int, workspace: Workspace) -> Bound:
        """The callable for ``num_reqs`` padded rows."""
        env = self._environment(num_reqs, workspace)
        lines, names = _Source(self, env).lines()
        run = _function(lines, names)
        return Bound(run, num_reqs, [t for t in env.values() if isinstance(t, Tensor)])

    def _environment(self, num_reqs: int, workspace: Workspace) -> dict[fx.Node, Any]:
        """Values of placeholders and static nodes at ``num_reqs``."""
        env: dict[fx.Node, Any] = {}
        rows = workspace.start()
        for node in ir.placeholders(self.graph):
            if node is self.symbol:
                env[node] = num_reqs
            elif node.meta.get("owned"):
                val = ir.value(node)
                env[node] = rows.take([_at(s, self.symbol, num_reqs) for s in val.shape], val.dtype, val.device)
            else:
                env[node] = self.tensors[node.name]
        for node in self.program.static:
            assert callable(node.target)
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: env[n])
            env[node] = node.target(*args, **kwargs)
        return env


def _at(size: Any, symbol: fx.Node | None, num_reqs: int) -> int:
    """A symbolic size at ``num_reqs``."""
    expression = ir.expression(size)
    if isinstance(expression, int) or symbol is None:
        return int(expression)
    return int(expression.subs(ir.expression(ir.value(symbol)), num_reqs))


def emit(
    graph: fx.Graph,
    fake_mode: Any,
    tensors: dict[str, Tensor],
    *,
    compiler: str,
    emission: str = "segments",
    options: dict[str, Any] | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Emission:
    """Generate code for ``graph``.

    Args:
        compiler: ``"inductor"`` or ``"none"`` (every operator as it stands).
        emission: ``"segments"``, or ``"whole"``: all of the graph through Inductor at once.

    Raises:
        EmissionError: the generated code would write a persistent buffer late or elsewhere.
    """
    start = time.perf_counter()
    symbol = next((n for n in ir.placeholders(graph) if isinstance(ir.value(n), torch.SymInt)), None)
    whole = compiler == "inductor" and emission == "whole"
    made = Emission(graph, fake_mode, tensors, symbol, _one_item(graph) if whole else partition(graph))
    if whole:
        made.extracted[0] = extract_whole(graph)
        made.calls[0] = _refuse_faults(compile_whole(made.extracted[0], fake_mode, options or {}))
        made.unique = 1
    elif compiler == "inductor":
        _compile_segments(made, options or {}, progress)
    made.seconds = time.perf_counter() - start
    return made


def _one_item(graph: fx.Graph) -> Partition:
    return Partition([], [Segment([n for n in graph.nodes if n.op == "call_function"])])


def _compile_segments(emission: Emission, options: dict[str, Any], progress: Callable[[str], None]) -> None:
    keys: set[str] = set()
    found = {i: e for i, t in enumerate(emission.program.items) if (e := _extract_item(t, emission.symbol)) is not None}
    regions = [i for i in found if isinstance(emission.program.items[i], Segment)]
    found |= dict(zip(regions, share_outputs([found[i] for i in regions]), strict=True))
    symbol = ir.value(emission.symbol) if emission.symbol is not None else None
    stored = StoredCode(emission.fake_mode, symbol, options)
    for index, extracted in found.items():
        keys.add(extracted.key)
        identity = (extracted.key, repr(sorted(options.items())))
        if identity not in _COMPILED:
            progress(f"segment {len(keys)}: {len(extracted.graph.nodes)} nodes")
            _COMPILED[identity] = _refuse_faults(compile_segment(extracted, emission.fake_mode, stored))
        emission.calls[index], emission.extracted[index] = _COMPILED[identity], extracted
    emission.unique = len(keys)


def _extract_item(item: Segment | fx.Node, symbol: fx.Node | None) -> Extracted | None:
    if isinstance(item, Segment):
        return extract(item, symbol)
    return extract_refresh(item, symbol) if "body" in item.meta else None


def _refuse_faults(compiled: Compiled) -> Compiled:
    if compiled.findings:
        raise EmissionError(
            "generated code does not treat persistent buffers as the loop does",
            "; ".join(compiled.findings),
            "each store in place and each read of the version that program order gives it",
            "Use emission='segments' or compiler='none', and report the loop.",
        )
    return compiled


class _Source:
    """Writes the Python of one bound callable."""

    def __init__(self, emission: Emission, env: dict[fx.Node, Any]) -> None:
        self.emission, self.env = emission, env
        self.names: dict[str, Any] = {}
        self.last_use = self._last_uses()

    def lines(self) -> tuple[list[str], dict[str, Any]]:
        out: list[str] = []
        places = dict[int, fx.Node]()
        for index, item in enumerate(self.emission.program.items):
            if index in self.emission.calls:
                out.append(self._segment_line(index))
            else:
                nodes = [*item.nodes, *item.stores] if isinstance(item, Segment) else [item]
                places |= {len(out) + i: n for i, n in enumerate(nodes, 2) if is_functional_collective(n.target)}
                out += [self._node_line(node) for node in nodes]
            dead = [self._name(n) for n in self.last_use.get(index, []) if n not in self.env]
            out += [f"del {', '.join(dead)}"] if dead else []
        if places:
            self.names[PLACES] = places
        return out, self.names

    def _last_uses(self) -> dict[int, list[fx.Node]]:
        last: dict[fx.Node, int] = {}
        for index, item in enumerate(self.emission.program.items):
            made = self._made(index, item)
            used = self._used(index, item)
            last.update(dict.fromkeys([*made, *used], index))
        ends: dict[int, list[fx.Node]] = {}
        for node, index in last.items():
            ends.setdefault(index, []).append(node)
        return ends

    def _made(self, index: int, item: Segment | fx.Node) -> list[fx.Node]:
        if index in self.emission.extracted:
            return self.emission.extracted[index].outputs
        return [*item.nodes, *item.stores] if isinstance(item, Segment) else [item]

    def _used(self, index: int, item: Segment | fx.Node) -> Sequence[fx.Node]:
        if index in self.emission.extracted:
            return self.emission.extracted[index].inputs
        nodes = [*item.nodes, *item.stores] if isinstance(item, Segment) else [item]
        return [a for n in nodes for a in n.all_input_nodes]

    def _segment_line(self, index: int) -> str:
        extracted = self.emission.extracted[index]
        function = f"s{index}"
        self.names[function] = self.emission.calls[index].run
        call = f"{function}([{', '.join(self._argument(n) for n in extracted.inputs)}])"
        results = [self._name(n) for n in extracted.outputs]
        return f"({', '.join(results)},) = {call}" if results else call

    def _node_line(self, node: fx.Node) -> str:
        function = f"f_{node.name}"
        self.names[function] = node.target
        args = [self._argument(a) for a in node.args]
        args += [f"{key}={self._argument(v)}" for key, v in node.kwargs.items()]
        return f"{self._name(node)} = {function}({', '.join(args)})"

    def _argument(self, arg: Any) -> str:
        if isinstance(arg, fx.Node):
            return self._name(arg)
        if isinstance(arg, (list, tuple)):
            return "[" + ", ".join(map(self._argument, arg)) + "]"
        if isinstance(arg, (int, float, bool, str, type(None))):
            return repr(arg) if arg == arg and arg not in (float("inf"), float("-inf")) else f"float('{arg}')"
        name = f"c{len(self.names)}"
        self.names[name] = arg
        return name

    def _name(self, node: fx.Node) -> str:
        if node in self.env:
            self.names[f"b_{node.name}"] = self.env[node]
            return f"b_{node.name}"
        return f"v_{node.name}"


def _function(lines: list[str], names: dict[str, Any]) -> Callable[[], None]:
    """Compile the lines; everything bound is a default argument, which is a local variable to the interpreter."""
    body = "\n".join(f"    {line}" for line in lines) or "    pass"
    parameters = ", ".join(f"{name}={name}" for name in names)
    scope = dict(names)
    exec(compile(f"def run({parameters}):\n{body}\n", EMISSION_FILE, "exec"), scope)
    function: Callable[[], None] = scope["run"]
    return function
