"""The split loop: one compiled call (or one CUDA graph) a draft step, metadata rebuilt in Python between them.

It takes any builder: metadata comes from outside each step. The tensors of the first build are kept, and every
rebuild is copied into them, so that a captured step reads fresh values at the address that it knows.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from draftfuse import loop
from draftfuse.blobs import refuse_pointers
from draftfuse.build import Settings, finish
from draftfuse.errors import UnstableMetadataError
from draftfuse.lowering.emit import Bound
from draftfuse.lowering.workspace import Workspace
from draftfuse.report import BuildReport
from draftfuse.trace import trace
from draftfuse.validate import source_of


def split_step(spec: Any, num_reqs: int, metadata: dict[str, Any], step: int, last: bool) -> None:
    """One draft step whose metadata is given: forward, sample, store the token, advance."""
    inputs = spec.inputs.view(num_reqs, num_reqs)
    own = {layer: own_object(given) for layer, given in metadata.items()}
    tokens = loop.run_step(spec, inputs, own, step, last, loop.graph_tap)
    inputs.draft_tokens[:, step].copy_(tokens)


def own_object(metadata: Any) -> Any:
    """The step's own object with the same tensors: what ``forward`` plans or caches on it ends with the step."""
    if isinstance(metadata, dict):
        return {key: own_object(value) for key, value in metadata.items()}
    if not dataclasses.is_dataclass(metadata) or isinstance(metadata, type):
        return metadata
    fields = dataclasses.fields(metadata)
    if not all(f.init for f in fields):
        return metadata
    return type(metadata)(**{f.name: own_object(getattr(metadata, f.name)) for f in fields})


class SplitLoop:
    """Draft steps 1..k-1 at one request capacity, one bound callable a step."""

    def __init__(self, spec: Any, k: int, capacity: int, settings: Settings) -> None:
        self.spec, self.k, self.capacity = spec, k, capacity
        self.inputs = spec.inputs.view(capacity, capacity)
        self.held: dict[int, Any] = {}
        self.metadata = loop.build_metadata(spec, self.inputs, 1, self.held)
        refuse_pointers(self.metadata, [g.builder for g in spec.attn_groups])
        self.reports: list[BuildReport] = []
        self.steps = [self._build(step, settings) for step in range(1, k)]
        self.launch: list[Callable[[], None]] = [bound.run for bound in self.steps]

    def _build(self, step: int, settings: Settings) -> Bound:
        start = time.perf_counter()
        traced = trace(split_step, (self.spec, self.capacity, self.metadata, step, step == self.k - 1))
        seconds = time.perf_counter() - start
        emission, report = finish(traced, self.k, self.capacity, seconds, settings)
        self.reports.append(report)
        return emission.bind(self.capacity, Workspace())

    def run(self) -> None:
        """All steps; metadata is rebuilt before each."""
        for step, launch in enumerate(self.launch, start=1):
            self.rebuild(step)
            launch()

    def rebuild(self, step: int) -> None:
        """Rebuild slots and metadata of ``step`` and copy them where the steps read them."""
        fresh = loop.build_metadata(self.spec, self.inputs, step, self.held)
        for layer, old in self.metadata.items():
            copy_metadata(old, fresh[layer], step)


def copy_metadata(old: Any, new: Any, step: int) -> None:
    """Copy every tensor of ``new`` into ``old``; the two must have one layout.

    Raises:
        UnstableMetadataError: another type, other fields, other shapes, or other scalars than at capture.
    """
    if old is new:
        return
    before, after = dict(loop.metadata_tensors(old)), dict(loop.metadata_tensors(new))
    if type(old) is not type(new) or before.keys() != after.keys() or scalars(old) != scalars(new):
        raise unstable(old, new, step)
    for name, tensor in before.items():
        if tensor.shape != after[name].shape or tensor.dtype != after[name].dtype:
            raise unstable(old, new, step)
        if not is_same(tensor, after[name]):
            tensor.copy_(after[name])


def is_same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same memory."""
    return a.data_ptr() == b.data_ptr() and a.stride() == b.stride()


def scalars(metadata: Any) -> dict[str, Any]:
    """Host numbers, flags and strings of a metadata object, by field name."""
    fields = metadata if isinstance(metadata, dict) else getattr(metadata, "__dict__", {})
    return {k: v for k, v in fields.items() if isinstance(v, (int, float, bool, str)) and k != "draft_step"}


def unstable(old: Any, new: Any, step: int) -> UnstableMetadataError:
    """The error for metadata that changes its layout inside the loop."""
    return UnstableMetadataError(
        f"metadata changes its layout at draft step {step}",
        describe(new),
        describe(old),
        "Return one type with the same tensor shapes and host values at every draft step.",
        source_of(type(new)),
    )


def describe(metadata: Any) -> str:
    """Type, tensor shapes and scalars of a metadata object."""
    shapes = {name: tuple(t.shape) for name, t in loop.metadata_tensors(metadata)}
    return f"{type(metadata).__name__}({shapes}, {scalars(metadata)})"
