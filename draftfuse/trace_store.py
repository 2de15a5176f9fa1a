"""A traced loop as plain data, and back: JSON, because a folder of cached files must not be able to run code."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from draftfuse.passes import ir
from draftfuse.trace import Trace
from draftfuse.trace_facts import NotCacheable, is_path
from draftfuse.trace_values import Reader, Writer, new_symbol

_META = ("phase", "draft_step", "stack_trace", "source", "path")
_FUNCTIONS = {
    **{n: getattr(operator, n) for n in ("getitem", "add", "sub", "mul", "floordiv", "mod", "neg", "pow")},
    **{n: getattr(operator, n) for n in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{n: getattr(torch, n) for n in ("sym_max", "sym_min")},
}
_NAMES = {function: name for name, function in _FUNCTIONS.items()}
_OWN = ("aten", "prims", "draftfuse")  # operators whose meaning the versions say
_CONSTANTS: tuple[tuple[str, type], ...] = (
    ("dtype", torch.dtype),
    ("layout", torch.layout),
    ("memory_format", torch.memory_format),
)


def to_json(traced: Trace) -> dict[str, Any]:
    """All of a trace but its tensors, its host values and Dynamo's own graph.

    Raises:
        NotCacheable: something in it has no plain form.
    """
    if traced.outputs:
        raise NotCacheable("a value leaves the loop")
    if traced.front is not None:
        _require_visible(traced.front, traced.graph)
    texts, schemas = dict[str, int](), dict[str, str]()
    writer = Writer(traced.symbol)
    index = {node: i for i, node in enumerate(traced.graph.nodes)}
    nodes = [_node(node, index, texts, schemas, writer) for node in traced.graph.nodes]
    env = traced.fake_mode.shape_env
    known = env is not None and traced.symbol is not None
    return {
        "nodes": nodes,
        "texts": list(texts),
        "schemas": schemas,
        "layouts": writer.layouts,
        "symbol": str(traced.symbol) if known else None,
        "hint": traced.hint,
        "guards": [writer.expression(g.expr) for g in env.guards] if env is not None and known else [],
        "range": str(env.var_to_range.get(traced.symbol)) if env is not None and known else "",
        "copied_steps": traced.copied_steps,
        "irregular": traced.irregular,
        "baked": list(traced.baked),
    }


def _require_visible(front: fx.Graph, graph: fx.Graph) -> None:
    """Refuse what Python of the user's decided while Dynamo's graph was taken apart: no guard is on that."""
    there = {n.target._schema.name for n in graph.nodes if isinstance(n.target, OpOverload)}
    for node in (n for n in front.nodes if n.op == "call_function"):
        if not _is_visible(node.target, there):
            raise NotCacheable(f"a call of {node.target} that was taken apart")


def _is_visible(target: Any, there: set[str]) -> bool:
    if isinstance(target, OpOverloadPacket):
        target = getattr(target, target.overloads()[0])
    if isinstance(target, OpOverload):
        return target.namespace in _OWN or target._schema.name in there
    module = str(getattr(target, "__module__", None) or "torch").split(".")[0]
    return module in ("torch", "_operator", "builtins", "math") and not isinstance(target, HigherOrderOperator)


def _node(
    node: fx.Node, index: dict[fx.Node, int], texts: dict[str, int], schemas: dict[str, str], writer: Writer
) -> list[Any]:
    if node.meta.get("literal"):
        raise NotCacheable("a tensor that the loop makes of numbers")
    meta = [node.meta.get(name) for name in _META]
    meta[2] = texts.setdefault(meta[2], len(texts)) if meta[2] is not None else None
    args = _arg(tuple(node.args), index), _arg(dict(node.kwargs), index)
    value = writer.value(node.meta["val"]) if "val" in node.meta else None
    return [node.op, node.name, _target(node, schemas), *args, meta, value]


def _target(node: fx.Node, schemas: dict[str, str]) -> str:
    if node.op in ("placeholder", "output"):
        return str(node.target)
    if isinstance(node.target, OpOverload):
        name = f"{node.target._schema.name}:{node.target._overloadname}"
        schemas[name] = str(node.target._schema)
        return name
    if node.op == "call_function" and node.target in _NAMES:
        return _NAMES[node.target]
    raise NotCacheable(f"a call of {node.target}")


def _arg(arg: Any, index: dict[fx.Node, int]) -> Any:
    """Nodes by number, lists as lists; anything else that JSON lacks under a name of its own."""
    if isinstance(arg, fx.Node):
        return {"node": index[arg]}
    if isinstance(arg, list):
        return [_arg(a, index) for a in arg]
    if isinstance(arg, tuple):
        return {"tuple": [_arg(a, index) for a in arg]}
    if isinstance(arg, dict):
        return {"dict": [[str(k), _arg(v, index)] for k, v in arg.items()]}
    if isinstance(arg, slice):
        return {"slice": [_arg(a, index) for a in (arg.start, arg.stop, arg.step)]}
    if isinstance(arg, torch.device):
        return {"device": str(arg)}
    for name, kind in _CONSTANTS:
        if isinstance(arg, kind):
            return {name: str(arg).removeprefix("torch.")}
    if arg is None or type(arg) in (bool, int, float, str):
        return arg
    raise NotCacheable(f"an argument {arg!r}")


def from_json(data: dict[str, Any], tensors: Mapping[str, Tensor]) -> Trace:
    """The trace behind :func:`to_json`, on the live tensors of its placeholders by name.

    Raises:
        NotCacheable: an operator is not there, is another one, or the tensors lie otherwise in memory.
    """
    mode, number = _mode(data)
    reader = Reader(mode, data["layouts"], number)
    targets = {name: operator_at(name, schema) for name, schema in data["schemas"].items()} | _FUNCTIONS
    graph = fx.Graph()
    traced = Trace(fx.GraphModule(torch.nn.Module(), fx.Graph()), dict(tensors), mode, hint=data["hint"])
    assert mode.shape_env is not None
    with mode.shape_env.suppress_guards():
        _fill(graph, data, reader, targets, tensors)
    graph.owning_module = traced.module
    traced.module._graph = graph  # its code, which nobody runs, would cost as much as all the rest
    traced.symbol = number.node.expr if number is not None else None
    traced.copied_steps, traced.irregular = data["copied_steps"], data["irregular"]
    return traced


def _mode(data: dict[str, Any]) -> tuple[FakeTensorMode, torch.SymInt | None]:
    if data["symbol"] is None:
        return FakeTensorMode(shape_env=ShapeEnv()), None
    source = next(n[5][3] for n in data["nodes"] if n[0] == "placeholder" and "size" in n[6])
    return new_symbol(data["symbol"], source.removeprefix("L['")[:-2], data["hint"], data["guards"])


def _fill(graph: fx.Graph, data: dict[str, Any], reader: Reader, targets: dict[str, Any], tensors: Any) -> None:
    made: list[fx.Node] = []
    checked: set[str] = set()
    for op, name, target, args, kwargs, meta, value in data["nodes"]:
        if op == "output":
            graph.output(_read(args, made)[0])
            made.append(graph.output_node())
        else:
            called = targets[target] if op == "call_function" else target
            made.append(graph.create_node(op, called, _read(args, made), _read(kwargs, made), name))
        node = made[-1]
        node.meta.update((k, v) for k, v in zip(_META, meta, strict=True) if v is not None or k == "draft_step")
        if meta[2] is not None:
            node.meta["stack_trace"] = data["texts"][meta[2]]
        if op == "placeholder" and name in tensors:
            reader.adopt(value, reader.mode.from_tensor(tensors[name], static_shapes=True))
        if value is not None:
            node.meta["val"] = reader.value(value)
            _check_fake(node, reader, checked)


def _check_fake(node: fx.Node, reader: Reader, checked: set[str]) -> None:
    """The value of a user's operator must be what its fake gives now: Dynamo guards nothing of that."""
    if not isinstance(node.target, OpOverload) or node.target.namespace in _OWN:
        return
    writer = Writer(reader.symbol.node.expr if reader.symbol is not None else None)
    given = fx.node.map_arg((node.args, node.kwargs), lambda n: repr(writer.value(ir.value(n))))
    stored = repr(writer.value(ir.value(node)))
    if (key := f"{node.target} {given} {writer.layouts}") in checked:
        return
    checked.add(key)
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), ir.value)
    with reader.mode:
        now = node.target(*args, **kwargs)
    again = Writer(writer.symbol)
    fx.node.map_arg((node.args, node.kwargs), lambda n: repr(again.value(ir.value(n))))
    if repr(again.value(now)) != stored or again.layouts != writer.layouts:
        raise NotCacheable(f"{node.target} returns something else than it did")


