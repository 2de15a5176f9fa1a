"""What a captured loop would freeze, lose or crash on, found on the traced graph before anything is captured."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from draftfuse.passes import ir
from draftfuse.passes.collectives import collectives_of, group_of
from draftfuse.passes.findings import ERROR, WARNING, Finding
from draftfuse.passes.short_tables import short_tables

aten = torch.ops.aten
_SYNCS = (aten._local_scalar_dense.default, aten.is_nonzero.default, aten.equal.default)
_SHAPES = (
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten.bincount.default,
)
_INDEXED = (
    aten.index_put_.default,
    aten.index_put.default,
    aten._index_put_impl_.default,
    aten.index_copy_.default,
    aten.index_add_.default,
    aten.scatter_.src,
    aten.scatter_.value,
)
_METHODS = {"item", "tolist", "cpu", "numpy"}
_FUNCTIONS = {"tensor", "as_tensor", "from_numpy"}
UNBOUND = "a replay runs no Python, so it would bind nothing"
_SEEDS = ("seed", "offset", "philox_seed", "philox_offset", "rng_state")


@dataclass(frozen=True)
class Surroundings:
    """What the graph alone does not say: names of placeholders by what stands behind them, and the length limit."""

    owned: Collection[str] = ()  # reachable from the speculator
    constant: Collection[str] = ()  # parameters, wherever they live
    kv: Collection[str] = ()  # KV pools
    slots: Collection[str] = ()  # slot mappings
    positions: Collection[str] = ()
    max_model_len: int = 0
    front: fx.Graph | None = None  # Dynamo's graph, in which no-op transfers are still visible
    on_cuda: bool = False
    backends: Mapping[str, str] = field(default_factory=dict)  # process group -> what it runs CUDA tensors with


def capture_safety(graph: fx.Graph, around: Surroundings) -> list[Finding]:
    """Look at every node and change none.

    First of all passes, because its findings name what the user wrote, and what the later passes make is safe by
    construction. Example::

        %item = aten._local_scalar_dense.default(%sum)

    gives ``error [host-sync] the host reads a value of the device (aten._local_scalar_dense) ... model.py:31: ...``.
    """
    found: list[Finding] = []
    for rule in _RULES:
        found += rule(graph, around)
    return found


UNKNOWN = "no code can be made for a number that only the device knows"


def _finding(node: fx.Node, severity: str, name: str, text: str, todo: str, needed: str = "") -> Finding:
    return Finding(severity, name, text, todo, ir.source_line(node), phase=phase_of(node), needed=needed)


def phase_of(node: fx.Node) -> str:
    """The loop phase of a node of either graph."""
    return ir.phase(node) or str((node.meta.get("custom") or {}).get("phase", ""))


def _calls(graph: fx.Graph, *targets: object) -> Iterator[fx.Node]:
    return (n for n in graph.nodes if n.op == "call_function" and n.target in targets)


def _host_syncs(graph: fx.Graph, around: Surroundings) -> Iterator[Finding]:
    todo = "Keep the value in a tensor, and use torch.where instead of Python."
    for node in _calls(graph, *_SYNCS):
        text = f"the host reads a value of the device ({node.target})"
        yield _finding(node, ERROR, "host-sync", text, todo, UNKNOWN)
    for node in graph.nodes:
        devices = {a.meta["val"].device.type for a in node.all_input_nodes if ir.is_tensor(a)} - {"cpu"}
        if devices and ir.is_tensor(node) and ir.value(node).device.type == "cpu" and node.op == "call_function":
            yield _finding(node, ERROR, "host-sync", "a tensor is copied to the host", todo)


def _front_calls(graph: fx.Graph, around: Surroundings) -> Iterator[Finding]:
    """Calls that the ATen graph no longer shows on a CPU, where ``.cpu()`` is free."""
    for node in around.front.nodes if around.front is not None else ():
        name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
        if (node.op == "call_method" and name in _METHODS) or _goes_to_cpu(node):
            todo = "Keep the value in a tensor of the loop's device."
            yield _finding(node, ERROR, "host-sync", f".{name}() brings a tensor to the host", todo)
        if type(node.target).__name__.startswith("numpy_"):  # Dynamo's wrappers: numpy runs on the host
            yield _finding(node, ERROR, "host-sync", "NumPy computes on the host", "Use torch.")
        if node.op == "call_function" and name in _FUNCTIONS and _is_torch(node):
            yield _made_on_host(node, around)


def _goes_to_cpu(node: fx.Node) -> bool:
    if node.op != "call_method" or node.target != "to":
        return False
    given = [*node.args[1:], *node.kwargs.values()]
    return any(str(g) == "cpu" for g in given if isinstance(g, (str, torch.device)))


def _is_torch(node: fx.Node) -> bool:
    return str(getattr(node.target, "__module__", "") or "torch").startswith("torch")


def _made_on_host(node: fx.Node, around: Surroundings) -> Finding:
    severity = ERROR if around.on_cuda else WARNING
    todo = "Make it once, before the loop, and keep it as an attribute (torch.full and torch.arange are fine inside)."
    return _finding(node, severity, "cpu-tensor", "a tensor is made from host values inside the loop", todo)


def _host_tensors(graph: fx.Graph, around: Surroundings) -> Iterator[Finding]:
    todo = "Move it to the loop's device once, before the loop."
    for node in graph.nodes:
        here = {a.meta["val"].device.type for a in node.all_input_nodes if ir.is_tensor(a) and ir.value(a).dim() > 0}
        after = ir.value(node).device.type if ir.is_tensor(node) else "cpu"
        if node.op == "call_function" and "cpu" in here and (after != "cpu" or len(here) > 1):
            yield _finding(node, ERROR, "cpu-tensor", "a tensor of the host enters the loop", todo)


def _shapes(graph: fx.Graph, around: Surroundings) -> Iterator[Finding]:
    todo = "Use a mask with torch.where, or a tensor of the largest size."
    for node in graph.nodes:
        masked = node.target in (aten.index.Tensor, *_INDEXED[:3]) and any(map(_is_mask, ir.nodes_in(node.args[1])))
        if node.op == "call_function" and (node.target in _SHAPES or masked or _is_repeat(node)):
            what = "a boolean mask" if masked else str(node.target)
            text = f"{what} makes a shape that depends on values"
            needed = UNKNOWN if _has_unknown_size(node) else ""
            yield _finding(node, ERROR, "data-dependent-shape", text, todo, needed)


def _has_unknown_size(node: fx.Node) -> bool:
    return ir.is_tensor(node) and bool(free_unbacked_symbols(ir.value(node)))


def _is_mask(node: fx.Node) -> bool:
    return ir.is_tensor(node) and ir.value(node).dtype in (torch.bool, torch.uint8)


def _is_repeat(node: fx.Node) -> bool:
    return node.target is aten.repeat_interleave.Tensor and node.kwargs.get("output_size") is None


def _random(graph: fx.Graph, around: Surroundings) -> Iterator[Finding]:
    todo = "Draw with draftfuse.ops.gumbel_sample: noise is a function of (seed, position), both read from tensors."
    for node in graph.nodes:
        if _draws(node):
            text = f"{node.target} takes its randomness from a generator whose state a captured graph would repeat"
            yield _finding(node, ERROR, "baked-rng", text, todo)
        for arg, given in ir.arguments(node) if ir.is_opaque(node) else ():
            if arg.name in _SEEDS and isinstance(given, (int, float)):
                text = f"{node.target} takes {arg.name}={given} by value: every replay would draw the same numbers"
                yield _finding(node, ERROR, "baked-rng", text, "Pass seed and offset as tensors.")


def _draws(node: fx.Node) -> bool:
    """Whether a generator is asked; attention without dropout asks none, though its operators bear the tag."""
    if not isinstance(node.target, OpOverload) or torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    if not any(arg.name == "dropout_p" for arg in node.target._schema.arguments):
        return True
    return any(given != 0 for arg, given in ir.arguments(node) if arg.name == "dropout_p")  # 0 unless given


def _bound(graph: fx.Graph, around: Surroundings) -> Iterator[Finding]:
    todo = "Allocate the tensor once, and copy_ into it."
    for node in dict.fromkeys(ir.nodes_in(graph.output_node().args[0])):
        if node.op == "placeholder":  # in-place arithmetic binds the same tensor again
            continue
        shape = list(map(str, ir.value(node).shape))
        text = f"a tensor of shape {shape} made here is kept by Python, where no replay would bind it again"
        yield _finding(node, ERROR, "fresh-allocation", text, todo, UNBOUND)


def _foreign(graph: fx.Graph, around: Surroundings) -> Iterator[Finding]:
    outside = {n for n in ir.placeholders(graph) if ir.is_tensor(n) and n.name not in around.owned}
    strangers = {ir.storage(n): n for n in outside if not n.meta.get("owned")}
    for node in graph.nodes:
        for target in ir.written(node):
            if ir.storage(target) in strangers:
                path = ir.path_of(strangers[ir.storage(target)])
                todo = "Make it an attribute of the speculator or of a builder, and write that."
                yield _finding(
                    node, ERROR, "foreign-write", f"the loop writes {path}, which the speculator does not own", todo
                )
    for node in strangers.values():
        if node.name not in around.constant and not node.meta.get("literal") and node.users:
            reader = next((u for u in graph.nodes if node in u.all_input_nodes), node)
            text = f"the loop reads {ir.path_of(node)}, which is no input of the speculator"
            todo = "Make it an attribute of the speculator (a persistent tensor that callers copy_ into)."
            yield _finding(reader, ERROR, "undeclared-input", text, todo)


def _raw_kv(graph: fx.Graph, around: Surroundings) -> Iterator[Finding]:
    pools = {ir.storage(n) for n in ir.placeholders(graph) if n.name in around.kv}
    slots = {ir.storage(n) for n in ir.placeholders(graph) if n.name in around.slots}
    tainted = _reached(graph, slots)
    todo = "Write with draftfuse.ops.write_kv, which skips negative slots."
    for node in _calls(graph, *_INDEXED):
        target = node.args[0]
        assert isinstance(target, fx.Node)
        by_slot = any(n in tainted for n in ir.nodes_in(node.args[1:3]))
        if ir.storage(target) in pools or (by_slot and ir.root(target).op == "placeholder"):
            text = f"{node.target} into a KV pool: a padded row's slot -1 would overwrite the last slot"
            yield _finding(node, ERROR, "raw-kv-write", text, todo)
    for node in graph.nodes:
        is_aten = isinstance(node.target, OpOverload) and node.target.namespace == "aten"
        if is_aten and node.target not in _INDEXED and any(ir.storage(n) in pools for n in ir.written(node)):
            text = f"{node.target} into a KV pool, live rows or not: no pool is copied, so a warm-up would stay in it"
            yield _finding(node, ERROR, "raw-kv-write", text, todo)


def _reached(graph: fx.Graph, storages: Collection[int | None]) -> set[fx.Node]:
    """Integer values computed from memory in ``storages``, and that memory itself."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if not ir.is_tensor(node) or ir.value(node).is_floating_point():
            continue
        if ir.storage(node) in storages or any(a in found for a in node.all_input_nodes):
            found.add(node)
    return found


