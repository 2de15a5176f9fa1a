"""What was compiled, what fell back and why, and what happened since: data for ``fused.report`` and ``explain()``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from draftfuse.attribute_reads import Read
from draftfuse.dispatch import Descriptor
from draftfuse.errors import without_addresses
from draftfuse.passes import PassReport

ATTRIBUTES = ".__dict__"


@dataclass(frozen=True)
class Fallback:
    """A part of the work that does not run fused, and why."""

    what: str  # a group's builder, a capacity, a call
    mode: str  # what runs instead: split or eager
    reason: str

    def __str__(self) -> str:
        return f"{self.what}: runs {self.mode}, because {self.reason}"


@dataclass
class BuildReport:
    """One build: a value of k with a symbolic or a fixed number of requests."""

    kind: str  # decode, prefill, propose, or one step of a split loop
    k: int
    num_reqs: int | None  # None: symbolic
    nodes: int
    passes: list[PassReport]
    segments: int
    unique_segments: int
    opaque_calls: int
    trace_seconds: float
    compile_seconds: float
    emission: str = "segments"
    draft_step: int | None = None  # of a step of a split loop
    baked: dict[str, Any] = field(default_factory=dict)  # host values that the trace took, by Dynamo's path
    refused: str = ""  # why another emission was built instead of the one asked for
    copied_steps: int = 0  # draft steps that repeat others: copied in the IR instead of traced
    reads: list[Read] = field(default_factory=list)  # what only copied steps read of Python objects
    again: bool = False  # the steps in front of them were not traced either: an earlier build had done so
    irregular: str = ""  # why no step was copied where that was tried
    trial: str = ""  # how the trace differs from the loop, where their values are equal
    trial_seconds: float = 0.0
    stored: str = ""  # "IR from disk"; or why an entry on disk was not used, or none was written
    entry: Any = field(default=None, repr=False, compare=False)  # the place of the IR on disk, for whoever built it


@dataclass
class Plan:
    """How one kind of call runs, worked out once: the call itself only looks it up and counts it."""

    descriptor: Descriptor
    runner: Any
    counts: dict[str, int]  # what one call adds to the counters
    before: tuple[Callable[[], None], ...] = ()  # lifecycle hooks in front of the launch
    after: tuple[Callable[[], None], ...] = ()
    calls: int = 0


@dataclass
class Report:
    """The record of one compiled loop."""

    mode: str
    compiler: str
    device: str
    builds: list[BuildReport] = field(default_factory=list)
    fallbacks: list[Fallback] = field(default_factory=list)
    findings: list[Any] = field(default_factory=list)
    baked: dict[str, Any] = field(default_factory=dict)
    external: list[str] = field(default_factory=list)  # tensors that a replay reads and draftfuse does not fill
    groups: list[dict[str, Any]] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def counters(self) -> Counter[str]:
        """What happened how often. Hot calls only count themselves; the sums are made here."""
        total = Counter(self.counts)
        for plan in self.plans:
            for name, times in plan.counts.items():
                total[name] += times * plan.calls
        return total

    def fall_back(self, what: str, mode: str, reason: str) -> None:
        """Note a fallback once; count it every time."""
        entry = Fallback(what, mode, without_addresses(reason))
        self.counts["fallbacks"] += 1
        if entry not in self.fallbacks:
            self.fallbacks.append(entry)

    def explain(self) -> str:
        """The report as text."""
        lines = [f"mode {self.mode}, compiler {self.compiler}, device {self.device}"]
        for build in self.builds:
            lines += explain_build(build)
        lines += [f"group {g['index']} ({g['builder']}): {g['kind']}; {g['fields']}" for g in self.groups]
        lines += [f"reads {path}: rewrite it only behind batch_consumed" for path in self.external]
        lines += taken_from_python(self.baked)
        lines += [f"fallback: {f}" for f in self.fallbacks]
        lines += [str(f) for f in self.findings]
        lines += [f"{name}: {count}" for name, count in sorted(self.counters.items())]
        return without_addresses("\n".join(lines))


def taken_from_python(baked: Mapping[str, Any]) -> list[str]:
    """A line for each value, and one for all attributes that the objects themselves lack."""
    absent = [path for path, value in baked.items() if value is False and path.endswith(ATTRIBUTES)]
    lines = [f"taken from Python: {path} = {value!r}" for path, value in sorted(baked.items()) if path not in absent]
    found = {_owner_and_name(path) for path in absent}
    names = sorted(f"{owner}.{name}" for owner, name in found if not name.startswith("__"))  # those are Python's own
    return [*lines, *([f"not set on the object itself: {', '.join(names)}"] if names else [])]


def _owner_and_name(path: str) -> tuple[str, str]:
    """``'advance' in spec.__dict__`` -> ``("spec", "advance")``."""
    name, owner = path.split(" in ", 1)
    return owner.removesuffix(ATTRIBUTES), name.strip("'")


def explain_build(build: BuildReport) -> list[str]:
    """The lines on one build: its size, then one line a pass."""
    rows = "any number of requests" if build.num_reqs is None else f"{build.num_reqs} requests"
    kind = build.kind if build.draft_step is None else f"draft step {build.draft_step} of"
    head = (
        f"{kind} k={build.k}, {rows}: {build.segments} segments ({build.unique_segments} distinct), "
        f"{build.opaque_calls} opaque calls; "
        f"traced in {build.trace_seconds:.1f} s, compiled in {build.compile_seconds:.1f} s"
    )
    head += f"\n  {build.copied_steps} of its steps copied, not traced" if build.copied_steps else ""
    head += "\n  nothing traced: the trace of an earlier build was used again" if build.again else ""
    head += f"\n  traced step by step: {build.irregular}" if build.irregular else ""
    head += f"\n  trial: {build.trial}" if build.trial else ""
    head += f"\n  refused: {build.refused}" if build.refused else ""
    head += f"\n  {build.stored}" if build.stored else ""
    width = max((len(p.name) for p in build.passes), default=0)
    return [head, *(f"  {p.name:<{width}}  {p.rewrites:>4} rewrites  {p.nodes:>5} nodes left" for p in build.passes)]
