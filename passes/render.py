"""One stable text of a graph, for goldens, dumps, logs and hashes (``GraphModule.code`` changes between releases)."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from draftfuse.passes import ir

_SHORT = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.int32: "i32", torch.int64: "i64"}


def render(graph: fx.Graph, *, steps: bool = True) -> str:
    """Print ``graph``, one node a line: name, type, operator, arguments and (with ``steps``) its place in the loop."""
    names = {node: f"%{node.name}" for node in graph.nodes}
    return "\n".join(render_node(node, names, steps) for node in graph.nodes) + "\n"


def canonical(graph: fx.Graph) -> str:
    """The text of ``graph`` with names and symbols numbered in order: equal graphs give equal texts."""
    names = {node: f"%{i}" for i, node in enumerate(graph.nodes)}
    text = "\n".join(render_node(node, names, steps=False, layout=True) for node in graph.nodes)
    for i, symbol in enumerate(sorted(symbols(graph))):
        text = text.replace(symbol, f"n{i}")
    return text


def symbols(graph: fx.Graph) -> set[str]:
    """Names of the size symbols that occur in ``graph``."""
    found: set[str] = set()
    for node in graph.nodes:
        val = node.meta.get("val")
        for number in [val] if isinstance(val, torch.SymInt) else getattr(val, "shape", ()):
            if isinstance(number, torch.SymInt):
                found |= {str(s) for s in number.node.expr.free_symbols}
    return found


def render_node(node: fx.Node, names: dict[fx.Node, str], steps: bool, layout: bool = False) -> str:
    """One line for one node."""
    arguments = "" if layout and node.op == "placeholder" else render_args(node, names)
    line = f"{names[node]}{render_type(ir.value(node), layout)} = {render_target(node)}({arguments})"
    if node.op == "output":
        line = f"return {render_arg(node.args[0], names)}"
    step = ir.draft_step(node)
    place = f"  # {ir.phase(node)}" + (f" {step}" if step is not None else "")
    return line + place if steps and ir.phase(node) else line


def render_target(node: fx.Node) -> str:
    """Operator, or kind, of a node."""
    if node.op == "placeholder":
        return "input"
    if isinstance(node.target, OpOverload):
        return str(node.target)
    return getattr(node.target, "__name__", str(node.target))


def render_args(node: fx.Node, names: dict[fx.Node, str]) -> str:
    """Positional then keyword arguments; a placeholder shows the path it is bound to."""
    if node.op == "placeholder":
        return repr(node.meta["path"]) if "path" in node.meta else ""
    parts = [render_arg(a, names) for a in node.args]
    parts += [f"{k}={render_arg(v, names)}" for k, v in sorted(node.kwargs.items())]
    return ", ".join(parts)


def render_arg(arg: Any, names: dict[fx.Node, str]) -> str:
    """One argument."""
    if isinstance(arg, fx.Node):
        return names[arg]
    if isinstance(arg, (list, tuple)):
        return "[" + ", ".join(render_arg(a, names) for a in arg) + "]"
    if isinstance(arg, slice):
        return f"{render_arg(arg.start, names)}:{render_arg(arg.stop, names)}"
    return repr(arg)


def render_type(val: Any, layout: bool) -> str:
    """``: f32[4, 8]``; with ``layout`` strides, device and the bytes that it starts behind a 16-byte word too."""
    if isinstance(val, Tensor):
        text = f": {_SHORT.get(val.dtype, str(val.dtype).removeprefix('torch.'))}[{', '.join(map(_size, val.shape))}]"
        return f"{text}{tuple(map(_size, val.stride()))}@{val.device}+{ir.misalignment(val)}" if layout else text
    return f": {type(val).__name__}" if val is not None and not isinstance(val, (list, tuple)) else ""


def _size(number: Any) -> str:
    return _printed(ir.expression(number))


@cache
def _printed(expression: Any) -> str:
    return str(expression)