def _tables(graph: fx.Graph, around: Surroundings) -> Iterator[Finding]:
    for node, rows, needed in short_tables(graph, around.positions, around.max_model_len):
        text = f"a table of {rows} rows is read at positions up to {needed - 1}"
        todo = f"Make the table {needed} rows long, or lower max_model_len to the smaller of target and draft."
        yield _finding(node, ERROR, "short-table", text, todo)


def _groups(graph: fx.Graph, around: Surroundings) -> Iterator[Finding]:
    calls = collectives_of(graph)
    first = group_of(calls[0]) if calls else ""
    for node in calls:
        if (group := group_of(node)) != first:
            text = f"{node.target} runs on group {group}, other collectives of the loop on {first}"
            todo = "Run all collectives of the loop on one process group: only within a group is their order one."
            yield _finding(node, ERROR, "collective", text, todo)
        backend = around.backends.get(group, "nccl")
        if backend != "nccl" and any(ir.value(a).is_cuda for a in node.all_input_nodes if ir.is_tensor(a)):
            text = f"{node.target} runs CUDA tensors on group {group} with {backend}, which a CUDA graph cannot hold"
            todo = 'Make the group with backend="nccl" (or "cpu:gloo,cuda:nccl").'
            yield _finding(node, ERROR, "collective", text, todo)
        if ir.is_mutation(node):
            text = f"{node.target} writes in place, and what waits for it is another name of its argument"
            todo = "Call the collective that returns a new tensor, and copy_."
            yield _finding(node, ERROR, "collective", text, todo, "what reads the result could run before it is there")


_Rule = Callable[[fx.Graph, Surroundings], Iterator[Finding]]
_RULES: tuple[_Rule, ...] = (
    _host_syncs,
    _front_calls,
    _host_tensors,
    _shapes,
    _random,
    _bound,
    _foreign,
    _raw_kv,
    _tables,
    _groups,
)
