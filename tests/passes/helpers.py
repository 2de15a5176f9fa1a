"""Small IR graphs from plain functions over tensors, and a run of a graph against eager PyTorch."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.traceback import annotate

from draftfuse.lowering.emit import Emission, emit
from draftfuse.lowering.generated import register_refresh
from draftfuse.lowering.workspace import Workspace
from draftfuse.passes import Pass, ir, pipeline
from draftfuse.trace import clean

Function = Callable[..., None]
LIBRARY = torch.library.Library("toy", "FRAGMENT")
_REGISTERED: dict[str, Any] = {}


@contextmanager
def at(phase: str, step: int | None = None) -> Iterator[None]:
    """Give the operators inside a place in the loop."""
    with annotate({"phase": phase, "draft_step": step}):
        yield


def register(schema: str, run: Callable[..., Any], fake: Callable[..., Any] | None = None) -> Any:
    """Define ``toy::<schema>`` once for the whole session; returns its overload."""
    name, returns_nothing = schema.split("(")[0], schema.endswith("-> ()")

    def kernel(*args: Any) -> Any:
        result = run(*args)
        return None if returns_nothing else result

    if name not in _REGISTERED:
        LIBRARY.define(schema)
        LIBRARY.impl(name, kernel, "CPU")
        LIBRARY.impl(name, fake or (lambda *args: None), "Meta")
        _REGISTERED[name] = getattr(torch.ops.toy, name).default
    return _REGISTERED[name]


log = register("log(Tensor x, Tensor(a!) out) -> ()", lambda x, out: out.copy_(x))
add_in = register("add_in(Tensor(a!) out, Tensor x) -> ()", lambda out, x: out.add_(x))
peek = register("peek(Tensor x) -> Tensor", lambda x: (x * 2 + 1).contiguous(), lambda x: x.new_empty(x.shape))
HIDDEN: list[Tensor] = []  # what peek_hidden reads beside its argument
peek_hidden = register(
    "peek_hidden(Tensor x) -> Tensor",
    lambda x: (x + sum(h.sum() for h in HIDDEN)).contiguous(),
    lambda x: x.new_empty(x.shape),
)


def build(function: Function, *tensors: Tensor) -> fx.Graph:
    """The IR of ``function``, which returns nothing and writes its arguments; inputs carry the argument's name."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fakes = [mode.from_tensor(t, static_shapes=True) for t in tensors]
    with torch.no_grad(), fx_traceback.preserve_node_meta(), mode:
        module = make_fx(function)(*fakes)
    clean(module.graph)
    module.graph.output_node().args = ((),)
    names = function.__code__.co_varnames
    for node, name in zip(ir.placeholders(module.graph), names, strict=False):
        node.meta["path"] = name
    module.graph.owning_module = module
    return module.graph


def run_graph(graph: fx.Graph, tensors: Sequence[Tensor]) -> None:
    """Run every node in order on ``tensors``; owned rows start as rubbish, so that a missing write shows."""
    env: dict[fx.Node, Any] = {}
    given = iter(tensors)
    for node in graph.nodes:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: env[n])
        if node.op == "placeholder":
            env[node] = rubbish(ir.value(node)) if node.meta.get("owned") else next(given)
        elif node.op == "get_attr":
            env[node] = getattr(graph.owning_module, node.target)
        elif node.op == "call_function":
            env[node] = node.target(*args, **kwargs)


def rubbish(val: Tensor) -> Tensor:
    """A tensor like ``val``, filled with a value that no test computes."""
    with torch._C._DisableTorchDispatch():
        return torch.full(tuple(val.shape), 77, dtype=val.dtype)


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Deep copies that alias each other where the originals do."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().clone() for t in tensors}
    return [
        torch.empty(0, dtype=t.dtype).set_(
            storages[t.untyped_storage()._cdata], t.storage_offset(), t.shape, t.stride()
        )
        for t in tensors
    ]


def assert_equal_eager(
    function: Function, graph: fx.Graph, *tensors: Tensor, run: Callable[..., Any] = run_graph
) -> None:
    """``graph`` leaves in its inputs, bit for bit, what ``function`` leaves in them; ``peek_hidden`` reads them too."""
    expected, got = copies(tensors), copies(tensors)
    torch.manual_seed(0)
    HIDDEN[:] = expected
    function(*expected)
    torch.manual_seed(0)
    HIDDEN[:] = got
    run(graph, got)
    for name, want, have in zip(function.__code__.co_varnames, expected, got, strict=False):
        assert torch.equal(want, have), f"{name}: eager {want}, graph {have}"


def run_emitted(graph: fx.Graph, tensors: Sequence[Tensor], compiler: str = "none") -> Emission:
    """Run what emission makes of ``graph`` on ``tensors``."""
    outside = [n for n in ir.placeholders(graph) if not n.meta.get("owned")]
    live = {node.name: tensor for node, tensor in zip(outside, tensors, strict=True)}
    emission = emit(graph, ir.fake_mode_of(graph), live, compiler=compiler)
    emission.bind(0, Workspace()).run()
    return emission


def mutations(graph: fx.Graph) -> list[str]:
    """Operators that write an argument, in order."""
    return [str(node.target) for node in graph.nodes if ir.is_mutation(node)]


def numbers(count: int, dtype: torch.dtype = torch.float32, first: int = 1) -> Tensor:
    """first, first + 1, ...: exact in every dtype that the tests use."""
    return torch.arange(first, first + count).to(dtype)


def targets(graph: fx.Graph) -> list[str]:
    """Operator names in order."""
    return [
        str(n.target) if n.target is not operator.getitem else "getitem" for n in graph.nodes if n.op == "call_function"
    ]


def reads_nothing(node: fx.Node) -> Collection[int] | None:
    """Effects of operators that touch their arguments only."""
    return ()


def reads_anything(node: fx.Node) -> Collection[int] | None:
    """Effects of operators of which nobody has said anything."""
    return None


def all_passes() -> tuple[Pass, ...]:
    """The whole pipeline, for operators without declared effects."""
    return pipeline(register=register_refresh, hidden_reads=reads_anything)


def assert_close_eager(function: Function, graph: fx.Graph, *tensors: Tensor) -> None:
    """``graph`` leaves in its inputs what ``function`` leaves in them, up to rounding."""
    expected, got = copies(tensors), copies(tensors)
    function(*expected)
    run_graph(graph, got)
    for want, have in zip(expected, got, strict=True):
        torch.testing.assert_close(have, want)
