"""The other emission: the whole graph through Inductor at once, for fusion across opaque operators' neighbours.

Inductor gives wrong values where a mutating operator runs twice on one buffer with a lazy read between: the fallback
kernel registers itself before it realises the pending readers of what it writes. Three things make this emission right:

- mutations stay in program order (``reorder_for_locality`` off, nothing is functionalised, so nothing is re-inplaced);
- every mutating operator in the graph is draftfuse's own (a foreign one is wrapped), and own mutating operators have a
  lowering that realises all pending readers of their buffers first;
- :class:`VersionCheck` compares, on the scheduled IR, which version of each buffer every kernel reads with the version
  that program order gives it. A build that fails is never used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import TracingContext, tracing
from torch._inductor.lowering import fallback_handler, lowerings, register_lowering
from torch._inductor.virtualized import V
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import make_fx

from draftfuse.lowering.check import VersionCheck
from draftfuse.lowering.effects import OWN_NAMESPACES
from draftfuse.lowering.generated import register_wrapper
from draftfuse.lowering.inductor import compile_graph, decomposition_table
from draftfuse.lowering.segment import Compiled, Extracted, interpreter
from draftfuse.lowering.workarounds import work_around
from draftfuse.passes import ir

OPTIONS: dict[str, Any] = {"reorder_for_locality": False}


def extract_whole(graph: fx.Graph) -> Extracted:
    """All of ``graph`` on its own: every placeholder that is used is an input, nothing is an output."""
    copy, copies = fx.Graph(), {}
    inputs = [n for n in ir.placeholders(graph) if n.users]
    for i, node in enumerate(inputs):
        copies[node] = copy.placeholder(f"arg{i}")
        copies[node].meta["val"] = ir.value(node)
    for node in (n for n in graph.nodes if n.op == "call_function"):
        copies[node] = copy.node_copy(node, lambda n: copies[n])
        copies[node].target = owned_operator(node)
        copies[node].meta = {"val": ir.value(node)}
    copy.output(())
    return Extracted(copy, inputs, [], [], suffix="\nwhole")


def owned_operator(node: fx.Node) -> Any:
    """The operator itself, or draftfuse's wrapper of a foreign one that mutates."""
    foreign = isinstance(node.target, OpOverload) and node.target.namespace not in (*OWN_NAMESPACES, "aten", "prims")
    operator: Any = register_wrapper(node.target) if foreign and ir.is_mutation(node) else node.target  # type: ignore[arg-type]
    if isinstance(operator, OpOverload) and operator.namespace in OWN_NAMESPACES and operator._schema.is_mutable:
        realise_readers_first(operator)
    return operator


def realise_readers_first(operator: OpOverload) -> None:
    """Give an own mutating operator a lowering that first realises every pending reader of what it writes."""
    assert operator.namespace in OWN_NAMESPACES
    if operator in lowerings:
        return
    fallback = fallback_handler(operator, add_to_fallback_set=False)
    writes = [i for i, a in enumerate(operator._schema.arguments) if a.alias_info is not None and a.alias_info.is_write]

    def lower(*args: Any, **kwargs: Any) -> Any:
        for index in writes:
            given = args[index] if index < len(args) else kwargs.get(operator._schema.arguments[index].name)
            for buffer in list(given) if isinstance(given, (list, tuple)) else [given]:
                assert buffer is not None
                buffer.realize()
                V.graph.mark_buffer_mutated(buffer.get_name())
        return fallback(*args, **kwargs)

    register_lowering(operator, type_promotion_kind=None)(lower)


def compile_whole(extracted: Extracted, fake_mode: Any, options: dict[str, Any]) -> Compiled:
    """Compile the whole graph; ``findings`` is not empty where the generated code must not be used."""
    fakes = [ir.value(n) for n in extracted.inputs]
    with torch.no_grad(), V.set_fake_mode(fake_mode), tracing(TracingContext(fake_mode)):
        with fake_mode:
            flat = make_fx(interpreter(extracted).run, decomposition_table=decomposition_table())(*fakes)
        ir.undo_renames(flat.graph)
        work_around(flat.graph)
        flat.graph.output_node().args = ((),)
        flat.recompile()
        values = [ir.value(n) for n in ir.placeholders(flat.graph)]
        static = [i for i, v in enumerate(values) if isinstance(v, Tensor)]
        known = len(fake_mode.shape_env.guards)
        check = VersionCheck(extracted.key)
        run, findings = compile_graph(flat, values, static, check, {**OPTIONS, **options})
        guards = [g.expr for g in fake_mode.shape_env.guards[known:]]
    return Compiled(run, guards, findings)
