"""What the steps of a split loop read of a metadata object, and what of it is memory of their own.

What a builder returns may be anybody's memory: an input, a block table, a row of a table, a buffer that another field
has at the next step. So a field is read where it lies only if it lies there at every step; any other gets memory of its
own, which fresh values are copied into.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from draftfuse import python_state
from draftfuse.baked import same
from draftfuse.errors import UnstableMetadataError
from draftfuse.passes import ir
from draftfuse.paths import MODULES, owner_of, plain, value_at
from draftfuse.trace import Trace
from draftfuse.validate import source_of

STEP = "draft_step"  # a field of this name holds the step: it may change
SHOWN = 4
HOST = (*python_state.SCALARS, torch.Size, slice, range, frozenset, set, Enum)


class StepMetadata:
    """One metadata object for all steps of a split loop, at addresses that stay.

    Args:
        builds: of several draft steps, each while the ones before it are alive; the last one's object is kept.
        lasting: addresses of storages that were there before; any other is taken for one that will not stay.

    Raises:
        UnstableMetadataError: the steps have several layouts, or the object cannot be copied.
    """

    def __init__(self, builds: list[Built], lasting: set[int] | None) -> None:
        first, last = builds[0], builds[-1]
        moving = {path for path, tensor in last.tensors() if lasting is not None and _memory(tensor) not in lasting}
        for built in builds[1:]:
            check(first.values, built.values, built.step, built.made)
            moving |= {path for path, tensor in first.tensors() if not is_same(tensor, built.values[path])}
        self.own = {path: t.detach().clone() for path, t in last.tensors() if path in moving}
        self.last = last
        self.values = {**last.values, **self.own}

    def at(self, step: int) -> Any:
        """The object that ``step`` reads."""
        return with_own(self.last.made, {**self.own, **dict.fromkeys(self.last.steps, step)})

    def moved(self, built: Built) -> str:
        """The path of a field that is read where it lay, and lies elsewhere now; ``""`` where there is none.

        Raises:
            UnstableMetadataError: another type, other fields, other shapes, or other host values.
        """
        check(self.values, built.values, built.step, built.made)
        there = ((path, tensor) for path, tensor in built.tensors() if path not in self.own)
        return next((path for path, tensor in there if not is_same(tensor, self.values[path])), "")

    def copy_of(self, written: set[int], built: Built) -> str:
        """The path of a field whose copy would not show what a step that writes this memory makes of it, or ``""``."""
        for path, tensor in self.own.items():
            if not written.isdisjoint((_memory(tensor), _memory(built.values[path]))):
                return path
        return ""

    def copy(self, built: Built) -> None:
        """Copy fresh values into the memory that is the steps' own."""
        for path, tensor in self.own.items():
            tensor.copy_(built.values[path])


