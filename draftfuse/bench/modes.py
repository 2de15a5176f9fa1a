"""The modes of a measured loop: ways to run draft steps 1..k-1, each ready to launch on the same weights and KV.

``eager``          the loop as written
``split``          one CUDA graph a step; slot mapping and metadata rebuilt between them by the same operators
``graph``          one CUDA graph of the eager loop
``hand``           one CUDA graph; forward and logits compiled, the rest eager: what engines do by hand
``whole``          the unrolled loop through plain ``torch.compile``, in one CUDA graph
``none``           draftfuse with ``compiler="none"``
``draftfuse``      draftfuse as it comes
``draftfuse-split``  draftfuse with ``mode="split"`` and ``compiler="none"``

R requests. Where there is no CUDA, a captured loop is the loop itself.
"""

from __future__ import annotations

import time
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import draftfuse
from draftfuse import loop
from draftfuse.bench.measure import PeakMemory
from draftfuse.bench.speculators import BenchSpeculator
from draftfuse.bench.workload import Workload
from draftfuse.graphs import capture
from draftfuse.speculator import DraftInputs


@dataclass
class Ready:
    """A mode, built: what to launch, and whose inputs it reads and writes."""

    launch: Callable[[], object]
    spec: BenchSpeculator
    keep: list[Any] = field(default_factory=list)
    build_seconds: float = 0.0
    peak_bytes: int = 0


class Workbench:
    """One speculator and what its modes share: compiled loops and the current work."""

    def __init__(self, spec: BenchSpeculator, capacities: list[int]) -> None:
        self.spec, self.capacities = spec, capacities
        self.device = spec.device
        self.work: Workload | None = None
        self.fused: dict[str, draftfuse.FusedDraft] = {}

    def load(self, rows: int, context: int) -> None:
        """Take up other requests."""
        self.work = Workload(self.spec, rows, context)

    def reset(self, spec: BenchSpeculator) -> None:
        """Put the live inputs into ``spec``."""
        assert self.work is not None, "load a workload first"
        self.work.reset(spec)

    def captured(
        self, run: Callable[[], None], spec: BenchSpeculator, prepare: Callable[[], None] | None = None
    ) -> Ready:
        """``run`` as one CUDA graph, after warm-up on live inputs (which ``prepare`` writes)."""
        fill = prepare or (lambda: self.reset(spec))
        if self.device.type != "cuda":
            fill()
            run()
            return Ready(run, spec)
        graph = capture(run, fill, [], None, torch.cuda.Stream())
        return Ready(graph.replay, spec, [graph])

    def compiled(self, mode: str, compiler: str) -> draftfuse.FusedDraft:
        """The one compiled loop of this speculator with these options."""
        key = f"{mode} {compiler}"
        if key not in self.fused:
            self.fused[key] = draftfuse.compile(
                self.spec, mode=mode, compiler=compiler, request_capacities=self.capacities
            )
        return self.fused[key]


Build = Callable[[Workbench, int, int], Ready]


def eager(bench: Workbench, rows: int, k: int) -> Ready:
    """The loop as written."""
    return Ready(lambda: loop.decode_loop(bench.spec, rows, k), bench.spec)


def graph(bench: Workbench, rows: int, k: int) -> Ready:
    """One graph of the eager loop."""
    return bench.captured(lambda: loop.decode_loop(bench.spec, rows, k), bench.spec)


def compiled_anew(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` through torch.compile, static; Dynamo keeps code by code object, so each gets its own."""
    code, name = function.__code__.replace(), function.__name__
    fresh = types.FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)
    made: Callable[..., Any] = torch.compile(fresh, fullgraph=True, dynamic=False)
    return made


class HandFused:
    """A speculator whose forward and logits are compiled, and whose sampling is not."""

    def __init__(self, spec: BenchSpeculator) -> None:
        self.advance_positions, self.max_model_len = spec.advance_positions, spec.max_model_len
        self.inputs, self.attn_groups, self.advance = spec.inputs, spec.attn_groups, spec.advance

        def forward(inputs: DraftInputs, metadata: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
            hidden, feedback = spec.forward(inputs, metadata)
            return spec.logits(hidden), feedback

        self.forward = compiled_anew(forward)

    def sample(self, logits: Tensor, step: int) -> Tensor:
        """The likeliest token of each row."""
        return logits.argmax(dim=-1)


def hand(bench: Workbench, rows: int, k: int) -> Ready:
    """One graph; forward and logits compiled once, the rest eager."""
    twin = bench.spec.twin(rows)
    spec = HandFused(twin)
    return bench.captured(lambda: loop.decode_loop(spec, rows, k), twin)


def whole(bench: Workbench, rows: int, k: int) -> Ready:
    """The unrolled loop through torch.compile, on exact buffers (views would multiply its kernels)."""
    twin = bench.spec.twin(rows)
    compiled = compiled_anew(loop.decode_loop)
    return bench.captured(lambda: compiled(twin, rows, k), twin)


def split(bench: Workbench, rows: int, k: int) -> Ready:
    """One graph a step; between them nothing but the slot mapping and the builders."""
    spec = bench.spec
    inputs, held = spec.inputs.view(rows, rows), dict[int, Any]()
    metadata = loop.build_metadata(spec, inputs, 1, held)

    def step_of(step: int) -> Callable[[], None]:
        def run() -> None:
            tokens = loop.run_step(spec, inputs, metadata, step, step == k - 1)
            inputs.draft_tokens[:, step].copy_(tokens)

        return run

    steps = [bench.captured(step_of(step), spec) for step in range(1, k)]
    commons = [
        [loop.common_metadata(spec, g, inputs, step, 1, spec.max_model_len) for g in spec.attn_groups]
        for step in range(1, k)
    ]

    def launch() -> None:
        for step, ready in enumerate(steps):
            for index, group in enumerate(spec.attn_groups):
                loop.update_slot_mapping(group, inputs, ragged=False)
                loop.build_or_refresh(group.builder, commons[step][index], held, index)
            ready.launch()

    return Ready(launch, spec, [*steps, metadata])


def _fused(mode: str, compiler: str) -> Build:
    def build(bench: Workbench, rows: int, k: int) -> Ready:
        fused = bench.compiled(mode, compiler)
        bench.reset(bench.spec)
        fused.decode(rows, k)
        return Ready(lambda: fused.decode(rows, k), bench.spec, [fused])

    return build


MODES: dict[str, Build] = {
    "eager": eager,
    "split": split,
    "graph": graph,
    "hand": hand,
    "whole": whole,
    "none": _fused("fused", "none"),
    "draftfuse": _fused("auto", "inductor"),
    "draftfuse-split": _fused("split", "none"),
}
DEFAULT_MODES = ("eager", "split", "graph", "hand", "whole", "none", "draftfuse")


def build(name: str, bench: Workbench, rows: int, k: int) -> Ready:
    """Build one mode for ``rows`` requests and k tokens; time and peak memory are noted."""
    start = time.perf_counter()
    with torch.no_grad(), PeakMemory(bench.device) as peak:
        ready = MODES[name](bench, rows, k)
    ready.build_seconds, ready.peak_bytes = time.perf_counter() - start, peak.num_bytes
    return ready
