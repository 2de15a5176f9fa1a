"""The split loop: one compiled call (or one CUDA graph) a draft step, metadata rebuilt in Python between them.

It takes any builder: metadata comes from outside each step. Tensors that lie in other memory from step to step are
copied into memory of the split loop's own, so that a captured step reads fresh values at the address that it knows.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from draftfuse import loop, python_state
from draftfuse.blobs import pointing, refuse_pointers
from draftfuse.build import Settings, finish
from draftfuse.lowering.emit import Bound
from draftfuse.lowering.workspace import Workspace
from draftfuse.passes import ir
from draftfuse.report import BuildReport, Report
from draftfuse.split_metadata import Built, StepMetadata, Unseen
from draftfuse.trace import Trace, trace
from draftfuse.trial import of_trace


def split_step(
    spec: Any, num_reqs: int, metadata: dict[str, Any], step: int, last: bool, extras: dict[str, list[str]]
) -> None:
    """One draft step whose metadata is given: forward, sample, store the token, advance.

    Lifecycle hooks stand around it as around the loop, so that the step is traced in the Python state that they make.
    """
    loop.run_hook(spec, "on_multi_step_decode_begin")
    inputs = spec.inputs.view(num_reqs, num_reqs)
    own = {layer: own_object(given) for layer, given in metadata.items()}
    for layer, names in extras.items():
        for name in names:
            setattr(own[layer], name, getattr(metadata[layer], name))
    tokens = loop.run_step(spec, inputs, own, step, last, loop.graph_tap)
    inputs.draft_tokens[:, step].copy_(tokens)
    loop.run_hook(spec, "on_multi_step_decode_end")


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
    """Draft steps 1..k-1 at one request capacity, one bound callable a step.

    ``counter``: what a launch is called in the report.
    """

    def __init__(
        self, spec: Any, k: int, capacity: int, settings: Settings, report: Report, counter: str = "compiled calls"
    ) -> None:
        self.spec, self.k, self.capacity, self.report, self.counter = spec, k, capacity, report, counter
        self.inputs = spec.inputs.view(capacity, capacity)
        self.held: dict[int, Any] = {}  # objects with addresses inside, which only their backend may move
        self.layers = [group.layer_names for group in spec.attn_groups]  # those of a group share one object
        self.metadata = self._keep()
        self.reports: list[BuildReport] = []
        self.sources: dict[str, Tensor] = {}  # what steps read beside metadata, by path
        self.written: list[set[int]] = []  # by step, the memory that it writes before it advances
        self.unseen: list[Unseen] = []  # by step, what it reads that no layout shows
        self.steps = [self._build(step, settings) for step in range(1, k)]
        self.launch: list[Callable[[], None]] = [bound.run for bound in self.steps]

    def _keep(self) -> list[StepMetadata]:
        """Of each group: builds for all steps, and one more of the first, tell which memory stays."""
        tensors = python_state.of_speculator(self.spec, wide=False).tensors.values()
        lasting = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        held: dict[int, Any] = {}
        first = loop.build_metadata(self.spec, self.inputs, 1, held)
        refuse_pointers(first, [group.builder for group in self.spec.attn_groups])
        fixed = {layer for layer, _ in pointing(first)}
        self.held = {index: made for index, made in held.items() if not fixed.isdisjoint(self.layers[index])}
        builds = [self._built(first, 1)]
        for step in range(2, self.k):
            builds.append(self._built(loop.build_metadata(self.spec, self.inputs, step, held), step))
        builds.append(self._built(loop.build_metadata(self.spec, self.inputs, 1, {**self.held}), 1))
        # What a builder makes now is forgotten behind this build, unless its object is held.
        found = [None if index in self.held else lasting for index in range(len(self.layers))]
        return [StepMetadata(of_group, there) for *of_group, there in zip(*builds, found, strict=True)]

    def _built(self, by_layer: dict[str, Any], step: int) -> list[Built]:
        return [Built(by_layer[names[0]], step) for names in self.layers]

    def _build(self, step: int, settings: Settings) -> Bound:
        start = time.perf_counter()
        made = [kept.at(step) for kept in self.metadata]
        metadata = {layer: given for names, given in zip(self.layers, made, strict=True) for layer in names}
        args = self.spec, self.capacity, metadata, step, step == self.k - 1, extra_names(metadata)
        traced = trace(split_step, args)
        seconds = time.perf_counter() - start
        self.written.append(memory_of_forward(traced))
        self.unseen.append(Unseen(traced, metadata))
        trial = of_trace(split_step, args, traced, self.capacity).check
        emission, report = finish(traced, self.k, self.capacity, seconds, settings, trial=trial)
        report.draft_step = step
        self.reports.append(report)
        self.sources |= {path: t for path, t in emission.sources.items() if not path.startswith("L['metadata']")}
        return emission.bind(self.capacity, Workspace())

    def run(self) -> None:
        """All steps; metadata is rebuilt before each."""
        loop.run_hook(self.spec, "on_multi_step_decode_begin")
        held = {**self.held}  # any other is built once in each loop, and refreshed at each step
        for step, launch in enumerate(self.launch, start=1):
            fresh = loop.build_metadata(self.spec, self.inputs, step, held)
            if reason := self.refresh(fresh, step):
                self.run_eagerly(fresh, step, reason)
            else:
                launch()
        loop.run_hook(self.spec, "on_multi_step_decode_end")

    def refresh(self, fresh: dict[str, Any], step: int) -> str:
        """Copy metadata of ``step`` where the steps read it; or say why that would not be what Python reads."""
        pairs = [*zip(self.metadata, self._built(fresh, step), strict=True)]
        written = self.written[step - 1]
        if path := self.unseen[step - 1].changed(fresh):
            return f"{path} is not what it was when the step was made"
        for kept, built in pairs:
            if moved := kept.moved(built):
                return f"{moved} lies in other memory than when the step was made"
            if path := kept.copy_of(written, built):
                return f"the step writes {path}, which lies in other memory from step to step"
        for kept, built in pairs:
            kept.copy(built)
        return ""

    def run_eagerly(self, metadata: dict[str, Any], step: int, reason: str) -> None:
        """The step as Python runs it, on the metadata as it was built: memory of the user's is not copied into."""
        self.report.fall_back(f"draft step {step}", "eager", reason)
        self.report.counts.update({"eager steps": 1, self.counter: -1})
        tokens = loop.run_step(self.spec, self.inputs, metadata, step, step == self.k - 1)
        self.inputs.draft_tokens[:, step].copy_(tokens)


def memory_of_forward(traced: Trace) -> set[int]:
    """Addresses of the storages that a step writes while it may still read metadata."""
    nodes = [node for node in traced.graph.nodes if ir.phase(node) in ("forward", "sample")]
    written = {key for node in nodes for target in ir.written(node) for key in ir.storages(target)}
    given = [node for node in ir.placeholders(traced.graph) if ir.storage(node) in written]
    return {traced.tensors[node.name].untyped_storage().data_ptr() for node in given}
