"""The whole lint: what the graph shows, what Python does beside it, and whether tracing twice gives one graph.

:func:`lint` runs all of it, alone; :class:`draftfuse.inspector.Inspector` runs the cheap part at the first build.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from draftfuse import loop, python_state, validate
from draftfuse.errors import (
    DraftfuseError,
    OpArgumentError,
    SourceLine,
    UnsafeLoopError,
    UnstableMetadataError,
    UntraceableLoopError,
)
from draftfuse.groups import cuda_backend
from draftfuse.hidden_reads import HiddenReads
from draftfuse.journal import Journal
from draftfuse.passes import ir
from draftfuse.passes.capture_safety import Surroundings, capture_safety
from draftfuse.passes.collectives import collectives_of, group_of
from draftfuse.passes.findings import ERROR, WARNING, Finding, merged, unread_comments
from draftfuse.passes.render import canonical, render_args, render_target
from draftfuse.probe import PROBED_STEPS, fill_live, named_failures, of_sync, probe, probe_prefill, with_fusion
from draftfuse.state import fill_dummy
from draftfuse.trace import Trace, trace
from draftfuse.trial import of_trace
from draftfuse.writers import is_library

NEEDED = "nothing can be compiled with it"
RUNS_EAGER = "; draft prefill runs eagerly because of it"


def lint(spec: Any, k: int | None = None, num_reqs: int = 2) -> list[Finding]:
    """Everything that is wrong, or doubtful, with the draft loop of ``spec``; errors first.

    Traces the decode steps twice (once where that shows an error) and draft prefill once, and runs both once, eagerly,
    on dummy rows; inputs, KV slots and Python state are as before afterwards. Findings that a
    ``# draftfuse: allow[<class>] reason`` comment covers carry that reason; those that compiling cannot do without say
    so. What only keeps draft prefill from being fused is a warning: it runs eagerly then.

    Raises:
        InvalidSpeculatorError: the object is no speculator.
    """
    validate.check_speculator(spec)
    k = min(k or spec.num_speculative_tokens, PROBED_STEPS + 1)
    rows = min(num_reqs, spec.max_num_reqs)
    journal, state = Journal(), python_state.of_speculator(spec)
    for tensor in [*spec.inputs.named_tensors().values(), *(g.slot_mapping for g in spec.attn_groups)]:
        journal.keep(tensor)
    try:
        with torch.no_grad():
            return merged([*_everything(spec, rows, k), *unread_comments(_lines_of(spec))])
    finally:
        state.restore()
        journal.restore()


def _everything(spec: Any, rows: int, k: int) -> Iterator[Finding]:
    reads = HiddenReads(spec)
    yield from _caught(lambda syncs: _of_decode(spec, rows, k, reads, syncs))
    yield from _caught(lambda syncs: _of_prefill(spec, rows, reads, syncs))
    yield from reads.findings


def _caught(look: Callable[[list[SourceLine]], Iterator[Finding]]) -> Iterator[Finding]:
    """What ``look`` finds, and the error that ends it as one more finding."""
    syncs: list[SourceLine] = []
    try:
        yield from look(syncs)
    except (UntraceableLoopError, UnsafeLoopError, UnstableMetadataError, OpArgumentError) as error:
        yield (found := of_error(error))
        if found.name == "python-branch":  # Dynamo names the branch, and not where its condition came to the host
            yield from (of_sync(line) for line in syncs if line != found.source)


def _of_decode(spec: Any, rows: int, k: int, reads: HiddenReads, syncs: list[SourceLine]) -> Iterator[Finding]:
    """Draft steps 1..k-1."""
    fill_live(spec, rows)
    found = probe(spec, rows, k, reads, syncs, live=True)
    if k < 2:
        yield from found
        return
    fill_dummy(spec, rows)
    try:
        first = trace(loop.decode_loop, (spec, rows, k, loop.graph_tap))
    except UntraceableLoopError:
        yield from found
        raise
    found = [*(with_fusion(f, first.baked) for f in found), *_not_again(of_graph(spec, first), found)]
    yield from found
    if not any(f.is_error for f in merged(found)):
        yield from unstable(spec, rows, k, first)
        of_trace(loop.decode_loop, (spec, rows, k, loop.graph_tap), first, rows).check()


def _not_again(graph: list[Finding], found: list[Finding]) -> Iterator[Finding]:
    """Findings of the graph but for tensors that are kept, where the run has shown the line that keeps them."""
    is_known = any(f.name == "fresh-allocation" and f.is_error for f in found)
    yield from (f for f in graph if not (is_known and f.name == "fresh-allocation"))


def _of_prefill(spec: Any, rows: int, reads: HiddenReads, syncs: list[SourceLine]) -> Iterator[Finding]:
    """Draft step 0. What fails there is an error; what cannot be captured runs eagerly."""
    query_len = query_len_of(spec, rows)
    fill_live(spec, rows, query_len)
    yield from map(runs_eager, probe_prefill(spec, rows, query_len, reads, syncs, live=True))
    fill_dummy(spec, rows, query_len)
    try:
        traced = trace(loop.prefill_loop, (spec, rows, query_len))
        yield from map(runs_eager, of_graph(spec, traced))
    except (UntraceableLoopError, UnsafeLoopError) as error:
        yield runs_eager(of_error(error))


def query_len_of(spec: Any, rows: int) -> int:
    """Tokens of each of ``rows`` rows in a draft prefill: K+1, as far as the inputs, one page and the length allow."""
    room: int = min([spec.inputs.positions.shape[0] // rows, *(group.page_size for group in spec.attn_groups)])
    most: int = min(spec.num_speculative_tokens + 1, spec.max_model_len)
    return max(1, min(room, most))


def runs_eager(finding: Finding) -> Finding:
    """A finding of draft prefill: what would be an error in the decode steps costs launches here, and no draft."""
    if finding.severity != ERROR:
        return finding
    return replace(finding, severity=WARNING, text=finding.text + RUNS_EAGER, needed="")


def _lines_of(spec: Any) -> Iterator[SourceLine]:
    """The user's lines in the classes of a speculator and its builders."""
    objects = (spec, *(group.builder for group in spec.attn_groups))
    for klass in dict.fromkeys(base for found in objects for base in type(found).__mro__ if not is_library(base)):
        try:
            lines, start = inspect.getsourcelines(klass)
            file = inspect.getsourcefile(klass) or "?"
        except (OSError, TypeError):
            continue
        yield from (SourceLine(file, start + i, text.strip()) for i, text in enumerate(lines) if "draftfuse:" in text)


