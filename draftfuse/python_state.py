"""The Python state behind a draft loop: what is reachable from the speculator and its builders, and what a run changes.

A replay runs no Python. A counter, a memo or an attribute that the loop rebinds is set while the loop is traced, and
never again; so one eager run is compared with the state before it, and tracing leaves the state as it was.
"""

from __future__ import annotations

import itertools
import operator
import types
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from draftfuse.passes import ir
from draftfuse.writers import globals_of, is_library

SCALARS = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device)
_LEAVES = (*SCALARS, type, types.ModuleType, types.BuiltinFunctionType, torch.Generator)
_WALKED = ("draftfuse.speculator", "draftfuse.reference", "draftfuse.lowering", "draftfuse.bench")
_ENGINES = (
    "vllm",
    "sglang",
    "transformers",
    "threading",
    "asyncio",
    "multiprocessing",
    "concurrent",
    "logging",
    "queue",
)
LIMIT = 200_000  # objects looked at; an engine's whole configuration may hang on a speculator


@dataclass
class State:
    """A snapshot: a summary a path, and a shallow copy of every container, from which it can be put back."""

    leaves: dict[str, Any] = field(default_factory=dict)
    copies: list[tuple[Any, Any]] = field(default_factory=list)
    owners: dict[str, tuple[Any, str]] = field(default_factory=dict)  # path -> (object that holds it, attribute)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    slots: list[tuple[Any, str, Any]] = field(default_factory=list)  # (object, slot, value)

    def restore(self) -> None:
        """Put every container and attribute dictionary back in place (tensors' contents are not its business)."""
        for container, copy in self.copies:
            if contents(container) != _summaries(copy):
                _put_back(container, copy)
        for owner, name, value in self.slots:
            if getattr(owner, name, None) is not value:
                setattr(owner, name, value)


def snapshot(*roots: Any, names: tuple[str, ...] = (), wide: bool = True) -> State:
    """Walk everything reachable from ``roots`` through attributes and containers.

    Args:
        names: how paths call the roots.
        wide: also follow class attributes, closures and the globals that the loop's methods name.
    """
    state = State()
    walker = _Walker(state, wide, {id(root) for root in roots})
    for index, root in enumerate(roots):
        walker.visit(root, names[index] if index < len(names) else f"root{index}", None, "")
    return state


def of_speculator(spec: Any, wide: bool = True) -> State:
    """The state behind ``spec``: its attributes, its groups' builders, what their methods close over."""
    groups = list(getattr(spec, "attn_groups", ()))
    names = [f"spec.attn_groups[{i}].builder" for i in range(len(groups))]
    roots = (spec.inputs, *(g.builder for g in groups), spec)  # in this order, so that each has its natural name
    return snapshot(*roots, names=("spec.inputs", *names, "spec"), wide=wide)


def small_tensors(spec: Any) -> list[Tensor]:
    """Tensors behind ``spec`` that are copied before it is known whether the loop writes them."""
    return [t for t in _outside_pools(spec) if _is_small(t)]


def other_tensors(spec: Any) -> list[Tensor]:
    """The rest but for KV pools, parameters and what is large: copied once the loop was seen to write them."""
    return [t for t in _outside_pools(spec) if not _is_small(t) and not t.is_inference()]


def _is_small(tensor: Tensor, largest: int = 1 << 24) -> bool:
    return tensor.untyped_storage().nbytes() <= largest and not isinstance(tensor, torch.nn.Parameter)


def _outside_pools(spec: Any) -> list[Tensor]:
    pools = {t.untyped_storage().data_ptr() for g in spec.attn_groups for pair in g.kv_caches.values() for t in pair}
    found: dict[int, Tensor] = {}
    for tensor in of_speculator(spec).tensors.values():
        if (key := tensor.untyped_storage().data_ptr()) not in pools:
            found.setdefault(key, tensor)
    return list(found.values())


