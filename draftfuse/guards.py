"""Host decisions that a capture froze, and addresses that it holds: both are checked before every replay.

The checks read host memory only. Addresses go through one call of torch for all storages together, and through the
identity of the attributes that the loop read them from, so a rebound attribute is found like a moved storage.
"""

from __future__ import annotations

import inspect
import types
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftfuse import loop
from draftfuse.errors import StaleAddressError
from draftfuse.paths import MISSING, MODULES, Computed, plain, split_path, value_at
from draftfuse.speculator import Guard


@dataclass(frozen=True)
class HostBatch:
    """What guards may ask of a call without a device sync."""

    num_reqs: int
    num_tokens: int
    max_seq_len: int


def collect(spec: Any, num_reqs: int) -> list[Guard]:
    """The guards of every builder for metadata built at ``num_reqs`` rows of the present inputs."""
    builders = [g.builder for g in spec.attn_groups]
    if not any(hasattr(b, "guards") for b in builders):
        return []
    metadata = loop.build_metadata(spec, spec.inputs.view(num_reqs, num_reqs), 1, {})
    found: list[Guard] = []
    for group in spec.attn_groups:
        if hasattr(group.builder, "guards"):
            found += group.builder.guards(metadata[group.layer_names[0]])
    return found


def broken(guards: Sequence[Guard], batch: HostBatch) -> list[str]:
    """Names of the guards that do not hold for ``batch``, with what was frozen and what came."""
    return [f"{g.name}: captured {g.value!r}, now {now!r}" for g in guards if not _holds(g, now := _current(g, batch))]


def _current(guard: Guard, batch: HostBatch) -> Any:
    return guard.source() if callable(guard.source) else getattr(batch, guard.source)


def _holds(guard: Guard, now: Any) -> bool:
    return bool(now <= guard.value if guard.kind == "at_most" else now == guard.value)


@dataclass
class Addresses:
    """The tensors whose memory a graph's kernels read as it lies, and the places that the loop read them from."""

    tensors: list[Tensor] = field(default_factory=list)
    pointers: list[int] = field(default_factory=list)
    layouts: tuple[list[Any], list[Any]] = field(default_factory=lambda: ([], []))
    indices: list[int] = field(default_factory=list)
    places: list[tuple[Any, Any, Any, str]] = field(default_factory=list)  # (container, key, what is there, path)

    @classmethod
    def of(
        cls, tensors: Mapping[str, Tensor], roots: Mapping[str, Any], known: Mapping[str, Tensor] | None = None
    ) -> Addresses:
        """Addresses of ``tensors``, given by the path that Dynamo read them from (``L['spec'].inputs.seq_lens``).

        ``known``: all tensors behind the speculator by path (``spec.inputs.seq_lens``). A tensor that stands in several
        places is watched in each: Dynamo names one.
        """
        mine = {id(t): t for t in tensors.values()}
        kept = list(mine.values())
        others = {f"L['spec']{p[4:]}": t for p, t in (known or {}).items() if p.startswith("spec") and id(t) in mine}
        found = {(id(p[0]), p[1]): p for path, t in {**others, **tensors}.items() for p in _chain(path, t, roots)}
        pointers = [t.data_ptr() for t in kept]
        return cls(kept, pointers, _layouts(kept), list(range(len(kept))), list(found.values()))

    def check(self) -> None:
        """Raise :class:`StaleAddressError` if anything moved or was replaced since capture."""
        if not _all_equal(self.tensors, self.pointers, self.indices):
            moved = [tuple(t.shape) for t, p in zip(self.tensors, self.pointers, strict=True) if t.data_ptr() != p]
            raise stale(f"tensors of shapes {moved}", "moved")
        if (now := _layouts(self.tensors)) != self.layouts:
            pairs = zip(self.tensors, zip(*now, strict=True), zip(*self.layouts, strict=True), strict=True)
            changed = [(tuple(t.shape), t.stride()) for t, new, old in pairs if new != old]
            raise stale(f"tensors of shapes and strides {changed}", "lies otherwise")
        for container, key, tensor, path in self.places:
            try:
                held = container[key] is tensor
            except LookupError:
                held = False
            if not held:
                raise stale(plain(path), "was replaced by another object")


def _layouts(tensors: list[Tensor]) -> tuple[list[Any], list[Any]]:
    """How the elements of each tensor lie: ``map`` over methods is what costs least, 0.1 us a tensor."""
    return list(map(Tensor.stride, tensors)), list(map(Tensor.numel, tensors))


def _compare(tensors: list[Tensor], pointers: list[int], indices: list[int]) -> bool:
    return [t.data_ptr() for t in tensors] == pointers


# One call for all tensors in CUDA builds of torch; the CPU build has no such function.
_all_equal = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", _compare)


def stale(what: str, how: str) -> StaleAddressError:
    """The error for memory that a captured graph would read at a dead address."""
    todo = "Call recapture() on the compiled loop after weights or KV caches were loaded or moved."
    return StaleAddressError(f"memory that the captured loop holds {how}", what, "the addresses of capture time", todo)


def _chain(path: str, tensor: Any, roots: Mapping[str, Any]) -> Iterator[tuple[Any, Any, Any, str]]:
    """The place of ``tensor``, and that of each object on the way to it."""
    value = tensor
    while path and (found := _place(path, value, roots)) is not None:
        place, value = found
        yield place
        path = split_path(path)[0]


def _place(path: str, value: Any, roots: Mapping[str, Any]) -> tuple[tuple[Any, Any, Any, str], Any] | None:
    """Where ``value`` is reachable now, and the object that holds it; None where the path is no plain chain."""
    owner_path, key = split_path(path)
    if owner_path in ("", "G"):
        return None
    owner = value_at(owner_path, roots, MODULES)
    if isinstance(key, Computed):
        key = value_at(key, roots, MODULES)
    container = _container(owner, key)
    try:
        return ((container, key, value, path), owner) if container[key] is value else None
    except (AttributeError, LookupError, TypeError):
        return None


def _container(owner: Any, key: Any) -> Any:
    """What is asked for ``key``: a container itself, an object's dictionary, or the object where it has slots."""
    if isinstance(owner, (list, dict, deque)) or (isinstance(owner, tuple) and isinstance(key, int)):
        return owner
    is_slot = isinstance(inspect.getattr_static(type(owner), str(key), None), _SLOTS)
    return _Slots(owner) if is_slot else getattr(owner, "__dict__", {})


class _Slots:
    """An object without a dictionary, asked as if it had one."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner

    def __getitem__(self, key: str) -> Any:
        return getattr(self.owner, key, MISSING)


class _Row(NamedTuple):
    field: int


_SLOTS = (types.MemberDescriptorType, type(vars(_Row)["field"]))