def _read(data: Any, made: list[fx.Node]) -> Any:
    if isinstance(data, list):
        return [_read(d, made) for d in data]
    if not isinstance(data, dict):
        return data
    ((kind, given),) = data.items()
    if kind == "node":
        return made[given]
    if kind == "dict":
        return {name: _read(value, made) for name, value in given}
    if kind in ("tuple", "slice"):
        parts = [_read(d, made) for d in given]
        return tuple(parts) if kind == "tuple" else slice(*parts)
    if kind == "device":
        return torch.device(given)
    found = getattr(torch, given)
    assert isinstance(found, dict(_CONSTANTS)[kind])
    return found


def operator_at(name: str, schema: str) -> OpOverload:
    """The operator of this process with a name and a schema."""
    namespace, _, rest = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace, None), rest.split(":")[0], None)
    found = getattr(packet, rest.split(":")[1], None)
    if not isinstance(found, OpOverload) or str(found._schema) != schema:
        raise NotCacheable(f"there is no operator {schema}")
    return found


def restored(data: dict[str, Any], tensors: dict[str, Any]) -> Trace:
    """:func:`from_json`, for a graph that comes back as it was.

    Raises:
        NotCacheable: it does not.
    """
    traced = from_json(data, tensors)
    back = to_json(traced)
    if changed := [part for part in data if part not in ("baked", "guards") and back[part] != data[part]]:
        raise NotCacheable(f"the graph does not come back as it was: {changed}")
    return traced


def sources(data: dict[str, Any]) -> dict[str, str]:
    """Where the tensor of each placeholder stands, by the placeholder's name."""
    found = {n[1]: n[5][3] for n in data["nodes"] if n[0] == "placeholder" and "tensor" in n[6]}
    for name, path in found.items():
        if not isinstance(path, str) or not is_path(path):
            raise NotCacheable(f"the tensor {name} stands nowhere that can be found again")
    return found
