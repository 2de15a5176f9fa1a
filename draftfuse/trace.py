"""Trace a draft loop into the IR: Dynamo reads the Python, make_fx normalises to ATen with mutations in program order.

Dynamo is the only front-end that traces a plain object unchanged and gives every node the user's line. Its graph is
re-traced under its own shape environment, so that one set of guards covers both.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import Tensor, fx
from torch._dynamo import exc as dynamo_exc
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from draftfuse import python_state
from draftfuse.attribute_reads import Read
from draftfuse.baked import taken
from draftfuse.errors import DraftfuseError
from draftfuse.passes import ir
from draftfuse.paths import arguments_of, of_modules
from draftfuse.trace_facts import Facts, of_trace
from draftfuse.untraceable import untraceable


@dataclass
class Trace:
    """A traced loop: the IR, the tensor behind each placeholder, and the environment of its symbols."""

    module: fx.GraphModule
    tensors: dict[str, Tensor]  # placeholder name -> the live tensor
    fake_mode: FakeTensorMode
    symbol: Any = None  # the sympy symbol of n, None in a static trace
    hint: int = 0
    outputs: int = 0  # values that would leave the loop: each is a fault
    output_nodes: list[fx.Node] = field(default_factory=list)
    front: fx.Graph | None = None  # Dynamo's own graph, for the lint
    baked: dict[str, Any] = field(default_factory=dict)  # host values that the trace took, by path
    copied_steps: int = 0  # draft steps that repeat others and were not traced
    reads: list[Read] = field(default_factory=list)  # attributes that only those steps read
    again: bool = False  # made of what an earlier build traced
    tried: bool = False  # it has had its trial
    trial_seconds: float = 0.0  # which took so long
    irregular: str = ""  # why all steps were traced, where a shorter trace was tried first
    facts: Facts | None = None  # what the trace rests on, for other processes
    entry: Any = None  # its place on disk

    @property
    def graph(self) -> fx.Graph:
        """The flat graph."""
        return self.module.graph


def trace(
    loop: Callable[..., None], args: tuple[Any, ...], symbolic: str | None = None, note_facts: bool = False
) -> Trace:
    """Trace ``loop(*args)``; the integer parameter named ``symbolic`` becomes the one size symbol.

    ``note_facts`` asks for all that another process must find unchanged before it may use the trace.

    Raises:
        UntraceableLoopError: Dynamo cannot trace a statement; the message has the user's line.
    """
    box: dict[str, Any] = {}
    state = python_state.snapshot(*args)
    # Dynamo keeps compiled code by code object: a fresh one leaves nothing behind for the next trace.
    fresh = types.FunctionType(loop.__code__.replace(), loop.__globals__, loop.__name__, loop.__defaults__)
    backend = _Backend(box, arguments_of(loop, args), loop.__globals__, note_facts)
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(_dynamic_sources(f"L['{symbolic}']" if symbolic else ""))
        stack.enter_context(torch._dynamo.config.patch(suppress_errors=False))
        try:
            torch.compile(fresh, fullgraph=True, dynamic=False, backend=backend)(*args)
        except DraftfuseError:
            raise
        except (dynamo_exc.TorchDynamoException, RuntimeError) as error:
            raise untraceable(error) from error
        finally:
            state.restore()  # Dynamo replays what the loop did in Python
    if "trace" not in box:
        return empty_trace()
    traced: Trace = box["trace"]
    bind(traced, box["args"])
    lift_constants(traced)
    return traced


def _dynamic_sources(names: str) -> Any:
    return torch.compiler.config.patch(dynamic_sources=names)  # type: ignore[attr-defined]


def empty_trace() -> Trace:
    """The trace of a loop that does nothing (K = 1)."""
    graph = fx.Graph()
    graph.output(())
    return Trace(fx.GraphModule(torch.nn.Module(), graph), {}, FakeTensorMode())


class _Backend:
    """Dynamo backend that keeps the graph; the callable that it returns keeps the live arguments and runs nothing."""

    def __init__(
        self, box: dict[str, Any], roots: dict[str, Any], module_globals: dict[str, Any], note_facts: bool
    ) -> None:
        self.box, self.roots, self.module_globals, self.note_facts = box, roots, module_globals, note_facts

    def __call__(self, module: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        self.box["trace"] = normalise(module, example_inputs)
        self.box["trace"].baked = taken(self.roots, self.module_globals)
        self.box["trace"].facts = of_trace(self.roots, self.module_globals) if self.note_facts else None
        outputs = module.graph.output_node().args[0]
        assert isinstance(outputs, (list, tuple))

        def keep(*args: Any) -> list[Any]:
            self.box["args"] = args
            return [None] * len(outputs)

        return keep


def normalise(module: fx.GraphModule, example_inputs: list[Any]) -> Trace:
    """Re-trace Dynamo's graph to ATen operators with ordered mutation, keeping source lines and loop places."""
    context = TracingContext.get()
    mode = context.fake_mode
    assert mode is not None
    fakes = [mode.from_tensor(e, static_shapes=True) if isinstance(e, Tensor) else e for e in example_inputs]
    with fx_traceback.preserve_node_meta(), mode:
        flat = make_fx(fx.Interpreter(module).run)(*fakes)
    drop_numbers(flat.graph)
    clean(flat.graph)
    traced = Trace(flat, {}, mode, front=module.graph)
    name_placeholders(module, flat)
    for node in ir.placeholders(flat.graph):
        if isinstance(ir.value(node), torch.SymInt):
            traced.symbol, traced.hint = ir.expression(ir.value(node)), int(ir.value(node).node.hint)
    # A tensor that was there before is what in-place arithmetic (``self.calls += 1``) binds again; where another name
    # gets it, the run of the loop shows that.
    traced.output_nodes = [n for n in ir.nodes_in(flat.graph.output_node().args[0]) if n.op != "placeholder"]
    traced.outputs = len(traced.output_nodes)
    return traced