def of_graph(spec: Any, traced: Trace) -> list[Finding]:
    """The findings of the graph rules."""
    return capture_safety(traced.graph, surroundings(spec, traced))


def surroundings(spec: Any, traced: Trace) -> Surroundings:
    """What stands behind the placeholders of ``traced``."""
    reachable = {_key(t) for t in python_state.of_speculator(spec, wide=False).tensors.values()}
    pools = {_key(t) for g in spec.attn_groups for pair in g.kv_caches.values() for t in pair}
    slots = {_key(g.slot_mapping) for g in spec.attn_groups}
    live = traced.tensors
    return Surroundings(
        owned={n for n, t in live.items() if _key(t) in reachable or _is_argument(traced, n)},
        constant={n for n, t in live.items() if isinstance(t, torch.nn.Parameter)},
        kv={n for n, t in live.items() if _key(t) in pools},
        slots={n for n, t in live.items() if _key(t) in slots},
        positions={n for n, t in live.items() if _key(t) == _key(spec.inputs.positions)},
        max_model_len=spec.max_model_len,
        front=traced.front,
        on_cuda=spec.inputs.positions.device.type == "cuda",
        backends={name: cuda_backend(name) for name in map(group_of, collectives_of(traced.graph))},
    )


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_argument(traced: Trace, name: str) -> bool:
    """Whether a tensor came in as metadata that a split step is given."""
    node = next(n for n in ir.placeholders(traced.graph) if n.name == name)
    return str(node.meta.get("source", "")).startswith("L['metadata']")


def unstable(spec: Any, rows: int, k: int, first: Trace) -> Iterator[Finding]:
    """Trace again in the Python state that one eager run leaves behind."""
    before = python_state.of_speculator(spec)
    journal = Journal(check_indices=False)
    try:
        with journal, named_failures():
            loop.decode_loop(spec, rows, k)
        second = trace(loop.decode_loop, (spec, rows, k, loop.graph_tap))
    finally:
        journal.restore()
        before.restore()
    if canonical(first.graph) != canonical(second.graph):
        text, source = _difference(first, second)
        todo = "Keep nothing from one call to the next in Python: no memo, no flag for the first call."
        yield Finding(ERROR, "unstable-trace", f"tracing again after one run gives another graph: {text}", todo, source)


def _difference(first: Trace, second: Trace) -> tuple[str, SourceLine | None]:
    """The first operators that differ, in words, and the user's line of one of them."""
    for was, now in zip_longest(_operators(first), _operators(second), fillvalue=("nothing", None)):
        if was[0] != now[0]:
            return f"{was[0]} became {now[0]}", was[1] or now[1]
    return "the same operators read other tensors", None


def _operators(traced: Trace) -> list[tuple[str, SourceLine | None]]:
    """Each operator with its numbers, and its line."""
    names = dict.fromkeys(traced.graph.nodes, "_")
    nodes = [n for n in traced.graph.nodes if n.op == "call_function"]
    return [(f"{render_target(n)}({render_args(n, names)})", ir.source_line(n)) for n in nodes]


def of_error(error: DraftfuseError) -> Finding:
    """An error of tracing or probing as a finding."""
    given = getattr(error, "finding", None)
    if isinstance(given, Finding):
        return given
    text = f"{error.what}: got {error.came}, expected {error.expected}"
    return Finding(ERROR, _name_of(error), text, error.todo, error.source, needed=NEEDED)


def _name_of(error: DraftfuseError) -> str:
    if isinstance(error, OpArgumentError):
        return "failure"
    text = f"{error.what} {error.came} {error.todo}"
    known = getattr(error, "name", "")
    return known or next((name for part, name in _BY_TEXT.items() if part in text), "untraceable")


_BY_TEXT = {
    "the trace of the loop computes something else": "other-program",
    "compiles loops that draft one token": "loop-kind",
    "leaves its table": "short-table",
    "metadata changes its layout": "side-effect",
}
