"""One build: trace the loop, run the passes, emit code."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any

from torch import fx

from draftfuse import passes, python_state
from draftfuse.attribute_reads import AttributeReads, ChangedRead, Read
from draftfuse.dispatch import PREFILL, Descriptor
from draftfuse.errors import EmissionError, UnsafeLoopError, UntraceableLoopError
from draftfuse.groups import is_parallel
from draftfuse.journal import all_kept
from draftfuse.lowering.effects import effects_in, hidden_reads
from draftfuse.lowering.emit import Emission, emit
from draftfuse.lowering.generated import register_hidden, register_refresh
from draftfuse.lowering.small import has_own_kernel
from draftfuse.passes import ir, never
from draftfuse.passes.collectives import collectives_of
from draftfuse.passes.explicit_metadata import explicit_metadata
from draftfuse.probe import computing_hook
from draftfuse.report import BuildReport
from draftfuse.short_traces import Short, ShortTraces
from draftfuse.siblings import check_number, with_siblings
from draftfuse.step_log import difference
from draftfuse.trace import Trace, trace
from draftfuse.trace_cache import entry_for
from draftfuse.trial import no_trial, of_trace
from draftfuse.unroll import TRACED_STEPS, Irregular, extend

COLLECTIVES_IN_SEGMENTS = "emission='whole' would let Inductor order the loop's collectives; segments keep their order"


@dataclass
class Settings:
    """What a build depends on beside the speculator."""

    compiler: str = "inductor"
    emission: str = "segments"
    disable: Collection[str] = ()
    dump: str | Path | None = None
    options: dict[str, Any] = field(default_factory=dict)
    progress: Callable[[str], None] = lambda text: None
    inspect: Callable[[Trace], None] = lambda traced: None  # the lint of a traced loop
    is_clean: Callable[[], bool] = lambda: True  # whether there are no findings so far
    copy_steps: bool = True  # trace some steps of a long loop, and copy those that repeat them
    shorts: ShortTraces = field(default_factory=ShortTraces)  # traces of such steps, for loops of other lengths


def build(
    function: Callable[..., None],
    args: tuple[Any, ...],
    descriptor: Descriptor,
    num_reqs: int | None,
    settings: Settings,
) -> tuple[Emission, BuildReport]:
    """Build ``function(*args)`` for ``num_reqs`` rows; None makes the argument ``num_reqs`` the one size symbol.

    An emission of the whole graph that fails its check is replaced by segments, with the evidence in the report.
    """
    start = time.perf_counter()
    traced = traced_loop(function, args, "num_reqs" if num_reqs is None else None, descriptor, settings)
    seconds = time.perf_counter() - start
    try:
        trial = no_trial if traced.tried else of_trace(function, args, traced, descriptor.num_reqs).check
        return finish(traced, descriptor.num_steps, num_reqs, seconds, settings, descriptor.kind, trial)
    except EmissionError as error:
        if settings.emission == "segments":
            raise
        emission, report = build(function, args, descriptor, num_reqs, replace(settings, emission="segments"))
        report.refused = str(error)
        return emission, report


def traced_loop(
    function: Callable[..., None],
    args: tuple[Any, ...],
    symbolic: str | None,
    descriptor: Descriptor,
    settings: Settings,
) -> Trace:
    """The trace of all steps: of a few, extended, where the rest repeat them and the loop has no collectives.

    They are seen to repeat at the descriptor's rows, whatever number of rows ``args`` traces with.
    """
    k = descriptor.num_steps
    copies = settings.copy_steps and k >= TRACED_STEPS and descriptor.kind != PREFILL and not is_parallel()
    short = (*args[:-2], TRACED_STEPS, args[-1], True) if copies else args
    entry = None if is_parallel() else entry_for(function, args, short, symbolic, descriptor)
    if entry is not None and (known := entry.load()) is not None:
        if of_trace(function, args, known, descriptor.num_reqs).agrees():
            known.tried = True
            return known
        entry.said = "the IR on disk was not used: the loop computes something else now"
    codes: list[CodeType] = []
    if copies:
        part = Short(function, short, symbolic, k, with_facts=entry is not None)
        traced = traced_in_part(part, args, descriptor, codes, settings)
    else:
        traced = trace(function, args, symbolic, note_facts=entry is not None)
    if entry is not None:
        entry.take(traced, codes)
    return traced


def traced_in_part(
    short: Short, args: tuple[Any, ...], descriptor: Descriptor, codes: list[CodeType], settings: Settings
) -> Trace:
    """The trace of ``short``, extended to all steps; of all of them where the rest do not repeat these.

    That of an earlier build is used again where it still is the loop's; findings are made anew each time.
    """
    known = settings.shorts.load(short) if settings.is_clean() else None
    try:
        traced = known or _fresh(short, settings)
        extend(traced, short.k)
        _guard_copied_steps(traced, short, args, descriptor, codes)
        _try(traced, short.function, args, descriptor)
    except Irregular as reason:
        settings.shorts.drop(short)
        codes.clear()
        if known is not None and isinstance(reason, _Parted):
            return traced_in_part(short, args, descriptor, codes, settings)
        traced = trace(short.function, args, short.symbolic)
        traced.irregular = str(reason)
    return traced


def _fresh(short: Short, settings: Settings) -> Trace:
    """The trace of ``short``, kept for other builds.

    Raises:
        Irregular: its last step advances, that of the loop does not, and only that may be why it has no trace.
    """
    try:
        traced = trace(short.function, short.args, short.symbolic, short.with_facts)
    except (UntraceableLoopError, UnsafeLoopError) as error:
        if short.k > TRACED_STEPS:
            raise
        raise Irregular(f"a last step that advances has no trace: {error.what}") from error
    settings.shorts.keep(short, traced)
    return traced


def _guard_copied_steps(
    traced: Trace, short: Short, args: tuple[Any, ...], descriptor: Descriptor, codes: list[CodeType]
) -> None:
    """See that the steps which were not traced repeat those that were, and guard what they read beside them."""
    traced.copied_steps = short.k - TRACED_STEPS
    if traced.copied_steps:
        traced.reads = reads_of_copied_steps(short.function, (args[0], descriptor.num_reqs, *args[2:]), codes)
        traced.baked = with_siblings(traced.baked, {"spec": args[0]})


def _try(traced: Trace, function: Callable[..., None], args: tuple[Any, ...], descriptor: Descriptor) -> None:
    """The trial of an extended trace: where it parts from the loop, a trace of all steps shows whose fault it is."""
    if any(map(ir.is_higher_order, traced.graph.nodes)):
        raise Irregular("it calls a raw kernel or a sub-graph, which no trial can run")
    start = time.perf_counter()
    if not of_trace(function, args, traced, descriptor.num_reqs).agrees():
        raise _Parted("its steps, as they repeat, do not compute what the loop computes")
    traced.tried, traced.trial_seconds = True, time.perf_counter() - start


class _Parted(Irregular):
    """The trial of an extended trace found another program."""


def reads_of_copied_steps(
    function: Callable[..., None], args: tuple[Any, ...], codes: list[CodeType] | None = None
) -> list[Read]:
    """Run the loop of ``args`` (rows second, draft tokens before the tap) once; what only copied steps read.

    Python state and memory are put back. ``codes`` takes the user's code that ran.

    Raises:
        Irregular: the steps differ, or what they read cannot be guarded; the message says how.
        TooManyEntries: they read tables that are too large to be guarded.
    """
    *front, k, _ = args
    state, reads = python_state.of_speculator(front[0]), AttributeReads(front[0])
    with all_kept(state):
        different = difference(lambda tap: function(*front, k, tap), k, reads, codes)
    if different is not None:
        raise Irregular(different)
    try:
        found: dict[Any, Read] = {}
        for read in reads.behind_traced():
            found[read.key] = read
            check_number(len(found), read.label)
    except ChangedRead as reason:
        raise Irregular(str(reason)) from reason
    return list(found.values())


def finish(
    traced: Trace,
    k: int,
    num_reqs: int | None,
    trace_seconds: float,
    settings: Settings,
    kind: str = "step",
    trial: Callable[[], str] = no_trial,
) -> tuple[Emission, BuildReport]:
    """Passes and emission of a traced loop, and the report on both; ``trial`` looks at the trace before them."""
    settings.inspect(traced)
    refuse_outputs(traced)
    refuse_higher_order(traced)
    refuse_hooks(traced)
    start = time.perf_counter()
    trial_note = trial()
    trial_seconds = time.perf_counter() - start
    keep(traced, settings)
    steps = passes_for(traced, small=has_own_kernel if settings.compiler == "inductor" else never)
    ordered = collectives_of(traced.graph)
    refused = COLLECTIVES_IN_SEGMENTS if ordered and settings.emission == "whole" else ""
    settings = replace(settings, emission="segments") if refused else settings
    whole = settings.emission == "whole" and settings.compiler == "inductor"
    # In a whole graph the refresh stays values: Inductor fuses it with what reads it.
    disable = {*settings.disable, "lower_metadata_refresh"} if whole else settings.disable
    done = passes.run(traced.graph, steps, disable=disable, dump=settings.dump)
    assert [n for n in traced.graph.nodes if n in ordered] == ordered, "a pass moved or removed a collective"
    emission = emit(
        traced.graph,
        traced.fake_mode,
        traced.tensors,
        compiler=settings.compiler,
        emission=settings.emission,
        options=settings.options,
        progress=settings.progress,
    )
    report = report_on(emission, k, num_reqs, done, trace_seconds, kind, settings)
    report.baked, report.reads, report.refused = traced.baked, traced.reads, refused
    report.trial, report.trial_seconds = trial_note, traced.trial_seconds + trial_seconds
    report.copied_steps, report.irregular, report.again = traced.copied_steps, traced.irregular, traced.again
    report.entry, report.stored = traced.entry, traced.entry.said if traced.entry is not None else ""
    return emission, report


def keep(traced: Trace, settings: Settings) -> None:
    """Put a fresh trace on disk; one with findings is traced each time, so that they are made each time."""
    if traced.entry is not None and settings.is_clean():
        traced.entry.save(traced)


def passes_for(traced: Trace, keep_taps: bool = False, small: passes.Applies = never) -> tuple[passes.Pass, ...]:
    """The pipeline, with what the operators of this loop touch beyond their arguments."""
    effects = effects_in(traced.graph, traced.tensors)
    explicit = partial(explicit_metadata, effects=effects, wrap=register_hidden)
    return passes.pipeline(
        register=register_refresh, hidden_reads=hidden_reads, small=small, explicit=explicit, keep_taps=keep_taps
    )


def report_on(
    emission: Emission,
    k: int,
    num_reqs: int | None,
    done: list[passes.PassReport],
    trace_seconds: float,
    kind: str,
    settings: Settings,
) -> BuildReport:
    """What a build came to."""
    items = emission.program.items
    return BuildReport(
        kind=kind,
        k=k,
        num_reqs=num_reqs,
        nodes=len(emission.graph.nodes),
        passes=done,
        segments=len(emission.calls),
        unique_segments=emission.unique,
        opaque_calls=sum(isinstance(i, fx.Node) for i in items),
        trace_seconds=trace_seconds,
        compile_seconds=emission.seconds,
        emission=settings.emission,
    )


def refuse_outputs(traced: Trace) -> None:
    """A value that leaves the traced loop was bound to an attribute: a replay would never bind it again."""
    for node in traced.output_nodes:
        raise UnsafeLoopError(
            "the loop binds a tensor that it makes to a persistent attribute",
            f"a tensor of shape {tuple(map(str, ir.value(node).shape))}",
            "writes into tensors that exist before the loop",
            "Allocate the tensor once, and copy_ into it.",
            ir.source_line(node),
        )


def refuse_higher_order(traced: Trace) -> None:
    """A raw Triton launch or a traced sub-graph says nothing of what it reads and writes."""
    for node in filter(ir.is_higher_order, traced.graph.nodes):
        raise UnsafeLoopError(
            "the loop calls a raw kernel or a sub-graph",
            str(node.target),
            "registered operators, whose schema says what they write",
            "Wrap the call in an operator (torch.library) with exact mutates_args.",
            ir.source_line(node),
        )


def refuse_hooks(traced: Trace) -> None:
    """The runtime calls lifecycle hooks around a replay: their operators inside it would run a second time."""
    for node in traced.graph.nodes:
        if "in run_hook" in str(node.meta.get("stack_trace", "")):
            raise computing_hook(str(node.target), ir.source_line(node))