@dataclass
class _Walker:
    state: State
    wide: bool
    roots: set[int]
    seen: dict[int, Any] = field(default_factory=dict)  # keeps what it saw alive, so that ids stay unique

    def visit(self, value: Any, path: str, owner: Any, attribute: str) -> None:
        self.state.leaves[path] = summary(value)
        self.state.owners[path] = (owner, attribute)
        if isinstance(value, Tensor):
            self.state.tensors[path] = value
        if isinstance(value, (Tensor, *_LEAVES)) or id(value) in self.seen or len(self.seen) > LIMIT:
            return
        self.seen[id(value)] = value
        if isinstance(value, (dict, list, tuple, set, frozenset, deque)):
            self.container(value, path, owner, attribute)
        elif isinstance(value, (types.FunctionType, types.MethodType)):
            self.function(value, path)
        elif id(value) in self.roots or not _is_walled(type(value)):
            self.instance(value, path)

    def container(self, value: Any, path: str, owner: Any, attribute: str) -> None:
        if not isinstance(value, (tuple, frozenset)):
            self.state.copies.append((value, _copy(value)))
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in list(pairs):
            self.visit(item, f"{path}[{key!r}]" if isinstance(key, SCALARS) else f"{path}[...]", owner, attribute)

    def instance(self, value: Any, path: str) -> None:
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            self.state.copies.append((attributes, dict(attributes)))
            for name, item in list(attributes.items()):
                self.visit(item, f"{path}.{name}", value, name)
        for name in _slots(type(value)):
            if hasattr(value, name):
                self.state.slots.append((value, name, getattr(value, name)))
                self.visit(getattr(value, name), f"{path}.{name}", value, name)
        if self.wide and not is_library(type(value)):
            self.inherited(value, path)
            self.of_class(value, path)

    def inherited(self, value: Any, path: str) -> None:
        """What an object has from its classes, as its own: an assignment to the object then changes a value."""
        for klass in reversed([k for k in type(value).__mro__ if not is_library(k)]):
            for name, item in vars(klass).items():
                own = name in getattr(value, "__dict__", ()) or name.startswith("__") or _is_descriptor(item)
                if not own and not isinstance(
                    item, (dict, list, set, deque)
                ):  # those are the class's, and change there
                    self.state.leaves[f"{path}.{name}"] = summary(item)
                    self.state.owners[f"{path}.{name}"] = (value, name)

    def of_class(self, value: Any, path: str) -> None:
        for klass in type(value).__mro__:
            if is_library(klass):
                continue
            for name, item in list(vars(klass).items()):
                if isinstance(item, types.FunctionType):
                    if not name.startswith("__"):
                        self.function(item, f"{path}.{name}")
                elif not name.startswith("__") and not _is_descriptor(item):
                    self.visit(item, f"{klass.__name__}.{name}", klass, name)

    def function(self, value: Any, path: str) -> None:
        if isinstance(value, types.MethodType):
            self.visit(value.__self__, f"{path}.__self__", None, "")
            value = value.__func__
        if not self.wide or not isinstance(value, types.FunctionType) or ir.is_own_file(value.__code__.co_filename):
            return
        for name, item in closure_of(value):
            self.visit(item, f"{path}.<closure {name}>", value, name)
        for name, item in globals_of(value):
            if isinstance(item, types.FunctionType):
                if id(item) not in self.seen:
                    self.seen[id(item)] = item
                    self.function(item, name)
            elif _is_data(item):
                self.visit(item, f"<global {name}>", value, name)


def closure_of(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Names and values that ``function`` closes over."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # an empty cell
            continue


def _is_data(item: Any) -> bool:
    """Whether a global may be state: a container, a tensor or an object of a user's class."""
    if isinstance(item, (*_LEAVES, types.FunctionType)):
        return isinstance(item, (int, float)) and not isinstance(item, bool)
    return isinstance(item, (Tensor, dict, list, set, deque)) or not is_library(type(item))


def _is_walled(klass: type) -> bool:
    """Whether objects of a class are an engine's or this runtime's own: their state is not the loop's."""
    module = klass.__module__ or ""
    own = module.startswith("draftfuse.") and not module.startswith(_WALKED)
    return own or module.split(".")[0] in _ENGINES


def _is_descriptor(item: Any) -> bool:
    return hasattr(item, "__get__") or isinstance(item, (type, types.ModuleType))


def _slots(klass: type) -> list[str]:
    found = [getattr(k, "__slots__", ()) for k in klass.__mro__ if not is_library(k)]
    names = [n for s in found for n in ((s,) if isinstance(s, str) else s)]
    return [n for n in names if n not in ("__dict__", "__weakref__")]


def summary(value: Any) -> Any:
    """What is compared of one value: a scalar itself, a tensor's identity and layout, any other object's identity."""
    if isinstance(value, SCALARS):
        return (type(value).__name__, value)
    if isinstance(value, Tensor):
        return ("tensor", id(value), tuple(value.shape), value.dtype)
    if isinstance(value, (dict, list, set, deque)):
        return (type(value).__name__, len(value))
    if isinstance(value, itertools.count):
        return ("iterator", repr(value))
    if isinstance(value, Iterator):
        return ("iterator", operator.length_hint(value, -1))
    if isinstance(value, torch.Generator):
        return ("generator", value.initial_seed())
    return ("tuple", len(value)) if isinstance(value, tuple) else (type(value).__name__,)


def _summaries(value: Any) -> Any:
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    return [(key, id(item)) for key, item in pairs]


def contents(value: Any) -> Any:
    """Keys and identities of a container's items."""
    return _summaries(value)


def _copy(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else list(value)


def _put_back(container: Any, copy: Any) -> None:
    if isinstance(container, list):
        container[:] = copy
        return
    container.clear()
    container.update(copy) if isinstance(container, (dict, set)) else container.extend(copy)