def drop_numbers(graph: fx.Graph) -> None:
    """Let no size leave the loop: what Python keeps of it is Python state, and a run of the loop shows the line."""
    output = graph.output_node()
    kept = ir.nodes_in(output.args[0])
    if any(map(ir.is_number, kept)):
        output.args = ([node for node in kept if not ir.is_number(node)],)


def clean(graph: fx.Graph) -> None:
    """Bring make_fx's graph into the IR's form: no result of a mutation is used, places are plain metadata."""
    ir.undo_renames(graph)
    behind: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        custom = node.meta.get("custom") or {}
        node.meta["phase"], node.meta["draft_step"] = custom.get("phase", ""), custom.get("draft_step")
        if node.target is torch.ops.aten.detach.default:
            node.replace_all_uses_with(node.args[0])
        if node.target is operator.getitem:
            behind.setdefault(node.args[0], node.args[0]).append(node)  # no cut falls between it and its producer
            behind[node.args[0]] = node
    ir.eliminate_dead_code(graph)


def name_placeholders(module: fx.GraphModule, flat: fx.GraphModule) -> None:
    """Carry over the Python path of every lifted value (``L['spec'].inputs.seq_lens`` -> ``spec.inputs.seq_lens``)."""
    for old, new in zip(ir.placeholders(module.graph), ir.placeholders(flat.graph), strict=True):
        graph_arg = old.meta.get("grapharg")
        source = getattr(graph_arg, "source", None)
        name = getattr(source, "name", None)
        text = name() if callable(name) else name
        if text:
            new.meta["source"] = str(text)
            named = of_modules(str(text)).replace("L['", "").replace("']", "", 1)
            new.meta["path"] = named.replace("_modules['", "").replace("']", "")


def bind(traced: Trace, args: tuple[Any, ...]) -> None:
    """Remember the live tensor behind each placeholder."""
    for node, arg in zip(ir.placeholders(traced.graph), args, strict=True):
        if isinstance(arg, Tensor):
            traced.tensors[node.name] = arg


def lift_constants(traced: Trace) -> None:
    """Make inputs of the tensors that the loop creates from Python numbers (``torch.tensor([0.5, 2.0])``)."""
    lifted: dict[str, fx.Node] = {}
    for node in list(traced.graph.find_nodes(op="get_attr")):
        name = str(node.target)
        if not isinstance(getattr(traced.module, name), Tensor):
            continue  # the sub-graph of a higher-order operator, which the build refuses
        if name not in lifted:
            value = getattr(traced.module, name)
            with traced.graph.inserting_after(ir.placeholders(traced.graph)[-1]):
                lifted[name] = traced.graph.placeholder(f"constant{len(lifted)}")
            lifted[name].meta.update(
                val=traced.fake_mode.from_tensor(value, static_shapes=True), path=f"constant {name}", literal=True
            )
            traced.tensors[lifted[name].name] = value
        node.replace_all_uses_with(lifted[name])
        traced.graph.erase_node(node)