class Built:
    """A metadata object as it was made for one draft step: later ones may be the same object.

    ``values``: its tensors, host values and types, by path. ``steps``: the paths where it says which step it is of.
    """

    def __init__(self, made: Any, step: int) -> None:
        self.made, self.step = made, step
        found = leaves(made)
        self.steps = [path for path, value in found.items() if _is_step(path, value, step)]
        self.values = {path: value for path, value in found.items() if path not in self.steps}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Its tensors by path."""
        return ((path, value) for path, value in self.values.items() if isinstance(value, Tensor))


def with_own(made: Any, own: dict[str, Any]) -> Any:
    """``made`` with other values at the paths of ``own``: a copy, for the object is the builder's.

    Raises:
        UnstableMetadataError: the copy does not hold them.
    """
    if not own:
        return made
    try:
        copied = _Copy(own, root_of(made)).of(made, type(made).__name__)
        values = leaves(copied)
        missing = [path for path, value in own.items() if values.get(path) is not value]
    except Exception as error:
        raise _not_copied(made, f"{type(error).__name__}: {error}") from error
    if missing:
        raise _not_copied(made, f"another {missing[0]} than was set")
    return copied


def _not_copied(made: Any, came: str) -> UnstableMetadataError:
    todo = "Return a dataclass, a dict or a plain object, or the same tensors at every draft step."
    what = "metadata whose tensors change from step to step cannot be copied"
    return UnstableMetadataError(what, came, "attributes that can be set on a copy", todo, source_of(type(made)))


class _Copy:
    """Copies what :func:`leaves` goes through, with other values at some paths."""

    def __init__(self, own: dict[str, Any], root: str) -> None:
        self.own, self.root = own, root
        self.known: dict[int, Any] = {}

    def of(self, value: Any, path: str) -> Any:
        if isinstance(value, (Tensor, *HOST)):
            return self.own.get(path, value)
        if id(value) not in self.known:
            parts = _parts(value, self.root)
            self.known[id(value)] = self.container(value, path, parts) if parts else value
        return self.known[id(value)]

    def container(self, value: Any, path: str, parts: list[tuple[Any, Any]]) -> Any:
        if isinstance(value, tuple):
            items = [self.of(item, f"{path}.{name}") for name, item in parts]
            return value._make(items) if hasattr(value, "_make") else type(value)(items)
        copied = self.known[id(value)] = copy.copy(value)  # before its parts, which may lead back to it
        for name, item in parts:
            new = self.of(item, f"{path}.{name}")
            if new is item:
                continue
            if isinstance(value, (dict, list)):
                copied[name] = new
            else:
                object.__setattr__(copied, name, new)  # also of a frozen dataclass
        return copied


class Unseen:
    """What a step reads of metadata that no layout shows (a planner's), by Dynamo's path: compared before each run."""

    def __init__(self, traced: Trace, metadata: dict[str, Any]) -> None:
        placeholders = [node for node in ir.placeholders(traced.graph) if node.name in traced.tensors]
        taken = {str(node.meta.get("source")): traced.tensors[node.name] for node in placeholders}
        taken |= {path: value for path, value in traced.baked.items() if "__dataclass_fields__" not in path}
        seen = {id(metadata)}
        for made in metadata.values():
            dict(_leaves(made, "", root_of(made), seen))
        roots = {"metadata": metadata}
        self.values = {
            path: value
            for path, value in taken.items()
            if "L['metadata']" in path and id(value_at(owner_of(path), roots, MODULES)) not in seen
        }

    def changed(self, metadata: dict[str, Any]) -> str:
        """The path of what is another value or other memory now, or ``""``."""
        roots = {"metadata": metadata}
        for path, value in self.values.items():
            now = value_at(path, roots, MODULES)
            if not (_is_as_before(now, value) if isinstance(value, Tensor) else same(now, value)):
                return plain(path)
        return ""


def _is_as_before(now: Any, tensor: Tensor) -> bool:
    fits = isinstance(now, Tensor) and now.shape == tensor.shape and now.dtype == tensor.dtype
    return fits and is_same(now, tensor)


def leaves(metadata: Any) -> dict[str, Any]:
    """Every tensor, host value and type of a metadata object, by path."""
    return dict(_leaves(metadata, type(metadata).__name__, root_of(metadata), set()))


def _is_step(path: str, value: Any, step: int) -> bool:
    return path.endswith(f".{STEP}") and isinstance(value, int) and value == step


def root_of(metadata: Any) -> str:
    """The package that a metadata object is of."""
    return type(metadata).__module__.split(".")[0]


def _leaves(value: Any, path: str, root: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (Tensor, *HOST)):
        yield path, value
    elif id(value) not in seen:
        parts = _parts(value, root)
        seen |= {id(value)} if parts else set()
        yield f"type of {path}", type(value).__qualname__
        for name, item in parts:
            yield from _leaves(item, f"{path}.{name}", root, seen)


def _parts(value: Any, root: str) -> list[tuple[Any, Any]]:
    """What an object of a metadata holds; objects of another package than its own keep to themselves (a planner's)."""
    if isinstance(value, dict):
        return [*value.items()]
    if isinstance(value, (list, tuple)):
        return [*zip(getattr(value, "_fields", range(len(value))), value, strict=True)]
    if isinstance(value, (type, torch.nn.Module)):
        return []
    if dataclasses.is_dataclass(value):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return [*{**fields, **_attributes(value)}.items()]
    is_own = root_of(value) == root and not callable(value)
    return [*_attributes(value).items()] if is_own else []


def _attributes(value: Any) -> dict[str, Any]:
    found: dict[str, Any] = getattr(value, "__dict__", {})
    slots = [n for k in type(value).__mro__ for n in _names(getattr(k, "__slots__", ())) if hasattr(value, n)]
    return {**{name: getattr(value, name) for name in slots}, **found}


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def check(old: dict[str, Any], new: dict[str, Any], step: int, made: Any) -> None:
    """Raise :class:`UnstableMetadataError` unless two layouts are one: types, fields, shapes and host values."""
    if old.keys() != new.keys():
        raise unstable(old, new, step, made)
    for path, value in old.items():
        fresh = new[path]
        if not isinstance(value, Tensor) or not isinstance(fresh, Tensor):
            if type(value) is not type(fresh) or value != fresh:
                raise unstable(old, new, step, made)
        elif value.shape != fresh.shape or value.dtype != fresh.dtype:
            raise unstable(old, new, step, made)


def is_same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape are the same memory."""
    return a is b or a.numel() == 0 or (a.data_ptr() == b.data_ptr() and a.stride() == b.stride())


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def unstable(old: dict[str, Any], new: dict[str, Any], step: int, made: Any) -> UnstableMetadataError:
    """The error for metadata that changes its layout inside the loop."""
    return UnstableMetadataError(
        f"metadata changes its layout at draft step {step}",
        describe(new, old),
        describe(old, new),
        "Return one type with the same tensor shapes and host values at every draft step.",
        source_of(type(made)),
    )


def describe(layout: dict[str, Any], other: dict[str, Any]) -> str:
    """What of a layout is not in the other one: shapes and host values by path."""
    plain = {path: _plain(value) for path, value in layout.items()}
    parts = [f"{p}={v}" for p, v in plain.items() if p not in other or _plain(other[p]) != v]
    return ", ".join(parts[:SHOWN]) or "nothing there"


def _plain(value: Any) -> str:
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}" if isinstance(value, Tensor) else repr(value)
