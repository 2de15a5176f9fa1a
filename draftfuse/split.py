"""The split loop: one compiled call (or one CUDA graph) a draft step, metadata rebuilt in Python between them.

It takes any builder: metadata comes from outside each step. The tensors of the first build are kept, and every
rebuild is copied into them, so that a captured step reads fresh values at the address that it knows.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from draftfuse import loop, python_state
from draftfuse.blobs import refuse_pointers
from draftfuse.build import Settings, finish
from draftfuse.errors import UnstableMetadataError
from draftfuse.lowering.emit import Bound
from draftfuse.lowering.workspace import Workspace
from draftfuse.report import BuildReport
from draftfuse.trace import trace
from draftfuse.trial import of_trace
from draftfuse.validate import source_of

STEP = "draft_step"  # a field of this name holds the step: it may change
SHOWN = 4
HOST = (*python_state.SCALARS, torch.Size, slice, range, frozenset, set, Enum)


def split_step(
    spec: Any, num_reqs: int, metadata: dict[str, Any], step: int, last: bool, extras: dict[str, list[str]]
) -> None:
    """One draft step whose metadata is given: forward, sample, store the token, advance.

    Lifecycle hooks stand around it as around the loop, so that the step is traced in the Python state that they make.
    """
    loop.run_hook(spec, "on_multi_step_decode_begin")
    inputs = spec.inputs.view(num_reqs, num_reqs)
    own = {layer: own_object(given, step) for layer, given in metadata.items()}
    for layer, names in extras.items():
        for name in names:
            setattr(own[layer], name, getattr(metadata[layer], name))
    tokens = loop.run_step(spec, inputs, own, step, last, loop.graph_tap)
    inputs.draft_tokens[:, step].copy_(tokens)
    loop.run_hook(spec, "on_multi_step_decode_end")


def own_object(metadata: Any, step: int) -> Any:
    """The step's own object with the same tensors: what ``forward`` plans or caches on it ends with the step."""
    if isinstance(metadata, dict):
        return {key: own_object(value, step) for key, value in metadata.items()}
    if not dataclasses.is_dataclass(metadata) or isinstance(metadata, type):
        return metadata
    fields = dataclasses.fields(metadata)
    if not all(f.init for f in fields):
        return metadata
    values = {f.name: step if f.name == STEP else own_object(getattr(metadata, f.name), step) for f in fields}
    return type(metadata)(**values)


def extra_names(metadata: dict[str, Any]) -> dict[str, list[str]]:
    """By layer, attributes of dataclass objects that are no fields: set from outside, and on the own object too."""
    found: dict[str, list[str]] = {}
    for layer, given in metadata.items():
        if dataclasses.is_dataclass(given) and not isinstance(given, type):
            fields = {f.name: f.init for f in dataclasses.fields(given)}
            extra = [name for name in getattr(given, "__dict__", {}) if name not in fields]
            if extra and all(fields.values()):
                found[layer] = extra
    return found


