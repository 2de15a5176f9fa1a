"""What registered operators read and write beyond their arguments.

An operator of draftfuse reads and writes its arguments only, and so does a functional collective. Any other might
read persistent state through a closure or a forward context, so all pending state is stored before it, unless
:func:`register_effects` says more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, fx
from torch._ops import OpOverload, OpOverloadPacket

from draftfuse.errors import InvalidOptionError
from draftfuse.passes import ir
from draftfuse.passes.collectives import is_functional_collective
from draftfuse.passes.explicit_metadata import Effects

Tensors = Sequence[Tensor] | Callable[[], Sequence[Tensor]]
OWN_NAMESPACES = ("draftfuse", "draftfuse_gen")
_EFFECTS: dict[OpOverload, tuple[Tensors, Tensors]] = {}


def register_effects(op: Any, reads: Tensors = (), writes: Tensors = ()) -> None:
    """Declare what ``op`` touches beyond its arguments.

    Args:
        op: an operator of ``torch.ops`` (packet or overload).
        reads: tensors that it reads, or a callable that returns them; ``()`` says that it reads its arguments only.
        writes: the same for writes.

    Raises:
        InvalidOptionError: ``op`` is no operator.
    """
    overloads = [getattr(op, name) for name in op.overloads()] if isinstance(op, OpOverloadPacket) else [op]
    for overload in overloads:
        if not isinstance(overload, OpOverload):
            todo = "Pass torch.ops.<namespace>.<name>."
            raise InvalidOptionError("op is not a registered operator", repr(op), "an operator of torch.ops", todo)
        _EFFECTS[overload] = (reads, writes)


def declared(op: OpOverload) -> tuple[list[Tensor], list[Tensor]] | None:
    """The tensors that ``op`` reads and writes beyond its arguments; None if nobody has said."""
    if op not in _EFFECTS:
        return ([], []) if is_functional_collective(op) else None
    reads, writes = ([*(t() if callable(t) else t)] for t in _EFFECTS[op])
    return reads, writes


def storages(tensors: Tensors) -> set[int]:
    """Storage identities of declared tensors."""
    found = tensors() if callable(tensors) else tensors
    return {t.untyped_storage()._cdata for t in found}


def hidden_reads(node: fx.Node) -> Collection[int] | None:
    """Storages that ``node`` reads beside its arguments; None if nobody has said."""
    if not isinstance(node.target, OpOverload) or node.target.namespace in OWN_NAMESPACES:
        return ()
    declared = _EFFECTS.get(node.target)
    if declared is None:
        return () if is_functional_collective(node.target) else None
    return () if not callable(declared[0]) and not declared[0] else None


def effects_in(graph: fx.Graph, tensors: Mapping[str, Tensor]) -> Effects:
    """What declared operators touch beyond their arguments, as placeholders of ``graph``."""
    by_storage = {t.untyped_storage()._cdata: name for name, t in reversed(list(tensors.items()))}
    nodes = {node.name: node for node in ir.placeholders(graph)}

    def placeholders(given: Sequence[Tensor]) -> list[fx.Node]:
        names = [by_storage.get(t.untyped_storage()._cdata) for t in given]
        return [nodes[name] for name in dict.fromkeys(names) if name is not None]

    def effects(node: fx.Node) -> tuple[list[fx.Node], list[fx.Node]] | None:
        found = declared(node.target) if isinstance(node.target, OpOverload) else None
        return None if found is None else (placeholders(found[0]), placeholders(found[1]))

    return effects


def is_known(node: fx.Node) -> bool:
    """Whether somebody has said what the operator of ``node`` touches."""
    return ir.is_aten(node) or hidden_reads(node) is not None
