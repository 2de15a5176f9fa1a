"""Find buffers that an operator reads without having them among its arguments, by poisoning them one call at a time."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map

from draftfuse import python_state
from draftfuse.journal import user_frame, whole_memory, written_by
from draftfuse.lowering.effects import declared
from draftfuse.passes.collectives import is_collective
from draftfuse.passes.findings import ERROR, WARNING, Finding

CALLS = 2  # of each operator that are looked at
SMALL = 1 << 24  # bytes; KV pools and weights are not poisoned


class HiddenReads:
    """Called before each opaque operator: runs it on copies, once as things are and once with other buffers changed."""

    def __init__(self, spec: Any) -> None:
        self.buffers = _candidates(spec)
        self.calls: Counter[OpOverload] = Counter()
        self.findings: list[Finding] = []

    def __call__(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.calls[func] += 1
        if self.calls[func] > CALLS or is_collective(func):  # a repeated one would leave the other ranks behind
            return
        read = [path for path, buffer in self.others(args, kwargs).items() if _reads(func, args, kwargs, buffer)]
        said = declared(func)
        known = None if said is None else {t.untyped_storage().data_ptr() for t in said[0]}
        for path in read:
            if known is None or self.buffers[path].untyped_storage().data_ptr() not in known:
                self.findings.append(_finding(func, path, known is not None))

    def others(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Tensor]:
        """Buffers that are not among the arguments."""
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        return {p: b for p, b in self.buffers.items() if b.untyped_storage().data_ptr() not in given}


def _candidates(spec: Any) -> dict[str, Tensor]:
    """Persistent tensors by path, one for each storage, small ones only."""
    unique: dict[int, tuple[str, Tensor]] = {}
    for path, tensor in python_state.of_speculator(spec).tensors.items():
        if tensor.untyped_storage().nbytes() <= SMALL and not isinstance(tensor, torch.nn.Parameter):
            unique.setdefault(tensor.untyped_storage().data_ptr(), (path, tensor))
    return dict(unique.values())


def _reads(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], buffer: Tensor) -> bool:
    before = _outcome(func, args, kwargs)
    memory = whole_memory(buffer)
    kept = memory.clone()
    _poison(memory)
    try:
        after = _outcome(func, args, kwargs)
    finally:
        memory.copy_(kept)
    return any(not _same(a, b) for a, b in zip(before, after, strict=True))


def _outcome(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """What a call returns and leaves in the arguments that it writes; those are copies."""
    mutated = {id(t) for t in written_by(func, args, kwargs)}

    def fresh(leaf: Any) -> Any:
        return leaf.clone() if isinstance(leaf, Tensor) and id(leaf) in mutated else leaf

    args, kwargs = tree_map(fresh, args), tree_map(fresh, kwargs)
    results = [t for t in tree_leaves(func(*args, **kwargs)) if isinstance(t, Tensor)]
    return [t.clone() for t in (*results, *written_by(func, args, kwargs))]


def _poison(memory: Tensor) -> None:
    """Other values than before that are harmless as lengths and indices: 0, or 1 where 0 was."""
    memory.copy_(memory == 0)


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(torch.allclose(a.double(), b.double(), rtol=0, atol=0, equal_nan=True))


def _finding(func: OpOverload, path: str, was_declared: bool) -> Finding:
    text = f"{func} reads {path}, which is not among its arguments"
    if was_declared:
        todo = "Add it to reads= of draftfuse.register_effects, or pass it as an argument."
        return Finding(ERROR, "hidden-read", f"{text} nor declared", todo, user_frame())
    todo = "All state is stored before every call of it; draftfuse.register_effects(op, reads=...) stores only that."
    return Finding(WARNING, "hidden-read", text, todo, user_frame())