class SplitLoop:
    """Draft steps 1..k-1 at one request capacity, one bound callable a step."""

    def __init__(self, spec: Any, k: int, capacity: int, settings: Settings) -> None:
        self.spec, self.k, self.capacity = spec, k, capacity
        self.inputs = spec.inputs.view(capacity, capacity)
        self.held: dict[int, Any] = {}
        self.metadata = loop.build_metadata(spec, self.inputs, 1, self.held)
        self.layers = [group.layer_names[0] for group in spec.attn_groups]  # one of each object
        self.kept = {layer: layout(self.metadata[layer], 1) for layer in self.layers}
        refuse_pointers(self.metadata, [g.builder for g in spec.attn_groups])
        self.reports: list[BuildReport] = []
        self.sources: dict[str, Tensor] = {}  # what steps read beside metadata, by path
        self.steps = [self._build(step, settings) for step in range(1, k)]
        self.launch: list[Callable[[], None]] = [bound.run for bound in self.steps]

    def _build(self, step: int, settings: Settings) -> Bound:
        start = time.perf_counter()
        args = self.spec, self.capacity, self.metadata, step, step == self.k - 1, extra_names(self.metadata)
        traced = trace(split_step, args)
        seconds = time.perf_counter() - start
        trial = of_trace(split_step, args, traced, self.capacity).check
        emission, report = finish(traced, self.k, self.capacity, seconds, settings, trial=trial)
        self.reports.append(report)
        self.sources |= {path: t for path, t in emission.sources.items() if not path.startswith("L['metadata']")}
        return emission.bind(self.capacity, Workspace())

    def run(self) -> None:
        """All steps; metadata is rebuilt before each."""
        loop.run_hook(self.spec, "on_multi_step_decode_begin")
        for step, launch in enumerate(self.launch, start=1):
            self.rebuild(step)
            launch()
        loop.run_hook(self.spec, "on_multi_step_decode_end")

    def rebuild(self, step: int) -> None:
        """Rebuild slots and metadata of ``step`` and copy them where the steps read them."""
        fresh = loop.build_metadata(self.spec, self.inputs, step, self.held)
        for layer in self.layers:
            copy_metadata(self.kept[layer], layout(fresh[layer], step), step, fresh[layer])


def layout(metadata: Any, step: int) -> dict[str, Any]:
    """Every tensor, host value and type of a metadata object, by path; not the step that it says it is of."""
    root = type(metadata).__module__.split(".")[0]
    found = dict(_leaves(metadata, type(metadata).__name__, root, set()))
    return {path: v for path, v in found.items() if not (path.endswith(f".{STEP}") and v == step)}


def _leaves(value: Any, path: str, root: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (Tensor, *HOST)):
        yield path, value
    elif id(value) not in seen:
        seen.add(id(value))
        yield f"type of {path}", type(value).__qualname__
        for name, item in _parts(value, root):
            yield from _leaves(item, f"{path}.{name}", root, seen)


def _parts(value: Any, root: str) -> Iterable[tuple[Any, Any]]:
    """What an object of a metadata holds; objects of another package than its own keep to themselves (a planner's)."""
    if isinstance(value, dict):
        return value.items()
    if isinstance(value, (list, tuple)):
        return enumerate(value)
    if isinstance(value, (type, torch.nn.Module)) or callable(value):
        return ()
    if dataclasses.is_dataclass(value):
        return {**{f.name: getattr(value, f.name) for f in dataclasses.fields(value)}, **_attributes(value)}.items()
    return _attributes(value).items() if type(value).__module__.split(".")[0] == root else ()


def _attributes(value: Any) -> dict[str, Any]:
    found: dict[str, Any] = getattr(value, "__dict__", {})
    slots = [n for k in type(value).__mro__ for n in _names(getattr(k, "__slots__", ())) if hasattr(value, n)]
    return {**{name: getattr(value, name) for name in slots}, **found}


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def copy_metadata(old: dict[str, Any], new: dict[str, Any], step: int, made: Any) -> None:
    """Copy every tensor of ``new`` into that of ``old``, by path; the two layouts must be one.

    A builder may return the same object each time: what counts is the tensors that it held when a step was made.

    Raises:
        UnstableMetadataError: another type, other fields, other shapes, or other host values than at capture.
    """
    if old.keys() != new.keys():
        raise unstable(old, new, step, made)
    for path, value in old.items():
        fresh = new[path]
        if not isinstance(value, Tensor) or not isinstance(fresh, Tensor):
            if type(value) is not type(fresh) or value != fresh:
                raise unstable(old, new, step, made)
        elif value.shape != fresh.shape or value.dtype != fresh.dtype:
            raise unstable(old, new, step, made)
        elif not is_same(value, fresh):
            value.copy_(fresh)


def is_same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same memory."""
    return a is b or (a.data_ptr() == b.data_ptr() and a.stride() == b.stride())


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
