"""Make and keep what runs: one runner a descriptor, built and captured on first use.

A runner is made on fresh dummy inputs, while the live ones are saved, so making one in the middle of serving changes
nothing. What cannot be fused runs split with a reason in the report, or raises where fusing was asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from draftfuse import loop, python_state
from draftfuse.baked import SCALARS
from draftfuse.build import Settings, build, reads_of_copied_steps
from draftfuse.dispatch import DECODE, PREFILL, Descriptor, Ladder, loop_of
from draftfuse.environment import named_memory
from draftfuse.errors import (
    CaptureError,
    DraftfuseError,
    NotFusableError,
    UnsafeLoopError,
    UnstableMetadataError,
    UntraceableLoopError,
)
from draftfuse.graphs import Captured, capture
from draftfuse.guards import Addresses, collect
from draftfuse.inspector import Inspector
from draftfuse.lowering.emit import Bound, Emission
from draftfuse.lowering.workspace import Workspace
from draftfuse.passes import ir
from draftfuse.paths import plain
from draftfuse.report import BuildReport, Report
from draftfuse.scalar_guards import ScalarGuards
from draftfuse.short_traces import ShortTraces
from draftfuse.side_effects import paths_of_counts
from draftfuse.speculator import Guard
from draftfuse.split import SplitLoop
from draftfuse.state import Saved, fill_dummy, persistent_tensors, tensors_at_risk
from draftfuse.unroll import Irregular

MAX_GUARDED = 8  # split loops kept for host values other than the captured ones


@dataclass
class Runner:
    """Something that runs one descriptor, and what must hold before it may."""

    launch: Callable[[], None]  # the replay, or the call of generated code
    counts: dict[str, int]  # what one launch adds to the report's counters
    guards: list[Guard] = field(default_factory=list)
    addresses: Addresses = field(default_factory=Addresses)
    scalars: ScalarGuards = field(default_factory=ScalarGuards)
    bare: Callable[[], None] | None = None  # the same work without a graph of our own, inside a caller's capture
    kept: Any = None  # graphs and tensors that must outlive the runner
    num_bytes: int = 0


@dataclass
class Repeating:
    """Where copied steps are known to stand for a loop: numbers of rows, and what other processes have seen.

    ``read``: the attributes that only those steps read, which are guarded.
    """

    rows: set[int]
    read: frozenset[tuple[int, Any]]
    entry: Any
    report: BuildReport


class Runners:
    """All runners of one compiled loop."""

    def __init__(
        self, spec: Any, ladder: Ladder, mode: str, cudagraph: bool, pool: Any, settings: Settings, report: Report
    ) -> None:
        self.spec, self.ladder, self.mode, self.cudagraph = spec, ladder, mode, cudagraph
        self.pool, self.report = pool, report
        self.owns_pool = pool is None
        self.inspector = Inspector(spec, report.findings)
        shorts = ShortTraces(ladder.max_k)
        self.settings = replace(
            settings, inspect=self.inspector.after, is_clean=lambda: not report.findings, shorts=shorts
        )
        self.workspace = Workspace()
        self.stream: Any = None  # of all captures
        self.made: dict[Descriptor, Runner] = {}
        self._emissions: dict[tuple[str, int, int | None], Emission] = {}
        self._scalars: dict[int, ScalarGuards] = {}  # by the emission's id, which _emissions keeps alive
        self._guarded: dict[tuple[Any, ...], Runner] = {}
        # For symbolic builds of which some steps were not traced: where those were seen to repeat.
        self._repeating: dict[tuple[str, int], Repeating] = {}

    def get(self, descriptor: Descriptor) -> Runner:
        """The runner of ``descriptor``; building it leaves inputs and slots as they were."""
        if descriptor not in self.made:
            with named_memory():
                self.made[descriptor] = self._on_dummies(descriptor, lambda: self._make(descriptor))
        return self.made[descriptor]

    def split_for(self, descriptor: Descriptor, host_values: tuple[Any, ...]) -> Runner:
        """A split runner for host values that a fused capture does not cover (bounded cache)."""
        key = (descriptor, *host_values)
        if key in self._guarded and self._guarded[key].scalars.broken():
            del self._guarded[key]  # what it was traced with has changed once more
        if key not in self._guarded:
            while len(self._guarded) >= MAX_GUARDED:
                self._guarded.pop(next(iter(self._guarded)))
            with named_memory():
                self._guarded[key] = self._on_dummies(descriptor, lambda: self._split(descriptor))
        return self._guarded[key]

    def chained_split(self, descriptor: Descriptor, host_values: tuple[Any, ...]) -> Runner:
        """The same for a descriptor with a prefill: that runs eager, at the same padded rows."""
        prefill = self._eager(Descriptor(PREFILL, descriptor.num_reqs, descriptor.num_tokens, 1))
        if descriptor.num_steps <= 1:
            return prefill
        rows = descriptor.num_reqs
        steps = descriptor.num_steps
        return self._chain(prefill, self.split_for(Descriptor(DECODE, rows, rows, steps), host_values), rows, steps)

    def clear(self) -> None:
        """Drop every graph and all code."""
        for store in (self.made, self._emissions, self._guarded, self._repeating, self.settings.shorts):
            store.clear()

    def _on_dummies(self, descriptor: Descriptor, make: Callable[[], Runner]) -> Runner:
        saved = Saved([*tensors_at_risk(self.spec), *self.inspector.written.values()])
        self.inspector.keep = saved.add
        state = python_state.of_speculator(self.spec)
        try:
            self._fill(descriptor)
            return make()
        finally:
            state.restore()
            saved.restore()

    def _fill(self, descriptor: Descriptor) -> None:
        fill_dummy(self.spec, descriptor.num_reqs, descriptor.query_len)

    def _make(self, descriptor: Descriptor) -> Runner:
        if self.mode == "eager" or (self.mode == "split" and descriptor.kind == PREFILL):
            return self._eager(descriptor)
        if self.mode == "split":
            return self._split(descriptor)
        reason, cause = self._host_planned(), None
        if reason is None:
            try:
                self.inspector.before(descriptor)
                return self._fused(descriptor)
            except (UntraceableLoopError, UnstableMetadataError, UnsafeLoopError) as error:
                if descriptor.kind == DECODE and not getattr(error, "in_builder", True):
                    raise
                reason, cause = f"{error.what}: {error.came}" + (f" at {error.source}" if error.source else ""), error
        return self._fall_back(descriptor, reason, cause)

    def _fall_back(self, descriptor: Descriptor, reason: str, cause: DraftfuseError | None) -> Runner:
        if descriptor.kind == DECODE:
            if self.mode == "fused":
                todo = "Offer refresh() made of registered operators, or use mode='auto'."
                source = cause.source if cause is not None else None
                raise NotFusableError("the loop cannot be fused", reason, "traceable metadata", todo, source) from cause
            self.report.fall_back("decode", "split", reason)
            return self._split(descriptor)
        self.report.fall_back("prefill", "eager", reason)
        prefill = self._eager(Descriptor(PREFILL, descriptor.num_reqs, descriptor.num_tokens, 1))
        if descriptor.kind == PREFILL or descriptor.num_steps <= 1:
            return prefill
        rows, steps = descriptor.num_reqs, descriptor.num_steps
        return self._chain(prefill, self.get(Descriptor(DECODE, rows, rows, steps)), rows, steps)

    def _chain(self, first: Runner, second: Runner, rows: int, steps: int) -> Runner:
        """Eager prefill, then whatever runs the decode steps; Python may have changed in between."""

        def launch() -> None:
            first.launch()
            if not (failed := second.scalars.broken()):
                return second.launch()
            self.report.fall_back("decode", "split", f"draft prefill changed what it reads ({'; '.join(failed)})")
            return self.split_for(Descriptor(DECODE, rows, rows, steps), tuple(failed)).launch()

        counts = first.counts | second.counts
        return Runner(launch, counts, second.guards, second.addresses, second.scalars, kept=(first, second))

    def _host_planned(self) -> str | None:
        for index, group in enumerate(self.spec.attn_groups):
            if getattr(group.builder, "refresh_kind", None) == "host-planned":
                return f"attn_groups[{index}] ({type(group.builder).__name__}) plans each step on the host"
        return None

    def _eager(self, descriptor: Descriptor) -> Runner:
        function, args = loop_of(descriptor)
        counts = {"eager steps": descriptor.num_steps - 1} if descriptor.kind != PREFILL else {"eager prefills": 1}
        return Runner(lambda: function(self.spec, *args), counts)

    def _split(self, descriptor: Descriptor) -> Runner:
        self.inspector.before_split(descriptor)
        counter = "graph replays" if self.cudagraph else "compiled calls"
        split = SplitLoop(self.spec, descriptor.num_steps, descriptor.num_reqs, self.settings, self.report, counter)
        self.report.builds += split.reports
        scalars = self._bake(*split.reports)
        if self.cudagraph:
            split.launch = [self._capture(bound, descriptor).replay for bound in split.steps]
        counts = {counter: descriptor.num_steps - 1}
        return Runner(split.run, counts, addresses=self._addresses(split.sources), scalars=scalars, kept=split)

    def _fused(self, descriptor: Descriptor) -> Runner:
        with self.inspector.ranks.together("build"):
            emission = self._emission(descriptor)
            scalars = self._scalars[id(emission)]
            bound = emission.bind(descriptor.num_reqs, self.workspace)
        self._load_code(bound)
        frozen = collect(self.spec, descriptor.num_reqs)
        addresses = self._addresses(emission.sources)
        if not self.cudagraph:
            return Runner(bound.run, {"compiled calls": 1}, frozen, addresses, scalars, bound.run, bound)
        captured = self._capture(bound, descriptor)
        counts = {"graph replays": 1}
        return Runner(captured.replay, counts, frozen, addresses, scalars, bound.run, captured, captured.num_bytes)

    def _addresses(self, sources: dict[str, Tensor]) -> Addresses:
        known = python_state.of_speculator(self.spec, wide=False).tensors
        return Addresses.of(sources, {"spec": self.spec}, known)

    def _load_code(self, bound: Bound) -> None:
        """The first call of generated code loads or compiles its kernels: that is compile time, not capture time."""
        start = time.perf_counter()
        bound.run()
        if self.cudagraph:
            torch.cuda.synchronize()
        self.report.builds[-1].compile_seconds += time.perf_counter() - start

    def _capture(self, bound: Bound, descriptor: Descriptor) -> Captured:
        if torch.cuda.is_current_stream_capturing():
            todo = "Call decode() or capture() once before the capture begins."
            raise CaptureError("the loop is not built yet", "a first call inside a capture", "a warm-up call", todo)
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
        if self.stream is None:
            self.stream = torch.cuda.Stream()
        try:
            return capture(bound.run, lambda: self._fill(descriptor), bound.tensors, self.pool, self.stream)
        except CaptureError:
            self.pool = None if self.owns_pool else self.pool  # nothing can be captured into it any more
            raise

    def _emission(self, descriptor: Descriptor) -> Emission:
        """Code for the descriptor: symbolic above one row where its guards allow it, else for this capacity alone."""
        capacity = descriptor.num_reqs
        if capacity > 1:
            hint = max(2, self.ladder.capacities[-1] - 1)
            emission = self._build(descriptor, None, hint)
            if emission.guards_hold(capacity) and self._repeats(descriptor):
                return emission
        return self._build(descriptor, capacity, hint=capacity)

    def _repeats(self, descriptor: Descriptor) -> bool:
        """Whether copied steps stand for the loop at this capacity too: Python may compare the rows with the step."""
        seen = self._repeating.get((descriptor.kind, descriptor.num_steps))
        rows = descriptor.num_reqs
        if seen is None or rows in seen.rows:
            return True
        if seen.entry is None or not seen.entry.repeats_at(rows):
            function, args = loop_of(descriptor)
            codes: list[CodeType] = []
            try:
                reads = reads_of_copied_steps(function, (self.spec, *args, None), codes)
            except Irregular:
                return False
            if not seen.read.issuperset(read.key for read in reads):
                return False
            if seen.entry is not None and (why_not := seen.entry.note_repeats(rows, codes)):
                seen.report.stored += f"; {why_not}"
        seen.rows.add(rows)
        return True

    def _build(self, descriptor: Descriptor, num_reqs: int | None, hint: int) -> Emission:
        key = (descriptor.kind, descriptor.num_steps, num_reqs)
        if key not in self._emissions:
            function, args = loop_of(descriptor)
            arguments = (self.spec, hint, *args[1:], *([] if descriptor.kind == PREFILL else [loop.graph_tap]))
            emission, report = build(function, arguments, descriptor, num_reqs, self.settings)
            entry, report.entry = report.entry, None  # it holds tensors, and a report outlives them
            self._scalars[id(emission)] = self._bake(report)
            self.report.external = sorted({*self.report.external, *external_reads(self.spec, emission)})
            self.report.builds.append(report)
            rows = descriptor.num_reqs
            if num_reqs is None and report.copied_steps:
                read = frozenset(read.key for read in report.reads)
                self._repeating[descriptor.kind, descriptor.num_steps] = Repeating({rows}, read, entry, report)
            self._emissions[key] = emission  # last: whoever is interrupted before builds again
        return self._emissions[key]

    def _bake(self, *builds: BuildReport) -> ScalarGuards:
        """List host values that traces took in the report, and guard those that can change."""
        counted = paths_of_counts(self.report.findings)
        values = {p: value for build in builds for p, value in build.baked.items() if plain(p) not in counted}
        reads = [read for build in builds for read in build.reads]
        self.report.baked |= {plain(path): getattr(value, "__qualname__", value) for path, value in values.items()}
        self.report.baked |= {read.label: read.value for read in reads if isinstance(read.value, SCALARS)}
        return ScalarGuards.of(values, {"spec": self.spec}, reads)


def external_reads(spec: Any, emission: Emission) -> list[str]:
    """Paths of tensors that the code reads, that the loop does not write and draftfuse does not fill; no weights."""
    filled = {t.untyped_storage().data_ptr() for t in persistent_tensors(spec)}
    written = {ir.storage(t) for n in emission.graph.nodes for t in ir.written(n)}
    nodes = [n for n in ir.placeholders(emission.graph) if n.name in emission.tensors and ir.storage(n) not in written]
    read = [(ir.path_of(n), emission.tensors[n.name]) for n in nodes if n.users]
    return [p for p, t in read if not t.is_floating_point() and t.untyped_storage().data_ptr() not in filled]
