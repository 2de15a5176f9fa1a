"""The IR that every pass works on, and the few questions that they all ask of it.

One flat ``fx.Graph`` of ATen and registered operators:

- placeholders are ``n`` (the symbolic number of requests, where there is one) and tensors that live outside;
- mutations stand in program order, at the place where the user wrote them; their own result is never used;
- ``node.meta["val"]`` is a fake tensor (or SymInt); two values alias exactly if their fake storages are one;
- ``node.meta["phase"]`` and ``node.meta["draft_step"]`` say where in the loop a node stands.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator, OperatorBase, OpOverload

from draftfuse.errors import SourceLine

ALIGNMENT = 16  # bytes that Inductor's kernels assume of their inputs
_SMALL = "draftfuse::small_linear"
FUNCTIONAL_OPERATORS = frozenset({_SMALL, f"{_SMALL}_argmax", f"{_SMALL}_pair", "draftfuse::argmax", "draftfuse::sort"})
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>\S+)\n\s*(?P<text>[^\n]*)')


def phase(node: fx.Node) -> str:
    """The loop phase of ``node`` (empty outside any)."""
    return str(node.meta.get("phase", ""))


def draft_step(node: fx.Node) -> int | None:
    """The draft step of ``node``, None outside any."""
    step = node.meta.get("draft_step")
    return None if step is None else int(step)


def value(node: fx.Node) -> Any:
    """The fake value of ``node``."""
    return node.meta.get("val")


def is_tensor(node: fx.Node) -> bool:
    """Whether ``node`` is one tensor."""
    return isinstance(node.meta.get("val"), Tensor)


def storage(node: fx.Node) -> int | None:
    """Identity of the storage behind ``node``; None for anything but a tensor."""
    val = node.meta.get("val")
    return val.untyped_storage()._cdata if isinstance(val, Tensor) else None


def storages(node: fx.Node) -> set[int]:
    """Identities of all storages behind ``node``: of one tensor, or of each tensor in a list."""
    val = node.meta.get("val")
    found = val if isinstance(val, (list, tuple)) else [val]
    return {t.untyped_storage()._cdata for t in found if isinstance(t, Tensor)}


def mutated_storages(graph: fx.Graph) -> set[int]:
    """All storages that some node of ``graph`` writes."""
    return {key for node in graph.nodes for target in written(node) for key in storages(target)}


def is_number(node: fx.Node) -> bool:
    """Whether ``node`` is a size or another number of the host."""
    return isinstance(node.meta.get("val"), (int, float, torch.SymInt, torch.SymFloat, torch.SymBool))


def expression(number: Any) -> Any:
    """The sympy expression of a SymInt, or the plain integer."""
    return number.node.expr if isinstance(number, torch.SymInt) else number


def schema_of(node: fx.Node) -> torch.FunctionSchema | None:
    """The operator schema of ``node``, None for placeholders, getitem and the like."""
    return node.target._schema if isinstance(node.target, OpOverload) else None


def arguments(node: fx.Node) -> Iterator[tuple[torch.Argument, Any]]:
    """Pairs of schema argument and value given, positional and by keyword."""
    schema = schema_of(node)
    if schema is None:
        return
    for i, arg in enumerate(schema.arguments):
        if i < len(node.args):
            yield arg, node.args[i]
        elif arg.name in node.kwargs:
            yield arg, node.kwargs[arg.name]


def nodes_in(arg: Any) -> list[fx.Node]:
    """All nodes inside an argument (a node, or a list of them)."""
    found: list[fx.Node] = []
    fx.node.map_arg(arg, found.append)
    return found


def written(node: fx.Node) -> list[fx.Node]:
    """Arguments that ``node`` writes, by its schema; a higher-order operator has none, and may write all of them."""
    if isinstance(node.target, OpOverload):
        places = _written_places(node.target)
        given = [_argument(node, *place) for place in places]
        return [found for arg in given for found in nodes_in(arg)]
    return list(node.all_input_nodes) if isinstance(node.target, OperatorBase) else []


@cache
def _written_places(op: OpOverload) -> list[tuple[int, str]]:
    """Position and name of each argument that ``op`` writes."""
    arguments = enumerate(op._schema.arguments)
    return [(i, arg.name) for i, arg in arguments if arg.alias_info is not None and arg.alias_info.is_write]


def _argument(node: fx.Node, index: int, name: str) -> Any:
    return node.args[index] if index < len(node.args) else node.kwargs.get(name)


def is_mutation(node: fx.Node) -> bool:
    """Whether ``node`` writes one of its arguments."""
    return bool(written(node))


def is_view(node: fx.Node) -> bool:
    """Whether ``node`` is an operator whose result aliases its first argument and that writes nothing."""
    schema = schema_of(node)
    if schema is None or schema.is_mutable or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    return is_tensor(node) and storage(node) == storage(node.args[0])


def is_alias(node: fx.Node) -> bool:
    """Whether ``node`` only names memory of its arguments: a view, several views at once, or one item of a list."""
    if node.op != "call_function" or is_mutation(node):
        return False
    return not storages(node).isdisjoint({key for arg in node.all_input_nodes for key in storages(arg)})


def is_aten(node: fx.Node) -> bool:
    """Whether ``node`` is an ATen operator, or plain Python arithmetic on sizes."""
    if isinstance(node.target, OpOverload):
        return node.target.namespace in ("aten", "prims")
    return node.op == "call_function" and not isinstance(node.target, OperatorBase)


def is_higher_order(node: fx.Node) -> bool:
    """Whether ``node`` calls a graph or a raw kernel (``torch.cond``, a Triton launch) without a schema."""
    return isinstance(node.target, HigherOrderOperator)


def is_tap(node: fx.Node) -> bool:
    """Whether ``node`` only names a value."""
    return isinstance(node.target, OpOverload) and node.target._schema.name == "draftfuse::tap"


def is_functional(node: fx.Node) -> bool:
    """Whether ``node`` is an ATen operator or one of draftfuse's that depends on its arguments' values alone."""
    if isinstance(node.target, OpOverload) and node.target.name() in FUNCTIONAL_OPERATORS:
        return True
    return is_aten(node)


def is_opaque(node: fx.Node) -> bool:
    """Whether ``node`` is an operator that no pass and no code generator looks into."""
    return node.op == "call_function" and not is_functional(node) and not is_tap(node)


OWN_NAMESPACES = ("draftfuse", "draftfuse_gen")


def is_own(node: fx.Node) -> bool:
    """Whether the operator of ``node`` is draftfuse's: it touches its arguments only."""
    return isinstance(node.target, OpOverload) and node.target.namespace in OWN_NAMESPACES


def hidden_reads_of(node: fx.Node) -> list[fx.Node]:
    """Buffers that explicit_metadata made arguments: it reads their memory, so no value can stand for them."""
    return [n for arg, given in arguments(node) if is_own(node) and arg.name == "hidden_reads" for n in nodes_in(given)]


def is_pure(node: fx.Node) -> bool:
    """Whether ``node`` computes a value from its arguments and does nothing else."""
    if node.op != "call_function" or not is_functional(node) or is_mutation(node):
        return False
    if not isinstance(node.target, OpOverload) or node.target is torch.ops.aten._assert_tensor_metadata.default:
        return True
    returns_nothing = not node.target._schema.returns  # an assertion on the device, say
    return not returns_nothing and torch.Tag.nondeterministic_seeded not in node.target.tags


def root(node: fx.Node) -> fx.Node:
    """The node at the start of a chain of views."""
    while is_view(node):
        first = node.args[0]
        assert isinstance(first, fx.Node)
        node = first
    return node


def is_static_view(node: fx.Node) -> bool:
    """Whether ``node`` is a view of memory that lives outside the loop, at a place known before the loop starts."""
    while is_view(node):
        if not all(a.op == "placeholder" or not is_tensor(a) for a in node.all_input_nodes[1:]):
            return False
        node = node.all_input_nodes[0]
    return node.op == "placeholder"


def misalignment(val: Tensor) -> int | None:
    """How many bytes behind a 16-byte boundary of its storage a tensor starts; None if that depends on a size."""
    offset = expression(val.storage_offset())
    return offset * val.element_size() % ALIGNMENT if isinstance(offset, int) else None


def is_aligned(node: fx.Node) -> bool:
    """Whether a tensor starts on a 16-byte boundary of its storage, whatever the number of requests."""
    return misalignment(node.meta["val"]) == 0


def placeholders(graph: fx.Graph) -> list[fx.Node]:
    """The graph's inputs in order."""
    return list(graph.find_nodes(op="placeholder"))


def input_storages(graph: fx.Graph) -> dict[int, fx.Node]:
    """Storage of each tensor placeholder -> the first placeholder that has it."""
    found: dict[int, fx.Node] = {}
    for node in placeholders(graph):
        key = storage(node)
        if key is not None:
            found.setdefault(key, node)
    return found


def path_of(node: fx.Node) -> str:
    """How a user would name a placeholder (``spec.inputs.seq_lens``); the node's own name for anything else."""
    return str(node.meta.get("path", node.name))


def frames(node: fx.Node) -> list[SourceLine]:
    """The Python frames that made ``node``, outermost first."""
    text = node.meta.get("stack_trace") or ""
    return [SourceLine(m["file"], int(m["line"]), m["text"].strip()) for m in _FRAME.finditer(text)]


def source_line(node: fx.Node) -> SourceLine | None:
    """The innermost frame of the user's code behind ``node``; of any code where no frame is the user's."""
    found = frames(node)
    users = [f for f in found if not is_own_file(f.file)]
    named = users or found
    return named[-1] if named else None


def is_own_file(file: str) -> bool:
    """Whether ``file`` belongs to draftfuse or torch rather than to the user; reference speculators are user code."""
    return file.startswith(_OWN_FOLDERS) and not file.startswith(_REFERENCE)


def _own_folders() -> tuple[str, ...]:
    import pathlib

    here = pathlib.Path(__file__).resolve().parent.parent
    own = [str(here / name) + "/" for name in ("draftfuse", "passes", "lowering")]
    return (*own, str(pathlib.Path(torch.__file__).resolve().parent) + "/")


_OWN_FOLDERS = _own_folders()
_REFERENCE = f"{_OWN_FOLDERS[0]}reference/"


def copy_meta(new: fx.Node, old: fx.Node) -> None:
    """Give ``new`` the place in the loop and the source of ``old``."""
    for key in ("phase", "draft_step", "stack_trace"):
        if key in old.meta:
            new.meta[key] = old.meta[key]


def undo_renames(graph: fx.Graph) -> None:
    """make_fx calls a tensor by the name of its last mutation: give uses the tensor itself.

    A result of the operator's own stays what it is. An operator that reshapes in place (``t_``) becomes the view that
    it makes, which is what make_fx's names say already.
    """
    for node in list(graph.nodes):
        targets = written(node)
        if len(targets) != 1 or storage(node) != storage(targets[0]) or not is_tensor(node):
            continue
        view = reshaping_view(node)
        if view is not None:
            node.target = view
        elif node.users:
            node.replace_all_uses_with(targets[0])


def reshaping_view(node: fx.Node) -> OpOverload | None:
    """The view operator behind one that changes the sizes of its argument in place; None for anything else."""
    if not isinstance(node.target, OpOverload) or torch.Tag.inplace_view not in node.target.tags:
        return None
    packet = getattr(torch.ops.aten, node.target._schema.name.removeprefix("aten::").rstrip("_"), None)
    found = getattr(packet, node.target._overloadname, None)
    is_view_operator = isinstance(found, OpOverload) and found._schema.returns[0].alias_info is not None
    return found if is_view_operator else None


def eliminate_dead_code(graph: fx.Graph) -> int:
    """Erase unused pure nodes; returns how many."""
    erased = 0
    for node in reversed(list(graph.nodes)):
        removable = node.op == "call_function" and not is_tap(node) and (is_pure(node) or is_view(node))
        if removable and not node.users:
            graph.erase_node(node)
            erased += 1
    return erased


def replace_value(old: fx.Node, new: fx.Node, where: Callable[[fx.Node], bool] = lambda user: True) -> None:
    """Give the users of ``old`` that ``where`` admits ``new``; views of the one become views of the other."""
    gone = storages(old) - storages(new)
    users = [user for user in old.users if where(user)]
    old.replace_all_uses_with(new, delete_user_cb=where)
    while users:
        user = users.pop()
        if not storages(user).isdisjoint(gone) and not is_mutation(user):
            with fake_mode_of(user.graph):
                user.meta["val"] = user.target(*fake(user.args), **fake(user.kwargs))  # type: ignore[operator]
            users += user.users


def fake(arg: Any) -> Any:
    """``arg`` with every node replaced by its fake value."""
    return fx.node.map_arg(arg, lambda node: node.meta["val"])


def fake_mode_of(graph: fx.Graph) -> Any:
    """The fake mode that the values of ``graph`` belong to."""
    for node in graph.nodes:
        if is_tensor(node):
            return node.meta["val"].fake_mode
    raise AssertionError("a graph without tensors has no fake mode")


def call(graph: fx.Graph, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], like: fx.Node) -> fx.Node:
    """Insert ``target(*args, **kwargs)`` at the insertion point, with its fake value and the place of ``like``."""
    with fake_mode_of(graph):
        val = target(*fake(args), **fake(kwargs))
    node = graph.call_function(target, args, kwargs)
    node.meta["val"] = val
    copy_meta(node, like)
    return node


def try_call(
    graph: fx.Graph, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], like: fx.Node
) -> fx.Node | None:
    """:func:`call`, or None (and nothing inserted) where ``target`` refuses these arguments."""
    try:
        return call(graph, target, args, kwargs, like)
    except (RuntimeError, ValueError):
        return None
